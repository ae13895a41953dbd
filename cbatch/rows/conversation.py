"""The messages of a row -> the text that the model's chat template makes of them."""

from __future__ import annotations

from typing import Any

from cbatch.errors import RowError, UsageError


class Conversations:
    """Renders conversations with the chat template of a tokenizer."""

    def __init__(self, tokenizer: Any, system: str | None = None) -> None:
        """`system`: goes before every conversation that does not begin with a system message."""
        self._tokenizer, self._system = tokenizer, system
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        if system is not None and not self.has_template:
            raise UsageError("--system: this model has no chat template")

    def render(self, messages: list[Any]) -> str:
        """The text of a conversation up to where the model is to answer; RowError if there can be none."""
        if not self.has_template:
            raise RowError("invalid_prompt", "this model has no chat template, so it can't take messages")
        conversation = [cleaned_message(message) for message in messages]
        if self._system is not None and conversation[0]["role"] != "system":
            conversation.insert(0, {"role": "system", "content": self._system})
        try:
            return str(self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # templates raise what they like
            raise RowError("template_error", f"the chat template refuses this conversation: {error}") from None


def cleaned_message(message: Any) -> dict[str, Any]:
    """A message without its nulls, and with the text parts of its content joined by newlines; RowError if it has none."""
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
    """A value whose objects lack the keys that are null: Parquet gives every message all keys that any message has."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _text_part(part: Any) -> str:
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else part
    raise RowError("invalid_messages", f"a content part of type {kind!r} is not text")
