"""The index of a shard, which lists its records, and `Done`, which tells the rows that are done in all shards.

The fields `row` and `source` of an entry are the identity of its record; only this module, `ShardFiles.entry`
and `RecordShape.key` know that.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cbatch.errors import Fatal
from cbatch.output import durable
from cbatch.rows.rank import WHOLE, Rank
from cbatch.rows.reader import UNKNOWN_DIGEST

ENTRY = np.dtype([("row", "<u8"), ("source", "<u4"), ("digest", "<u4"), ("failed", "u1")])
Entries = npt.NDArray[np.void]  # of dtype ENTRY

_HEADER = struct.Struct("<QII")  # of a finished shard: its size in bytes, number and checksum of the entries; else 0
_NONE_DONE = np.zeros(0, np.uint32)


class Entry(NamedTuple):
    """One record of a shard."""

    row: int
    source: int  # index among the inputs of the job
    digest: int  # checksum of the row's content in the input
    failed: bool


def as_entries(entries: Iterable[Entry]) -> Entries:
    return np.fromiter(entries, ENTRY)


def input_order(entries: Entries) -> npt.NDArray[np.int64]:
    """The positions of the entries, in the order of their rows in the input."""
    return np.lexsort((entries["row"], entries["source"]))


def recall_digests(entries: Entries, remembered: Entries) -> None:
    """Set the digests of entries read from a shard to those in its index, wherever the two agree about the row."""
    remembered = remembered[: len(entries)]
    head = entries[: len(remembered)]
    is_same = (head["row"] == remembered["row"]) & (head["source"] == remembered["source"])
    is_known = is_same & (remembered["digest"] != 0)  # where power was lost, a file may end in zeros
    head["digest"] = np.where(is_known, remembered["digest"], UNKNOWN_DIGEST)


class Done:
    """Which rows are done: for each source an array of the digests of its finished rows, 0 where there is none.

    `num_rows` and `num_failed` count the rows of one rank only.
    """

    def __init__(self, rank: Rank = WHOLE) -> None:
        self._digests: dict[int, npt.NDArray[np.uint32]] = {}  # by source
        self._rank = rank
        self.num_rows = self.num_failed = 0

    def add(self, entries: Entries) -> None:
        """Count the rows of these records as done; Fatal if one of them was done already."""
        for source in np.unique(entries["source"]).tolist():
            of_source = entries[entries["source"] == source]
            rows, digests = of_source["row"], self._digests.get(source, _NONE_DONE)
            if (missing := int(rows.max()) + 1 - len(digests)) > 0:
                digests = self._digests[source] = np.append(digests, np.zeros(missing, np.uint32))
            if len(np.unique(rows)) < len(rows) or digests[rows].any():
                raise Fatal("a row stands twice in the output; start anew with --overwrite")
            digests[rows] = of_source["digest"]
        own = entries[self._rank.owns(entries["source"], entries["row"])]
        self.num_rows += len(own)
        self.num_failed += int(own["failed"].sum())

    def digest(self, source: int, row: int) -> int:
        """The checksum of a row when it was completed; 0 if it is not done."""
        digests = self._digests.get(source, _NONE_DONE)
        return int(digests[row]) if row < len(digests) else 0

    def count_missing(self, source: int, rows: range) -> int:
        """How many of these rows of a source are not done."""
        digests = self._digests.get(source, _NONE_DONE)
        return len(rows) - int(np.count_nonzero(digests[rows.start : rows.stop]))


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
