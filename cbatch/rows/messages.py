"""The messages of a row, with its tools, as chat templates expect them: checked, and in one form."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cbatch.errors import RowError, first_line
from cbatch.rows.json_object import parse_object

_CALLS = "tool calls"


@dataclass(frozen=True)
class Conversation:
    """All that a chat template gets of one row."""

    messages: list[dict[str, Any]]  # at least one, each with a role
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] | None = None  # variables of the template, by the user's will

    @property
    def is_continued(self) -> bool:
        """Whether the last turn is the assistant's, which the completion goes on with."""
        return bool(self.messages[-1]["role"] == "assistant")

    @property
    def texts(self) -> Any:
        """All that texts of the row are in."""
        return [self.messages, self.tools, self.template_kwargs]

    def mapped(self, change: Callable[[Any], Any]) -> Conversation:
        """The same conversation with other texts."""
        return Conversation(change(self.messages), change(self.tools), change(self.template_kwargs))

    @property
    def parts(self) -> list[str]:
        """What templates may leave out without a word, by names for people: all but the turns of user and assistant."""
        roles = dict.fromkeys(message["role"] for message in self.messages)
        others = [_of_role(role) for role in roles if role not in ("user", "assistant")]
        return [*others, _CALLS] if any(message.get("tool_calls") for message in self.messages) else others

    def probed(self, part: str, probe: str) -> Conversation:
        """The same conversation with `probe` as the text of one of its `parts`."""
        return replace(self, messages=[_probed(message, part, probe) for message in self.messages])


def _of_role(role: str) -> str:
    return f"messages of role {role!r:.80}"


def _probed(message: dict[str, Any], part: str, probe: str) -> dict[str, Any]:
    if part == _of_role(message["role"]):
        return {**message, "content": probe}
    if part == _CALLS and isinstance(calls := message.get("tool_calls"), list):
        return {**message, "tool_calls": [_renamed(call, probe) for call in calls]}
    return message


def _renamed(call: Any, name: str) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _renamed(function, name)}
    return {**call, "name": name, "arguments": {name: name}}


def conversation_of(messages: list[Any], tools: Any, template_kwargs: Any, is_padded: bool) -> Conversation:
    """A conversation of what a row holds; RowError if it can't be one.

    `tools` and `template_kwargs` may be JSON text. `is_padded`: nulls stand for keys that are missing.
    """
    cleaned = [_cleaned_message(message, is_padded) for message in messages]
    if all(message["role"] == "assistant" for message in cleaned):
        raise RowError("invalid_messages", "a conversation needs a message that is not the assistant's")
    last = cleaned[-1]
    if last["role"] == "assistant" and last.get("tool_calls"):
        raise RowError(
            "invalid_messages", "the conversation ends with tool calls; it needs a message with their results"
        )
    return Conversation(cleaned, _tools(tools, is_padded), _template_kwargs(template_kwargs, is_padded))


def _cleaned_message(message: Any, is_padded: bool) -> dict[str, Any]:
    """A message without keys that are null, the text parts of its content joined by newlines; RowError if it has none."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RowError("invalid_messages", f"a message must be an object with a role, not {message!r:.80}")
    clean = {key: value for key, value in _unpadded(message, is_padded).items() if value is not None}
    content = clean.get("content")
    if isinstance(content, list):
        clean["content"] = "\n".join(_text_part(part) for part in content)
    elif content is None and clean.get("tool_calls"):
        clean["content"] = ""  # which templates show, whatever they do with one that is missing
    elif content is None:
        raise RowError("invalid_messages", f"the content of the {message['role']!r} message is missing or null")
    elif not isinstance(content, str):
        raise RowError(
            "invalid_messages", f"the content of a message must be a text or text parts, not {content!r:.80}"
        )
    if isinstance(calls := clean.get("tool_calls"), list):
        clean["tool_calls"] = [_with_object(call) for call in calls]
    return clean


def _unpadded(value: Any, is_padded: bool = True) -> Any:
    """A value whose objects lack the keys that are null, if it is padded."""
    if not is_padded:
        return value
    if isinstance(value, dict):
        return {key: _unpadded(item) for key, item in value.items() if item is not None}
    return [_unpadded(item) for item in value] if isinstance(value, list) else value


def _text_part(part: Any) -> str:
    if isinstance(part, dict) and (part.get("type") or "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else part
    raise RowError("invalid_messages", f"a content part of type {kind!r:.80} is not text")


def _with_object(call: Any) -> Any:
    """A tool call whose arguments, in OpenAI's form the text of a JSON object, are that object; other text stays."""
    if not isinstance(call, dict):
        return call
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _with_object(function)}
    if not isinstance(text := call.get("arguments"), str):
        return call
    arguments, problem = parse_object(text if text.strip() else "{}")
    return {**call, "arguments": text if problem else arguments}


def _tools(value: Any, is_padded: bool) -> list[dict[str, Any]] | None:
    """The functions that the model may call, None if there are none; RowError if they are not in OpenAI's form."""
    tools = _parsed("tools", value, is_padded)
    if tools is None or tools == []:
        return None
    if isinstance(tools, list) and all(map(_is_function, tools)):
        return tools
    raise RowError(
        "invalid_messages",
        f'tools must be a list of {{"type": "function", "function": {{"name": ...}}}}, as OpenAI has it, not {value!r:.80}',
    )


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _template_kwargs(value: Any, is_padded: bool) -> dict[str, Any]:
    kwargs = _parsed("chat_template_kwargs", value, is_padded)
    if kwargs is None or isinstance(kwargs, dict):
        return kwargs or {}
    raise RowError("invalid_messages", f"chat_template_kwargs must be an object, not {value!r:.80}")


def _parsed(name: str, value: Any, is_padded: bool) -> Any:
    """A value, or what its text says as JSON, which is how tables keep objects of different shapes."""
    if not isinstance(value, str):
        return _unpadded(value, is_padded)
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise RowError("invalid_messages", f"{name}: not valid JSON: {first_line(error)}") from None
