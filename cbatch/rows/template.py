"""The Jinja template of `--template`, which makes a prompt out of a row's columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cbatch.errors import UsageError


def template_text(template: str) -> str:
    """The text of a template: `template` itself, or for @FILE the content of that file."""
    if not template.startswith("@"):
        return template
    try:
        return Path(template[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--template {template}: can't be read: {error}") from None


def compiled_template(template: str) -> Any:
    """The Jinja template of `template` or @FILE, sandboxed; UsageError if its syntax is wrong."""
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
