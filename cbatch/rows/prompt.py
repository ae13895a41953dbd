"""Rows -> requests: the token ids of a row's prompt, its sampling parameters, its random key."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from cbatch.config import PromptConfig, SamplingParams
from cbatch.errors import RowError, UsageError, first_line
from cbatch.rows import openai
from cbatch.rows.conversation import Conversations
from cbatch.rows.encode import Encoded, Encoder, is_token_ids
from cbatch.rows.identity import Identities
from cbatch.rows.json_object import parse_object
from cbatch.rows.messages import Conversation, conversation_of
from cbatch.rows.remarks import is_like_a_setting
from cbatch.rows.request import Request, Row
from cbatch.rows.template import Template
from cbatch.rows.values import as_text

PROMPT_COLUMNS = ("prompt", "messages", "token_ids")  # a row has its prompt in one of these, unless told otherwise
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
        self._set_date(config.date or datetime.now().isoformat(timespec="seconds"))
        self._encoder = Encoder(tokenizer, vocab_size, max_model_len, config.truncate, eos_token_ids)
        if config.special_tokens_in_text == "plain" and not self._encoder.special.can_hide:
            raise UsageError("--special-tokens-in-text plain: this model's tokenizer can't do that")
        if config.chat and not self._conversations.has_template:
            raise UsageError("--chat: this model has no chat template; use --raw")
        if config.system is not None and not self._conversations.has_template:
            raise UsageError("--system: this model has no chat template")
        self.chat = self._conversations.has_template if config.chat is None else config.chat
        if self.chat:
            self._conversations.check()
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
        except MemoryError:
            raise
        except Exception as error:  # nobody thought of this row; it must not cost the others
            problem = f"{type(error).__name__}: {first_line(error)}. This is a fault of cbatch; please report it"
            raise RowError("internal_error", problem).at(row.where) from error

    def skip(self, row: Row) -> None:
        """Pass over a row that is done, so that later rows get the random keys that they would get behind it."""
        if not row.problem:
            self._identities.identify(row)

    @property
    def asks_for_date(self) -> bool:
        """Whether a template asks for the date, so that prompts depend on it."""
        return "strftime_now" in (self._template.text if self._template else "") or self._conversations.asks_for_date

    def adopt(self, settings: Mapping[str, Any]) -> None:
        """Use the seed and the date that the job's first run drew, from now on."""
        self.sampling = replace(self.sampling, seed=settings["seed"])
        self._set_date(settings["date"])

    def _set_date(self, date: str) -> None:
        """Have templates see this as the current time."""
        self.date, now = date, datetime.fromisoformat(date)
        self._conversations.now = now
        self._template = Template(self.config.template, now) if self.config.template else None

    @property
    def has_chat_template(self) -> bool:
        return self._conversations.has_template

    def is_conversation(self, row: Row) -> bool:
        """Whether a row holds messages, which need a chat template."""
        try:
            prompt = self._prompt_and_params(row)[0]
        except RowError:
            return False
        return isinstance(prompt, list) and not is_token_ids(prompt)

    def render(self, row: Row) -> str:
        """The prompt of a row as the model sees it, special tokens included."""
        return self._encoder.spell(self._request(row, "").token_ids)

    def last_tokens(self, row: Row) -> str:
        """The last tokens of a row's prompt for people, with their ids."""
        ids = self._request(row, "").token_ids[-_SHOWN_TOKENS:]
        return ", ".join(f"{token} {self._encoder.spell([token])!r}" for token in ids)

    def _request(self, row: Row, identity: str) -> Request:
        row_as_text = replace(row, data=as_text(row.data))
        prompt, overrides = self._prompt_and_params(row_as_text)
        params = self._with_special_stops(self._params(overrides))
        conversation = self._conversation(prompt, row_as_text)
        special = self._encoder.special
        spells_special = special.are_in(conversation.texts if conversation else prompt)
        hides = spells_special and self._hides(conversation is not None)
        if conversation:
            prompt = self._rendered(conversation, hides)
        elif hides:
            prompt = special.hide(prompt)
        encoded = self._encoder(prompt, params.max_tokens, is_rendered=conversation is not None, is_hidden=hides)
        remarks = tuple(self._remarks(row, encoded, spells_special, conversation))
        key = self._random_key(identity, overrides)
        chat = conversation is not None
        return Request(row, encoded.token_ids, params, key, chat, encoded.num_truncated_tokens, remarks)

    def _conversation(self, prompt: Any, row: Row) -> Conversation | None:
        """The conversation that a prompt is, with the tools beside it, or that a text becomes; None if it stays what it is."""
        if isinstance(prompt, str) and self.chat and not openai.is_request(row):
            user = [{"role": "user", "content": prompt}]
            return self._conversations.with_system(conversation_of(user, None, None, is_padded=False))
        if not isinstance(prompt, list) or is_token_ids(prompt):
            return None
        beside = openai.beside_messages(row) if openai.is_request(row) else row.data
        if self._template:
            beside = {}  # all columns are the template's
        found = conversation_of(prompt, beside.get("tools"), beside.get("chat_template_kwargs"), row.is_padded)
        return self._conversations.with_system(found)

    def _rendered(self, conversation: Conversation, hides: bool) -> str:
        """The text of a conversation, with marks in the place of the special tokens that its texts only spell if `hides`.

        RowError if the template does anything with these but show them, since it would do otherwise with marks.
        """
        text = self._conversations.render(conversation)
        if not hides:
            return text
        hidden = self._conversations.render(conversation.mapped(self._encoder.special.hide))
        if self._encoder.special.shown(hidden) != text:
            raise RowError(
                "template_error",
                "the chat template looks for a special token that a text spells, or changes it, so it can't be plain text "
                "there; see --special-tokens-in-text",
            )
        return hidden

    def _hides(self, chat: bool) -> bool:
        """Whether special tokens that a text only spells are plain text. A raw prompt is all its user's, so there they are not."""
        default = "plain" if chat and self._encoder.special.can_hide else "encode"
        return (self.config.special_tokens_in_text or default) == "plain"

    def _remarks(
        self, row: Row, encoded: Encoded, spells_special: bool, conversation: Conversation | None
    ) -> Iterator[str]:
        """What is worth knowing about a row that runs."""
        if conversation and conversation.is_continued:
            yield "continued"
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
        if openai.is_request(row):
            check_request(self.config)
            return openai.prompt_and_params(row)
        params = row.data.get("params")
        if isinstance(params, str):  # JSON, as a table may hold it
            params = parse_object(params).columns or params
        return self._prompt(row.data), params

    def _prompt(self, data: dict[str, Any]) -> Any:
        """What the template makes of a row, or what its prompt column holds."""
        if self._template:
            return self._template.render(data)
        column = prompt_column(data, self.config.prompt_column)
        if data[column] is None:
            raise RowError("invalid_prompt", f"column {column!r} is null")
        if self.config.prompt_column is None and column != "prompt" and not isinstance(data[column], list):
            raise RowError("invalid_prompt", f"column {column!r} must hold a list, not {data[column]!r:.80}")
        return data[column]

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
        special = self._encoder.special.ids
        found = [special[text] for text in params.stop if text in special]
        return replace(params, stop_token_ids=(*params.stop_token_ids, *found)) if found else params

    def _random_key(self, identity: str, overrides: Any) -> int:
        """64 bits that a row's random numbers are drawn with: from its own seed, else the job's and its identity."""
        own_seed = overrides.get("seed") if isinstance(overrides, dict) else None
        text = f"{self.sampling.seed}|{identity}" if own_seed is None else f"{own_seed}"
        return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest(), "little")


