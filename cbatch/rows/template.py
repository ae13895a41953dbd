"""The Jinja template of `--template`, which makes a prompt out of a row's columns."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from cbatch.errors import RowError, UsageError
from cbatch.rows.values import as_text


class Template:
    """A compiled template. Columns are its variables, and `row` holds all of them, unless a column is called that."""

    def __init__(self, template: str, now: datetime) -> None:
        """Compile a template or @FILE; UsageError if its syntax is wrong. `now`: the moment that it may ask for."""
        import jinja2

        from cbatch.rows.jinja import PromptEnvironment

        self.text = template_text(template)
        try:
            self._compiled = PromptEnvironment(now).from_string(self.text)
        except jinja2.TemplateSyntaxError as error:
            raise UsageError(
                f"--template: line {error.lineno}: {error.message}. "
                """A column whose name is no identifier is {{ row["its name"] }}"""
            ) from None

    def render(self, data: Mapping[str, Any]) -> str:
        """The prompt that the template makes of a row's columns; RowError if it fails."""
        columns = as_text(dict(data))
        try:
            return self._compiled.render({"row": columns, **columns})
        except Exception as error:  # whatever the user's template raises is about this row
            raise RowError("template_error", f"--template: {error}{_hint(error, columns)}") from None


def template_text(template: str) -> str:
    """The text of a template: `template` itself, or for @FILE the content of that file."""
    if not template.startswith("@"):
        return template
    try:
        return Path(template[1:]).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--template {template}: can't be read: {error}") from None


def _hint(error: Exception, columns: Mapping[str, Any]) -> str:
    """For an undefined name in a row that has a column whose name is no identifier: how to write such a column."""
    import jinja2

    odd = [name for name in columns if not name.isidentifier()]
    return (
        f'; column {odd[0]!r} is {{{{ row["{odd[0]}"] }}}}' if odd and isinstance(error, jinja2.UndefinedError) else ""
    )
