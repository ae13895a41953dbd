"""Standard input, output and error made safe for a run: closed, broken or shared streams do no harm."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cbatch.errors import FATAL, READER_GONE


def secure_standard_streams() -> None:
    """Open the standard streams that are closed, so that no file of the job gets their number and is printed into.

    From here on, text printed to standard error is lost without an exception if nobody reads it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        buffer = io.BufferedWriter(_Unbreakable(2, "w", closefd=False))
        encoding = getattr(sys.stderr, "encoding", None)
        sys.stderr = io.TextIOWrapper(buffer, encoding, errors="backslashreplace", line_buffering=True)


def end_with_standard_output() -> None:
    """Have the command end once it prints to standard output and that takes nothing: READER_GONE if nobody reads it any more,
    else FATAL and a reason.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout is sys.__stdout__:
        buffer = io.BufferedWriter(_WhileTaken(1, "w", closefd=False))
        sys.stdout = io.TextIOWrapper(
            buffer, sys.stdout.encoding, sys.stdout.errors, line_buffering=sys.stdout.isatty()
        )


class _WhileTaken(io.FileIO):
    """A pipe or a file whose first write that fails ends the command, and the only one that does."""

    has_failed = False

    def write(self, data: Any) -> int:
        if self.has_failed:
            return len(data)
        try:
            return super().write(data)
        except OSError as error:
            self.has_failed = True
            if isinstance(error, BrokenPipeError):
                raise SystemExit(READER_GONE) from None
            print(f"cbatch: standard output: can't write: {error.strerror}", file=sys.stderr)
            raise SystemExit(FATAL) from None


class _Unbreakable(io.FileIO):
    """A file whose writes never fail."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:  # the reader of a pipe, the terminal or the room on a disk is gone
            return len(data)


@contextmanager
def stdout_for_records() -> Iterator[Any]:
    """Standard output for records only; meanwhile, text that a library prints there goes to standard error."""
    records = os.fdopen(os.dup(1), "wb", buffering=1 << 16)
    os.dup2(2, 1)
    try:
        yield records
    finally:
        try:
            records.flush()
        except OSError:  # nobody reads it any more, or it is full; the writer has said so
            os.dup2(os.open(os.devnull, os.O_WRONLY), records.fileno())
        os.dup2(records.fileno(), 1)
        records.close()
