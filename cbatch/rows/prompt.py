"""Rows -> requests: the token ids of a row's prompt, its sampling parameters, its random key."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from cbatch.config import PromptConfig, SamplingParams
from cbatch.errors import RowError, UsageError
from cbatch.rows import openai
from cbatch.rows.conversation import Conversations
from cbatch.rows.encode import Encoded, Encoder, is_token_ids
from cbatch.rows.identity import Identities
from cbatch.rows.remarks import is_like_a_setting
from cbatch.rows.request import Request, Row
from cbatch.rows.template import compiled_template
from cbatch.rows.values import as_text

_SHOWN_TOKENS = 5


class PromptBuilder:
    """Builds requests from rows; RowError says why a row can't become one."""

    def __init__(
        self,
        config: PromptConfig,
        sampling: SamplingParams,
        tokenizer: Any,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Collection[int] = (),
        model: str = "",
    ) -> None:
        """`model`: its name, as the user wrote it."""
        self.config, self.sampling, self.max_model_len = config, sampling, max_model_len
        self._model = model
        self._conversations = Conversations(tokenizer, config.system)
        self._encoder = Encoder(tokenizer, vocab_size, max_model_len, config.truncate, eos_token_ids)
        if config.special_tokens_in_text == "plain" and not self._encoder.special.can_hide:
            raise UsageError("--special-tokens-in-text plain: this model's tokenizer can't do that")
        if config.chat and not self._conversations.has_template:
            raise UsageError("--chat: this model has no chat template; use --raw")
        self.chat = self._conversations.has_template if config.chat is None else config.chat
        self._template = compiled_template(config.template) if config.template else None
        self._special_tokens = _special_tokens(tokenizer)
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
        return self._encoder.spell(self._request(row, "").token_ids)

    def last_tokens(self, row: Row) -> str:
        """The last tokens of a row's prompt for people, with their ids."""
        ids = self._request(row, "").token_ids[-_SHOWN_TOKENS:]
        return ", ".join(f"{token} {self._encoder.spell([token])!r}" for token in ids)

    def _request(self, row: Row, identity: str) -> Request:
        prompt, overrides = self._prompt_and_params(row)
        params = self._with_special_stops(self._params(overrides))
        chat = isinstance(prompt, list) and not is_token_ids(prompt)
        spells_special = self._encoder.special.are_in(prompt)
        hides = spells_special and self._hides(chat)
        if hides:
            prompt = self._encoder.special.hide(prompt)
        if chat:
            prompt = self._conversations.render(prompt)
        encoded = self._encoder(prompt, params.max_tokens, is_rendered=chat, is_hidden=hides)
        remarks = tuple(self._remarks(row, encoded, spells_special))
        key = self._random_key(identity, overrides)
        return Request(row, encoded.token_ids, params, key, chat, encoded.num_truncated_tokens, remarks)

    def _hides(self, chat: bool) -> bool:
        """Whether special tokens that a text only spells are plain text. A raw prompt is all its user's, so there they are not."""
        default = "plain" if chat and self._encoder.special.can_hide else "encode"
        return (self.config.special_tokens_in_text or default) == "plain"

    def _remarks(self, row: Row, encoded: Encoded, spells_special: bool) -> Iterator[str]:
        """What is worth knowing about a row that runs."""
        if encoded.num_truncated_tokens != 0:
            yield "truncated"
        if spells_special:
            yield "special_tokens"
        if openai.is_request(row) and openai.names_other_model(row, self._model):
            yield "other_model"
        if any(map(is_like_a_setting, row.data)):
            yield "setting_as_column"

    def _prompt_and_params(self, row: Row) -> tuple[Any, Any]:
        """A row's prompt (text, messages or token ids) and its own sampling parameters, both still unchecked."""
        row = replace(row, data=as_text(row.data))
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

    def _with_special_stops(self, params: SamplingParams) -> SamplingParams:
        """`params` with the tokens of stop texts that are special tokens, which never show up in the text of a completion."""
        found = [self._special_tokens[text] for text in params.stop if text in self._special_tokens]
        return replace(params, stop_token_ids=(*params.stop_token_ids, *found)) if found else params

    def _random_key(self, identity: str, overrides: Any) -> int:
        """64 bits that a row's random numbers are drawn with: from its own seed, else the job's and its identity."""
        own_seed = overrides.get("seed") if isinstance(overrides, dict) else None
        text = f"{self.sampling.seed}|{identity}" if own_seed is None else f"{own_seed}"
        return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest(), "little")


def _column_names(data: dict[str, Any]) -> str:
    return ", ".join(repr(name) for name in data) or "none"


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    """The ids of a tokenizer's special tokens, by their texts."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(token): token_id for token_id, token in added.items() if getattr(token, "special", False)}
