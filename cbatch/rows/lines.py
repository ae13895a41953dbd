"""A text file or standard input, plain or compressed -> its lines with their numbers."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from cbatch.errors import RowError, UsageError
from cbatch.rows.compression import decompressed, is_compressed
from cbatch.rows.signature import HEAD, foreign_kind

COMPRESSED_SUFFIXES = (".gz", ".zst")

_MAX_LINE = 256 * 1024**2  # bytes
_TOO_LONG = b"\n"  # stands for a line above the limit; no other line holds its own end
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@contextmanager
def open_lines(name: str, kind: str) -> Iterator[io.BufferedReader]:
    """The content of a file or of standard input (`-`); UsageError if its first bytes tell that it is none of its kind."""
    with _open(name) as file, decompressed(file) as content:
        if problem := foreign_kind(content.peek(HEAD)[:HEAD], kind):
            raise UsageError(f"{name}: {problem}")
        yield content


def numbered_lines(name: str, kind: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a file (`-`: standard input) that are not blank, without their ends, numbered from 1.

    A line ends at 0x0A and nowhere else, and a byte-order mark at its start is no part of it. One above the size limit is
    passed on as a mark that `decoded` refuses.
    """
    with open_lines(name, kind) as file:
        number = 0
        while line := file.readline(_MAX_LINE + 1):
            number += 1
            while line.startswith(_BYTE_ORDER_MARK):  # also further on: files are joined
                line = line[len(_BYTE_ORDER_MARK) :]
            if len(line) > _MAX_LINE:
                while not line.endswith(b"\n") and (more := file.readline(_MAX_LINE)):
                    line = more[-1:]
                yield number, _TOO_LONG
                continue
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            if line.strip():
                yield number, line


def decoded(line: bytes) -> tuple[str, RowError | None]:
    """The text of a line, and what is wrong with it: it is too long, or not UTF-8 (U+FFFD in the text, then)."""
    if line == _TOO_LONG:
        return "", RowError("line_too_long", f"a line may hold {_MAX_LINE // 1024**2} MiB")
    try:
        return line.decode(), None
    except UnicodeDecodeError as error:
        return line.decode(errors="replace"), RowError("invalid_utf8", f"not valid UTF-8 at byte {error.start}")


def count_lines(name: str) -> int | None:
    """The number of lines of a file, blank ones included; None for standard input and compressed files."""
    if name == "-":
        return None
    with Path(name).open("rb") as file:
        if is_compressed(file.peek(4)):
            return None
        num_newlines, last = 0, b"\n"
        for chunk in iter(lambda: file.read(1 << 20), b""):
            num_newlines, last = num_newlines + chunk.count(b"\n"), chunk[-1:]
    return num_newlines + (last != b"\n")


def _open(name: str) -> Any:
    # Detached, because the interpreter crashes at its end if it closes sys.stdin while a thread waits for it.
    return cast(Any, sys.stdin).detach() if name == "-" else Path(name).open("rb")
