"""Errors that are the user's to mend: one line saying what is wrong, where, and what to do. No traceback."""


class Fatal(Exception):
    """The job can't go on."""

    exit_code = 1


class UsageError(Fatal):
    """The command, its settings or its inputs are wrong; nothing was loaded or written."""

    exit_code = 2


class RowError(ValueError):
    """One row can't be completed; it becomes an error row of this `kind` and costs no other row."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
