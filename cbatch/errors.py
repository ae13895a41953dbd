"""Exit codes, and the errors that a user can mend: one line says what is wrong, where, and what to do. No traceback."""

from __future__ import annotations

import re

OK, FATAL, USAGE, SOME_FAILED = 0, 1, 2, 3
INTERRUPTED = 75  # before all rows were done; BSD's EX_TEMPFAIL
KILLED = 128  # plus the number of the signal that ended the process at once, as a shell says it
READER_GONE = 141  # nobody reads standard output any more: KILLED + SIGPIPE

_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_LONGEST = 2000  # characters of a message; templates and values of the user's may be quoted in it


def one_line(message: str) -> str:
    """A message as one line that can be shown on a terminal, whatever it quotes of the user's files."""
    text = _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], message)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


class Fatal(Exception):
    """The job can't go on. The message is one line that can be shown on a terminal, whatever it quotes."""

    exit_code = FATAL

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class UsageError(Fatal):
    """The command, its settings or its inputs are wrong; nothing was loaded or written."""

    exit_code = USAGE


class SettingError(ValueError):
    """A setting can't have this value. `name` is its field; `problem` goes on from the name: must be at least 1 ..."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(name, problem)
        self.name, self.problem = name, problem

    def __str__(self) -> str:
        return f"{self.name} {self.problem}"


class RowError(ValueError):
    """One row can't be completed; it becomes an error row of this `kind` and costs no other row.

    The message is one line that can be shown on a terminal, whatever text of the row it quotes.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(one_line(message))
        self.kind = kind

    def at(self, place: str) -> RowError:
        """This error with the place of its row, such as `FILE:LINE`, before the message."""
        return RowError(self.kind, f"{place}: {self}")

    def __reduce__(self) -> tuple[type[RowError], tuple[str, str]]:
        return RowError, (self.kind, str(self))


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
