"""Prompts of any form -> token ids that the model can take. Every prompt of a job passes through here."""

from __future__ import annotations

from typing import Any, NamedTuple

from cbatch.errors import RowError


class Encoded(NamedTuple):
    """The tokens of a prompt."""

    token_ids: list[int]
    num_truncated_tokens: int = 0  # that it lost, because it was too long


class Encoder:
    """Makes the token ids of a prompt, and checks them; RowError says why there are none."""

    def __init__(self, tokenizer: Any, vocab_size: int, max_model_len: int, truncate: str | None) -> None:
        """`truncate`: the side, left or right, from which a prompt that is too long is shortened."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._max_model_len, self._truncate = max_model_len, truncate

    def __call__(self, prompt: Any, max_tokens: int, is_rendered: bool = False) -> Encoded:
        """The token ids of a text or of token ids. `is_rendered`: the text comes from a chat template, which spells out
        every special token, BOS included. Cut to leave room for `max_tokens` if it is too long and may be shortened.
        """
        token_ids = self._checked(self._token_ids(prompt, is_rendered))
        return Encoded(token_ids) if len(token_ids) < self._max_model_len else self._truncated(token_ids, max_tokens)

    def spell(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens included."""
        return str(self._tokenizer.decode(token_ids))

    def _token_ids(self, prompt: Any, is_rendered: bool) -> list[int]:
        if isinstance(prompt, str):
            return self._encode(prompt, add_special_tokens=False) if is_rendered else self._encode_raw(prompt)
        if not isinstance(prompt, list):
            raise RowError("invalid_prompt", f"a prompt must be a text, messages or token ids, not {prompt!r:.80}")
        return list(prompt)

    def _encode_raw(self, text: str) -> list[int]:
        """The tokens of `text`, with the special tokens that the tokenizer adds; a BOS in the text is not doubled."""
        ids = self._encode(text, add_special_tokens=True)
        bos = getattr(self._tokenizer, "bos_token_id", None)
        doubled = bos is not None and ids[:2] == [bos, bos] and text.startswith(self._tokenizer.bos_token)
        return ids[1:] if doubled and not text.startswith(self._tokenizer.bos_token * 2) else ids

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            ids: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        except Exception as error:  # such as half a surrogate pair that a template made
            raise RowError("invalid_prompt", f"can't be tokenized: {error}") from None
        return ids

    def _checked(self, token_ids: list[int]) -> list[int]:
        """Token ids that are all in the model's vocabulary, wherever they come from."""
        if not token_ids:
            raise RowError("empty_prompt", "the prompt has no tokens")
        if wrong := [token for token in token_ids if not 0 <= token < self._vocab_size]:
            raise RowError("invalid_prompt", f"token id {wrong[0]} is outside the vocabulary of {self._vocab_size}")
        return token_ids

    def _truncated(self, token_ids: list[int], max_tokens: int) -> Encoded:
        """A prompt that is too long, cut to leave room for `max_tokens`, but to no less than half of the context."""
        if self._truncate is None:
            raise RowError(
                "prompt_too_long",
                f"the prompt has {len(token_ids)} tokens; with one to generate, {self._max_model_len} fit",
            )
        keep = max(self._max_model_len - max_tokens, self._max_model_len // 2)
        kept = token_ids[-keep:] if self._truncate == "left" else token_ids[:keep]
        return Encoded(kept, len(token_ids) - len(kept))


def is_token_ids(prompt: list[Any]) -> bool:
    """Whether a list holds token ids, not messages."""
    return all(type(token) is int for token in prompt)
