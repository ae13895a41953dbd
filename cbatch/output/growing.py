"""The growing shard: a JSONL file in the state folder, to which records are appended, and its index."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cbatch.errors import Fatal
from cbatch.output import durable
from cbatch.output.index import Entry, IndexFile, as_entries

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT


class Indexed(NamedTuple):
    """The line of a record, and what the index is to remember of it."""

    line: bytes
    entry: Entry


class GrowingShard:
    """A growing shard that is open for appending. Its index must exist."""

    def __init__(self, path: Path, index: IndexFile) -> None:
        entries = index.read()
        self.num_rows = 0 if entries is None else len(entries)
        self._paths = path, index.path
        self._file, self._index = os.open(path, _APPEND, 0o666), os.open(index.path, _APPEND, 0o666)

    def append(self, records: Sequence[Indexed]) -> None:
        """Write records, so that they survive the death of this process."""
        durable.append(self._file, b"".join(indexed.line for indexed in records))
        durable.append(self._index, as_entries(indexed.entry for indexed in records).tobytes())
        self.num_rows += len(records)

    def sync(self) -> None:
        """Have everything appended so far survive the death of the machine; Fatal if it is not at its place any more."""
        for file, path in zip((self._file, self._index), self._paths, strict=True):
            os.fdatasync(file)
            if not _is_at(file, path):
                raise Fatal(
                    f"{path}: was removed, moved or replaced while the job ran, so what it wrote is not there. Put it back, "
                    "or run the command again to begin anew"
                )

    def close(self) -> None:
        try:
            self.sync()
        finally:
            os.close(self._file)
            os.close(self._index)


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file is the one at this path."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except OSError:
        return False
