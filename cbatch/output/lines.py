"""JSONL files of records: writing, reading and repairing them. A kill may have torn their end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cbatch.errors import Fatal
from cbatch.output.record import RecordKey, RecordShape, dumps

_NO_RECORD = (ValueError, KeyError, TypeError, RecursionError)  # what reading one raises if a line is none


class Line(NamedTuple):
    """A line of a file, and the record in it."""

    text: bytes
    record: dict[str, Any]
    key: RecordKey


def to_lines(records: Iterable[dict[str, Any]], keep_nan: bool = False) -> Iterator[bytes]:
    return (dumps(record, keep_nan).encode() + b"\n" for record in records)


def read_lines(path: Path, shape: RecordShape, growing: bool = False) -> Iterator[Line]:
    """Each line of a file. Fatal if one is damaged: no kill does that.

    The end of a file that is `growing`, by another task or until a kill, may be torn. It is read as `repair` mends it.
    """
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            is_end = growing and not text.endswith(b"\n")
            try:
                record = json.loads(text)
                key = shape.key(record)
            except _NO_RECORD:
                if is_end:
                    return
                raise Fatal(
                    f"{path}:{number}: this record is damaged, and not by an interrupted run. Restore the file, "
                    "or start anew with --overwrite."
                ) from None
            yield Line(text, record, key)
            if is_end:
                return


def repair(path: Path, shape: RecordShape) -> None:
    """Make the file that a killed job was appending to end in a whole record.

    A kill can only damage the end: a last record that lacks nothing but its newline gets one, what else stands behind
    the last newline is cut off.
    """
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        start = _last_line_start(file, size)
        file.seek(start)
        tail = file.read()
        if not tail:
            return
        try:
            shape.key(json.loads(tail))
        except _NO_RECORD:
            file.truncate(start)
        else:
            file.write(b"\n")
        os.fsync(file.fileno())


def read_in_order(path: Path, order: npt.NDArray[np.int64]) -> Iterator[dict[str, Any]]:
    """The records of a file in this order of their positions. Memory: 8 bytes a record."""
    with path.open("rb") as file:
        lengths = np.fromiter(map(len, file), np.int64)
        offsets = lengths.cumsum() - lengths
        for index in order:
            file.seek(int(offsets[index]))
            yield json.loads(file.readline())


def _last_line_start(file: Any, size: int) -> int:
    """The offset behind the last newline of the first `size` bytes."""
    chunk = 1 << 16
    for end in range(size, 0, -chunk):
        begin = max(0, end - chunk)
        file.seek(begin)
        if (found := file.read(end - begin).rfind(b"\n")) >= 0:
            return int(begin + found + 1)
    return 0
