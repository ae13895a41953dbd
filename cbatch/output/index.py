"""The index of a shard, which lists its records, and `Done`, which tells the rows that are done in all shards.

The fields `row` and `source` of an entry are the identity of its record; only this module, `ShardFiles.entry`
and `RecordShape.key` know that.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cbatch.errors import Fatal
from cbatch.output import durable
from cbatch.rows.rank import WHOLE, Rank
from cbatch.rows.reader import UNKNOWN_DIGEST
from cbatch.rows.remaining import State
from cbatch.rows.request import Row

ENTRY = np.dtype([("row", "<u8"), ("source", "<u4"), ("digest", "<u4"), ("failed", "u1"), ("is_content", "u1")])
Entries = npt.NDArray[np.void]  # of dtype ENTRY

_HEADER = struct.Struct("<QII")  # of a finished shard: its size in bytes, number and checksum of the entries; else 0
_NONE_DONE = np.zeros(0, np.uint32)


class Entry(NamedTuple):
    """One record of a shard."""

    row: int
    source: int  # index among the inputs of the job
    digest: int  # checksum of the row as it stood in the input
    failed: bool
    is_content: bool = False  # `digest` is that of what the record holds of the row, because the index was lost


def as_entries(entries: Iterable[Entry]) -> Entries:
    return np.fromiter(entries, ENTRY)


def input_order(entries: Entries) -> npt.NDArray[np.int64]:
    """The positions of the entries, in the order of their rows in the input."""
    return np.lexsort((entries["row"], entries["source"]))


class Done:
    """Which rows are done: for each source an array of the digests of its finished rows, 0 where there is none.

    Of rows whose digest was lost with the index, what their records hold is known by a digest of its own.

    `num_rows` and `num_failed` count the rows of one rank only.
    """

    def __init__(self, rank: Rank = WHOLE) -> None:
        self._digests: dict[int, npt.NDArray[np.uint32]] = {}  # by source
        self._contents: dict[int, npt.NDArray[np.uint32]] = {}
        self._rank = rank
        self.num_rows = self.num_failed = 0

    def add(self, entries: Entries) -> None:
        """Count the rows of these records as done; Fatal if one of them was done already."""
        for source in np.unique(entries["source"]).tolist():
            of_source = entries[entries["source"] == source]
            rows = of_source["row"]
            digests = self._digests[source] = _grown(self._digests.get(source, _NONE_DONE), rows)
            if len(np.unique(rows)) < len(rows) or digests[rows].any():
                raise Fatal("a row stands twice in the output; start anew with --overwrite")
            is_content = of_source["is_content"] != 0
            digests[rows] = np.where(is_content, UNKNOWN_DIGEST, of_source["digest"])
            if is_content.any():
                contents = self._contents[source] = _grown(self._contents.get(source, _NONE_DONE), rows)
                contents[rows[is_content]] = of_source["digest"][is_content]
        own = entries[self._rank.owns(entries["source"], entries["row"])]
        self.num_rows += len(own)
        self.num_failed += int(own["failed"].sum())

    def digest(self, source: int, row: int) -> int:
        """The checksum of a row when it was completed; 0 if it is not done."""
        digests = self._digests.get(source, _NONE_DONE)
        return int(digests[row]) if row < len(digests) else 0

    def state(self, source: int, row: Row, content_of: Callable[[Row], int]) -> State:
        """Whether a row that was read is done. `content_of`: the digest of what a record would hold of it."""
        digest = self.digest(source, row.index)
        if digest == 0:
            return State.LEFT
        if digest != UNKNOWN_DIGEST:
            return State.DONE if digest == row.digest else State.CHANGED
        contents = self._contents.get(source, _NONE_DONE)
        content = int(contents[row.index]) if row.index < len(contents) else 0
        if content == 0:
            return State.UNKNOWN
        return State.DONE if content == content_of(row) else State.CHANGED

    def num_rows_of(self, source: int) -> int:
        """How many rows a source had at least, by the last of them that is done."""
        done = np.flatnonzero(self._digests.get(source, _NONE_DONE))
        return int(done[-1]) + 1 if len(done) else 0

    def count_missing(self, source: int, rows: range) -> int:
        """How many of these rows of a source are not done."""
        digests = self._digests.get(source, _NONE_DONE)
        return len(rows) - int(np.count_nonzero(digests[rows.start : rows.stop]))


def _grown(digests: npt.NDArray[np.uint32], rows: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    """The digests with room for these rows."""
    missing = int(rows.max()) + 1 - len(digests)
    return np.append(digests, np.zeros(missing, np.uint32)) if missing > 0 else digests


class IndexFile:
    """`part-N.idx`: one entry for each record of a shard, in the order of the records, behind a header."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, shard_size: int | None = None) -> Entries | None:
        """The entries; None if there is no index. With `shard_size`, also None if the index is of a shard of another size."""
        if not self.path.exists():
            return None
        content = self.path.read_bytes()
        header, entries = content[: _HEADER.size], content[_HEADER.size :]
        if len(header) < _HEADER.size or (shard_size is not None and header != _header(shard_size, entries)):
            return None
        return np.frombuffer(entries, ENTRY, len(entries) // ENTRY.itemsize)

    def write(self, entries: Entries, shard_size: int = 0) -> None:
        """Replace the whole index. `shard_size`: bytes of a finished shard, 0 of one that grows."""
        content = entries.tobytes()
        durable.replace(self.path, [_header(shard_size, content) if shard_size else bytes(_HEADER.size), content])

    def finish(self, shard_size: int) -> None:
        """Note the size of the shard that is now finished, and what shows whether the index is whole."""
        with self.path.open("r+b") as file:
            header = _header(shard_size, file.read()[_HEADER.size :])
            file.seek(0)
            file.write(header)


def _header(shard_size: int, entries: bytes) -> bytes:
    return _HEADER.pack(shard_size, len(entries) // ENTRY.itemsize, zlib.crc32(entries))
