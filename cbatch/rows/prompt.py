"""Rows -> requests: the token ids of a row's prompt, its sampling parameters, its random key."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from cbatch.config import PromptConfig, SamplingParams
from cbatch.errors import RowError, UsageError
from cbatch.rows import openai
from cbatch.rows.conversation import cleaned_message
from cbatch.rows.identity import Identities
from cbatch.rows.request import Request, Row
from cbatch.rows.template import compiled_template


class PromptBuilder:
    """Builds requests from rows; RowError says why a row can't become one."""

    def __init__(
        self,
        config: PromptConfig,
        sampling: SamplingParams,
        tokenizer: Any,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self.config, self.sampling, self.tokenizer = config, sampling, tokenizer
        self.max_model_len, self.vocab_size = max_model_len, vocab_size
        self.has_chat_template = bool(getattr(tokenizer, "chat_template", None))
        if config.chat and not self.has_chat_template:
            raise UsageError("--chat: this model has no chat template; use --raw")
        self.chat = self.has_chat_template if config.chat is None else config.chat
        if config.system is not None and not self.has_chat_template:
            raise UsageError("--system: this model has no chat template")
        self._template = compiled_template(config.template) if config.template else None
        self._identities = Identities()

    def __call__(self, row: Row) -> Request:
        """The request of a row; call this or `skip` for every row, in the order of the input."""
        if row.problem:
            raise row.problem
        identity = self._identities.identify(row)
        try:
            return self._request(row, identity)
        except RowError as error:
            raise error.at(row.where) from None

    def skip(self, row: Row) -> None:
        """Pass over a row that is done, so that later rows get the random keys that they would get behind it."""
        if not row.problem:
            self._identities.identify(row)

    def reseed(self, seed: int) -> None:
        """Draw with this seed, the one of an earlier run, from now on."""
        self.sampling = replace(self.sampling, seed=seed)

    def render(self, row: Row) -> str:
        """The prompt of a row as the model sees it, special tokens included."""
        return str(self.tokenizer.decode(self._request(row, "").token_ids))

    def _request(self, row: Row, identity: str) -> Request:
        prompt, overrides = self._prompt_and_params(row)
        params = self._params(overrides)
        token_ids = self._token_ids(prompt)
        if not token_ids:
            raise RowError("empty_prompt", "the prompt has no tokens")
        if len(token_ids) >= self.max_model_len:
            token_ids = self._truncated(token_ids, params.max_tokens)
        chat = isinstance(prompt, list) and not _is_token_ids(prompt)
        return Request(row, token_ids, params, self._random_key(identity, overrides), chat)

    def _prompt_and_params(self, row: Row) -> tuple[Any, Any]:
        """A row's prompt (text, messages or token ids) and its own sampling parameters, both still unchecked."""
        if openai.is_request(row):
            return openai.prompt_and_params(row)
        prompt = self._prompt(row.data)
        if isinstance(prompt, str) and self.chat:
            prompt = [{"role": "user", "content": prompt}]
        return prompt, row.data.get("params")

    def _prompt(self, data: dict[str, Any]) -> Any:
        """What the template makes of a row, or what its prompt column holds."""
        if self._template:
            try:
                return self._template.render(data)
            except Exception as error:  # whatever the user's template raises is about this row
                raise RowError("template_error", f"--template: {error}") from None
        column = self.config.prompt_column
        for name in (column, "messages", "token_ids"):
            if data.get(name) is None:
                continue
            if name != column and not isinstance(data[name], list):
                raise RowError("invalid_prompt", f"column {name!r} must hold a list, not {data[name]!r:.80}")
            return data[name]
        if column in data:
            raise RowError("invalid_prompt", f"column {column!r} is null")
        raise RowError(
            "missing_prompt", f"no column {column!r}, 'messages' or 'token_ids'; there are: {_column_names(data)}"
        )

    def _params(self, overrides: Any) -> SamplingParams:
        """The job's sampling parameters with those of a row in their place."""
        if overrides is None:
            return self.sampling
        if not isinstance(overrides, dict):
            raise RowError("invalid_params", "params must be an object")
        try:
            return self.sampling.override(overrides)
        except ValueError as error:
            raise RowError("invalid_params", str(error)) from None

    def _token_ids(self, prompt: Any) -> list[int]:
        """The tokens of a prompt of any form."""
        if isinstance(prompt, str):
            return self._encode_raw(prompt)
        if not isinstance(prompt, list):
            raise RowError("invalid_prompt", f"a prompt must be a text, messages or token ids, not {prompt!r:.80}")
        if not _is_token_ids(prompt):
            return self._encode_chat(prompt)
        if wrong := [token for token in prompt if not 0 <= token < self.vocab_size]:
            raise RowError("invalid_prompt", f"token id {wrong[0]} is outside the vocabulary of {self.vocab_size}")
        return list(prompt)

    def _encode_raw(self, text: str) -> list[int]:
        """The tokens of `text`, with the special tokens that the tokenizer adds; a BOS in the text is not doubled."""
        ids = self._encode(text, add_special_tokens=True)
        bos = getattr(self.tokenizer, "bos_token_id", None)
        doubled = bos is not None and ids[:2] == [bos, bos] and text.startswith(self.tokenizer.bos_token)
        return ids[1:] if doubled and not text.startswith(self.tokenizer.bos_token * 2) else ids

    def _encode_chat(self, messages: list[Any]) -> list[int]:
        """The tokens of a conversation; every special token, BOS included, comes from the model's template."""
        if not self.has_chat_template:
            raise RowError("invalid_prompt", "this model has no chat template, so it can't take messages")
        conversation = [cleaned_message(message) for message in messages]
        if self.config.system is not None and conversation[0]["role"] != "system":
            conversation.insert(0, {"role": "system", "content": self.config.system})
        try:
            text = self.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise what they like
            raise RowError("template_error", f"the chat template refuses this conversation: {error}") from None
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            ids: list[int] = self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        except Exception as error:  # such as half a surrogate pair that a template made
            raise RowError("invalid_prompt", f"can't be tokenized: {error}") from None
        return ids

    def _truncated(self, token_ids: list[int], max_tokens: int) -> list[int]:
        """A prompt that is too long, cut to leave room for `max_tokens`, but to no less than half of the context."""
        if self.config.truncate is None:
            raise RowError(
                "prompt_too_long",
                f"the prompt has {len(token_ids)} tokens; with one to generate, {self.max_model_len} fit",
            )
        keep = max(self.max_model_len - max_tokens, self.max_model_len // 2)
        return token_ids[-keep:] if self.config.truncate == "left" else token_ids[:keep]

    def _random_key(self, identity: str, overrides: Any) -> int:
        """64 bits that a row's random numbers are drawn with: from its own seed, else the job's and its identity."""
        own_seed = overrides.get("seed") if isinstance(overrides, dict) else None
        text = f"{self.sampling.seed}|{identity}" if own_seed is None else f"{own_seed}"
        return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest(), "little")


def _is_token_ids(prompt: list[Any]) -> bool:
    return all(type(token) is int for token in prompt)


def _column_names(data: dict[str, Any]) -> str:
    return ", ".join(repr(name) for name in data) or "none"
