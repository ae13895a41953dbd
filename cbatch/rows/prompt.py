"""A row -> the token ids of its prompt and how to go on from there."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from cbatch.config import PromptConfig
from cbatch.errors import RowError, UsageError
from cbatch.rows import openai
from cbatch.rows.identity import Identities
from cbatch.rows.request import Request, Row, SamplingParams


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
        """The request of a row; to be called for all rows in the order of the input, but for those skipped."""
        if row.problem:
            raise row.problem
        identity = self._identities.of(row)
        try:
            return self._request(row, identity)
        except RowError as error:
            raise error.at(row.where) from None

    def skip(self, row: Row) -> None:
        """Pass over a row that is done: later rows get the random numbers they would have got behind it."""
        if not row.problem:
            self._identities.of(row)

    def reseed(self, seed: int) -> None:
        """Go on with the seed of an earlier run."""
        self.sampling = replace(self.sampling, seed=seed)

    def render(self, row: Row) -> str:
        """The prompt of a row as the model sees it, special tokens included."""
        return str(self.tokenizer.decode(self._request(row, "").token_ids))

    def _request(self, row: Row, identity: str) -> Request:
        is_openai = openai.is_request(row)
        prompt: Any
        overrides: Any
        if is_openai:
            prompt, overrides = openai.prompt_and_params(row)
        else:
            prompt, overrides = self._prompt(row.data), row.data.get("params")
        params = self._params(overrides)
        chat = isinstance(prompt, list) and not _is_ids(prompt)
        if isinstance(prompt, str) and self.chat and not is_openai:
            prompt, chat = [{"role": "user", "content": prompt}], True
        token_ids = self._token_ids(prompt)
        if not token_ids:
            raise RowError("empty_prompt", "the prompt has no tokens")
        limit = self.max_model_len - 1
        if len(token_ids) > limit:
            token_ids = self._truncated(token_ids, params.max_tokens)
        return Request(row, token_ids, params, self._stream(identity, overrides), chat)

    def _prompt(self, data: dict[str, Any]) -> Any:
        """The text, conversation or token ids of a row."""
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
        raise RowError("missing_prompt", f"no column {column!r}, 'messages' or 'token_ids'; there are: {_names(data)}")

    def _params(self, overrides: Any) -> SamplingParams:
        if overrides is None:
            return self.sampling
        if not isinstance(overrides, dict):
            raise RowError("invalid_params", "params must be an object")
        try:
            return self.sampling.override(overrides)
        except ValueError as error:
            raise RowError("invalid_params", str(error)) from None

    def _token_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self._encode_raw(prompt)
        if not isinstance(prompt, list):
            raise RowError("invalid_prompt", f"a prompt must be a text, messages or token ids, not {prompt!r:.80}")
        if not _is_ids(prompt):
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
        conversation = [_message(one) for one in messages]
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
        """Shortened to leave room for `max_tokens`, but to no less than half of the context."""
        if self.config.truncate is None:
            raise RowError(
                "prompt_too_long",
                f"the prompt has {len(token_ids)} tokens; with one to generate, {self.max_model_len} fit",
            )
        keep = max(self.max_model_len - max_tokens, self.max_model_len // 2)
        return token_ids[-keep:] if self.config.truncate == "left" else token_ids[:keep]

    def _stream(self, identity: str, overrides: Any) -> int:
        """The key of a row's random stream: of its own seed, else of the job's seed and the row's identity."""
        own = overrides.get("seed") if isinstance(overrides, dict) else None
        key = f"{self.sampling.seed}|{identity}" if own is None else f"{own}"
        return int.from_bytes(hashlib.blake2b(key.encode(errors="replace"), digest_size=8).digest(), "little")


def template_text(template: str) -> str:
    """The text of --template: itself, or of the file named behind an @."""
    if not template.startswith("@"):
        return template
    try:
        return Path(template[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--template {template}: can't be read: {error}") from None


def compiled_template(template: str) -> Any:
    """The template of --template, or UsageError if it is not one."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, finalize=_not_null)
        return environment.from_string(template_text(template))
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"--template: line {error.lineno}: {error.message}") from None


def _not_null(value: Any) -> Any:
    """Keeps the word None out of prompts."""
    if value is None:
        raise ValueError("a value to be shown is null; write {{ x or '' }} to leave it out")
    return value


def _is_ids(prompt: list[Any]) -> bool:
    return all(type(token) is int for token in prompt)


def _message(message: Any) -> dict[str, Any]:
    """One message with its nulls left out and the text parts of its content joined by newlines."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RowError("invalid_messages", f"a message must be an object with a role, not {message!r:.80}")
    clean: dict[str, Any] = _without_nulls(message)
    content = clean.get("content")
    if isinstance(content, list):
        clean["content"] = "\n".join(_text_part(part) for part in content)
    elif content is None and not clean.get("tool_calls"):
        raise RowError("invalid_messages", f"the content of the {message['role']!r} message is missing or null")
    elif content is not None and not isinstance(content, str):
        raise RowError(
            "invalid_messages", f"the content of a message must be a text or text parts, not {content!r:.80}"
        )
    return clean


def _without_nulls(value: Any) -> Any:
    """Objects without the keys that are null: in Parquet all messages have the keys of all others, as nulls."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _text_part(part: Any) -> str:
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else part
    raise RowError("invalid_messages", f"a content part of type {kind!r} is not text")


def _names(data: dict[str, Any]) -> str:
    return ", ".join(repr(name) for name in data) or "none"
