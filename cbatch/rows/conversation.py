"""Conversations -> the text that the model's chat template makes of them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any

from cbatch.errors import RowError, UsageError, first_line
from cbatch.rows.messages import Conversation

_PROBE = "cbatch"


@dataclass(frozen=True)
class ChatTemplate:
    """One of the model's chat templates."""

    text: str
    compiled: Any
    variables: frozenset[str]  # that it takes from outside


class Conversations:
    """Renders conversations with the chat template of a tokenizer."""

    def __init__(self, tokenizer: Any, system: str | None = None) -> None:
        """`system`: goes before every conversation that does not begin with a system message."""
        self._tokenizer, self._system = tokenizer, system
        self.now = datetime.now()  # the moment that a template gets which asks for the time
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self.asks_for_date = self.has_template and "strftime_now" in str(tokenizer.chat_template)
        self._takes: dict[str, bool] = {}  # whether the template shows a part of conversations
        self._templates: dict[bool, ChatTemplate] = {}  # for conversations without and with tools

    def check(self) -> None:
        """UsageError if the template can't be used at all, or not with the system message of the settings."""
        try:
            self._template(None)
        except Exception as error:  # templates raise what they like
            raise UsageError(f"the model's chat template can't be used: {first_line(error)}; use --raw") from None
        if self._system is not None:
            try:
                self.render(self.with_system(Conversation([{"role": "user", "content": "hi"}])))
            except RowError as error:
                raise UsageError(f"--system: {error}") from None

    def with_system(self, conversation: Conversation) -> Conversation:
        """A conversation with the system message of the settings, if it has none of its own."""
        if self._system is None or conversation.messages[0]["role"] == "system":
            return conversation
        return replace(conversation, messages=[{"role": "system", "content": self._system}, *conversation.messages])

    def render(self, conversation: Conversation) -> str:
        """The text of a conversation up to where the model is to answer; RowError if there can be none, or if the template
        leaves out a part of it.

        A last turn of the assistant's is left open, for the model to continue.
        """
        if not self.has_template:
            raise RowError("invalid_prompt", "this model has no chat template, so it can't take messages")
        text = self._render(conversation)
        for part in conversation.parts:
            if part not in self._takes:  # asked once, and of a conversation that has it
                self._takes[part] = self._shows(conversation.probed(part, _PROBE))
            if not self._takes[part]:
                raise RowError("template_error", f"the model's chat template leaves {part} out")
        return text

    def _shows(self, conversation: Conversation) -> bool:
        """Whether the template shows the probe that is in a conversation; also if it does not take the probe."""
        try:
            return _PROBE in self._render(conversation)
        except RowError:
            return True

    def _render(self, conversation: Conversation) -> str:
        tools, kwargs = conversation.tools, conversation.template_kwargs or {}
        is_continued = conversation.is_continued
        try:
            template = self._template(tools)
            self._check_taken(template, tools, kwargs)
            template.compiled.globals["strftime_now"] = self.now.strftime  # instead of the current time
            text = self._tokenizer.apply_chat_template(
                conversation.messages,
                tools=tools,
                chat_template=template.text,
                tokenize=False,
                add_generation_prompt=not is_continued,
                continue_final_message=is_continued,
                **kwargs,
            )
        except RowError:
            raise
        except Exception as error:  # templates raise what they like
            if is_continued and str(error).startswith("continue_final_message"):
                error = ValueError(
                    "the last turn is the assistant's, and can't be continued as the template changes it"
                )
            raise RowError("template_error", f"the chat template refuses this conversation: {error}") from None
        return str(text)

    def _template(self, tools: list[dict[str, Any]] | None) -> ChatTemplate:
        """The model's template for conversations with or without tools."""
        if (has_tools := tools is not None) not in self._templates:
            from jinja2.meta import find_undeclared_variables
            from transformers.utils.chat_template_utils import _compile_jinja_template

            text = self._tokenizer.get_chat_template(None, tools).removeprefix("\ufeff")
            compiled = _compile_jinja_template(text)  # cached: rendering takes the same one
            variables = frozenset(find_undeclared_variables(compiled.environment.parse(text)))
            self._templates[has_tools] = ChatTemplate(text, compiled, variables)
        return self._templates[has_tools]

    def _check_taken(self, template: ChatTemplate, tools: list[dict[str, Any]] | None, kwargs: dict[str, Any]) -> None:
        """RowError if the template would ignore tools or a variable, or the variable is not for users to set."""
        if tools and "tools" not in template.variables:
            raise RowError("template_error", "the model's chat template takes no tools")
        free = template.variables - self._reserved
        if unknown := [name for name in kwargs if name not in free]:
            takes = ", ".join(sorted(free)) or "nothing else"
            raise RowError(
                "template_error",
                f"chat_template_kwargs: the chat template takes no {unknown[0]!r:.80}; it takes {takes}",
            )

    @cached_property
    def _reserved(self) -> set[str]:
        """Variables of templates that are not for a row to set, except for the documents."""
        arguments = inspect.signature(self._tokenizer.apply_chat_template).parameters
        return {"messages", *arguments, *self._tokenizer.special_tokens_map} - {"documents"}