def check_request(config: PromptConfig) -> None:
    """RowError if there are settings that an OpenAI request would not follow."""
    for flag, value in (("--template", config.template), ("--prompt-column", config.prompt_column)):
        if value is not None:
            raise RowError("invalid_request", f"an OpenAI request has its prompt in its body; leave out {flag}")


def prompt_column(data: Mapping[str, Any], asked: str | None) -> str:
    """The column of a row that holds its prompt: the one that is asked for, else one of `PROMPT_COLUMNS`.

    RowError if there is none, or if there are several.
    """
    names = PROMPT_COLUMNS if asked is None else (asked,)
    filled = [name for name in names if data.get(name) is not None]
    if len(filled) > 1:
        columns = " and ".join(map(repr, filled))
        raise RowError("invalid_prompt", f"columns {columns} both hold a prompt; say with --prompt-column which counts")
    found = filled or [name for name in names if name in data]
    if not found:
        there = ", ".join(map(repr, data)) or "none"
        hint = "; an OpenAI request has a custom_id beside its body" if isinstance(data.get("body"), dict) else ""
        raise RowError("missing_prompt", f"no column {_either(names)}; there are: {there}{hint}")
    return found[0]


def _either(names: Sequence[str]) -> str:
    *first, last = map(repr, names)
    return f"{', '.join(first)} or {last}" if first else last
