"""Prompts of any form -> token ids that the model can take. Every prompt of a job passes through here."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import Any, NamedTuple

from cbatch.errors import RowError
from cbatch.rows.special_tokens import SpecialTokens
from cbatch.rows.text_bound import most_bytes

_COUNTED = 16  # characters a token on average; for a text below that it is not asked how long one may be


class Encoded(NamedTuple):
    """The tokens of a prompt."""

    token_ids: list[int]
    num_truncated_tokens: int | None = (
        0  # that it lost, because it was too long; None: so many that they were not counted
    )


class Encoder:
    """Makes the token ids of a prompt, and checks them; RowError says why there are none."""

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        max_model_len: int,
        truncate: str | None = None,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        """`truncate`: the side, left or right, from which a prompt that is too long is shortened. `eos_token_ids`: of the
        model; a tokenizer that ends every text with one of them is not followed in that.
        """
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._max_model_len, self._truncate, self._eos = max_model_len, truncate, eos_token_ids
        self.special = SpecialTokens(tokenizer)

    def __call__(self, prompt: Any, max_tokens: int, is_rendered: bool = False, is_hidden: bool = False) -> Encoded:
        """The token ids of a text or of token ids. `is_rendered`: the text comes from a chat template, which spells out
        every special token, BOS included. `is_hidden`: `special` has hidden those that the text only spells. Cut to leave
        room for `max_tokens` if it is too long and may be shortened.
        """
        if not isinstance(prompt, str):
            return self._fitting(self._given(prompt), max_tokens)
        text = self._within_bound(prompt)
        ids = self._encode(text, not is_rendered, is_hidden)
        encoded = self._fitting(ids if is_rendered else self._without_extras(ids, text), max_tokens)
        return encoded if text is prompt else encoded._replace(num_truncated_tokens=None)

    def spell(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens included."""
        return str(self._tokenizer.decode(token_ids))

    def _given(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, list):
            raise RowError("invalid_prompt", f"a prompt must be a text, messages or token ids, not {prompt!r:.80}")
        return list(prompt)

    def _within_bound(self, text: str) -> str:
        """A text that is not certain to be too long, because tokenizing takes time and memory; shortened if it may be."""
        if (
            len(text) <= self._max_model_len * _COUNTED
            or (size := len(text.encode(errors="replace"))) <= self._most_bytes
        ):
            return text
        if self._truncate is None:
            raise RowError(
                "prompt_too_long",
                f"the prompt has {size:,} bytes; {self._most_bytes:,} are more than {self._max_model_len:,} tokens can hold",
            )
        return text[-self._most_bytes :] if self._truncate == "left" else text[: self._most_bytes]

    @cached_property
    def _most_bytes(self) -> int:
        """The bytes of the longest text that is tokenized."""
        return most_bytes(self._tokenizer, self._max_model_len)

    def _encode(self, text: str, add_special_tokens: bool, is_hidden: bool = False) -> list[int]:
        try:
            if is_hidden:
                return self.special.encode(text, add_special_tokens)
            ids: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        except (RowError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # such as half a surrogate pair that a template made; tokenizers may panic
            raise RowError("invalid_prompt", f"can't be tokenized: {error}") from None
        return ids

    def _without_extras(self, ids: list[int], text: str) -> list[int]:
        """The ids of a plain text without the end that the tokenizer puts behind it, after which a model begins anew, and
        without a second BOS where the text itself spells the first.
        """
        if self._num_ends:
            ids = ids[: -self._num_ends]
        bos = getattr(self._tokenizer, "bos_token_id", None)
        doubled = bos is not None and ids[:2] == [bos, bos] and text.startswith(self._tokenizer.bos_token)
        return ids[1:] if doubled and not text.startswith(self._tokenizer.bos_token * 2) else ids

    @cached_property
    def _num_ends(self) -> int:
        """How many end-of-sequence tokens the tokenizer puts behind a text."""
        bare, whole = self._encode("a", add_special_tokens=False), self._encode("a", add_special_tokens=True)
        starts = [start for start in range(len(whole)) if whole[start : start + len(bare)] == bare]
        behind = whole[starts[0] + len(bare) :] if bare and starts else []
        return next((n for n, token in enumerate(reversed(behind)) if token not in self._eos), len(behind))

    def _fitting(self, token_ids: list[int], max_tokens: int) -> Encoded:
        """Token ids that the model takes and that fit into its context."""
        token_ids = self._checked(token_ids)
        return Encoded(token_ids) if len(token_ids) < self._max_model_len else self._truncated(token_ids, max_tokens)

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
