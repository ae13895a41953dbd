"""The messages of a row, checked and cleaned for a chat template."""

from __future__ import annotations

from typing import Any

from cbatch.errors import RowError


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
