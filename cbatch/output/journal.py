"""What a job has done so far, and under which settings; so that it can be killed at any moment and go on.

Beside the output lies a state folder (`OUT/.cbatch`, or `.NAME.cbatch` beside a single file NAME):

    lock            held while a job runs (flock: the kernel lets go of it when the process dies)
    manifest.json   the settings that completions depend on
    part-N.jsonl    the records of the shard that is being written, appended as rows finish
    part-N.idx      for each record of shard N, its row and a checksum of that row's input
    summary.json    the figures of the last run

Where several tasks share the output, all but the manifest has `-I-of-N` in its name: `part-0-of-3-00000.jsonl`.
The records are the only truth: what is done is what stands in the shards. The index is a cache of that (believed only
if it was made for a file of just that size) and remembers the checksums. A shard under its final name is complete; it
gets there by a rename.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cbatch.errors import Fatal, UsageError
from cbatch.output.record import RecordShape
from cbatch.rows.rank import WHOLE, Rank

# One record of a shard: its row, the index of its source, a checksum of that row's input, and whether it failed.
ENTRY = np.dtype([("row", "<u8"), ("source", "<u4"), ("digest", "<u4"), ("failed", "u1")])
Entry = tuple[int, int, int, bool]
Entries = npt.NDArray[np.void]  # of dtype ENTRY

_HEADER = struct.Struct("<QII")  # of a finished shard: its size in bytes, number and checksum of the entries; else 0


class Done:
    """Which rows are done: for each source an array of the digests of its finished rows, 0 where there is none.

    `num_rows` and `num_failed` count those of a share only.
    """

    def __init__(self, num_sources: int, rank: Rank = WHOLE) -> None:
        self._digests = [np.zeros(0, np.uint32) for _ in range(num_sources)]
        self._rank = rank
        self.num_rows = self.num_failed = 0

    def add(self, entries: Entries) -> None:
        for source in np.unique(entries["source"]):
            of_source = entries[entries["source"] == source]
            rows, digests = of_source["row"], self._digests[source]
            if (missing := int(rows.max()) + 1 - len(digests)) > 0:
                digests = self._digests[source] = np.append(digests, np.zeros(missing, np.uint32))
            if len(np.unique(rows)) < len(rows) or digests[rows].any():
                raise Fatal("a row stands twice in the output; start anew with --overwrite")
            digests[rows] = of_source["digest"]
        own = entries[self._rank.owns(entries["source"], entries["row"])]
        self.num_rows += len(own)
        self.num_failed += int(own["failed"].sum())

    def digest(self, source: int, row: int) -> int:
        """0 if the row is not done."""
        digests = self._digests[source]
        return int(digests[row]) if row < len(digests) else 0

    def count_missing(self, source: int, rows: range) -> int:
        """How many of these rows of a source are not done."""
        return len(rows) - int(np.count_nonzero(self._digests[source][rows.start : rows.stop]))


class Journal:
    """The state folder of one output, locked for this process while it is open."""

    def __init__(self, output: Path, single_file: bool, rank: Rank = WHOLE) -> None:
        self.output, self.rank = output, rank
        self.state = output.with_name(f".{output.name}.cbatch") if single_file else output / ".cbatch"
        self._summary = self.state / f"summary{rank.suffix}.json"
        lock = self.state / f"lock{rank.suffix}"
        try:
            self.state.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UsageError(f"{output}: can't write there: {error.strerror}") from None
        self.is_locked = self._try(self._lock, fcntl.LOCK_EX)
        for path in self.state.glob("lock*"):
            if not path.name.endswith(f"-of-{rank.num_ranks}") and path != lock:  # of a job that is divided otherwise
                with path.open("rb") as other:
                    self._try(other.fileno(), fcntl.LOCK_SH)
        for scratch in self.state.glob("*.tmp"):  # of a job that was killed
            if rank.suffix in scratch.name:
                scratch.unlink()

    def _try(self, lock: int, kind: int) -> bool:
        """Take a lock; False where the file system has none. UsageError if a live process holds it."""
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise UsageError(f"{self.output}: another cbatch job is writing there now") from None
            return False
        return True

    @property
    def manifest(self) -> dict[str, Any] | None:
        """The settings of the job that wrote here, None if there was none."""
        try:
            settings = json.loads((self.state / "manifest.json").read_text())
            if not isinstance(settings, dict):
                raise ValueError("not an object")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise Fatal(f"{self.state / 'manifest.json'}: can't be read: {error}") from None
        return settings

    def begin(self, settings: dict[str, Any]) -> None:
        """Record the settings of a new job."""
        write_atomically(self.state / "manifest.json", json.dumps(settings, indent=2) + "\n")

    def propose(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Record the settings of a new job, its seed among them, unless another task was faster; those that hold."""
        mine = self.state / f"manifest{self.rank.suffix}.json"
        write_atomically(mine, json.dumps(settings, indent=2) + "\n")
        with suppress(FileExistsError):
            (self.state / "manifest.json").hardlink_to(mine)  # unlike a rename, it replaces nothing
        mine.unlink()
        return self.manifest or settings

    def resume(self, settings: dict[str, Any], may_differ: Collection[str] = ()) -> None:
        """Make sure that the settings are those of the job to be continued, but for those that `may_differ`."""
        earlier = self.manifest or {}
        differences = [
            f"  {name}: {_shown(earlier.get(name))} before, {_shown(settings.get(name))} now"
            for name in sorted({*earlier, *settings})
            if earlier.get(name) != settings.get(name) and name not in may_differ
        ]
        if differences:
            text = "\n".join(differences)
            raise UsageError(
                f"{self.output} holds rows made under other settings:\n"
                + text
                + "\nUse the same settings to go on, another output, or --overwrite to start anew."
                + (" An input whose bad lines were mended goes with --retry-failed." if "input sizes" in text else "")
            )

    def write_summary(self, figures: dict[str, Any]) -> None:
        write_atomically(self._summary, json.dumps(figures, indent=2) + "\n")

    def forget_summary(self) -> None:
        """A run that dies must not leave the figures of the one before it."""
        self._summary.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._lock)


class IndexFile:
    """`part-N.idx`: one entry for each record of a shard, in the same order, behind a header."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, shard_size: int | None = None) -> Entries | None:
        """The entries; None if there is no index, or none of a finished shard of `shard_size` bytes."""
        if not self.path.exists():
            return None
        content = self.path.read_bytes()
        header, entries = content[: _HEADER.size], content[_HEADER.size :]
        if len(header) < _HEADER.size or (shard_size is not None and header != _header(shard_size, entries)):
            return None
        return np.frombuffer(entries, ENTRY, len(entries) // ENTRY.itemsize)

    def write(self, entries: Entries, shard_size: int = 0) -> None:
        """Replace the whole index."""
        content = entries.tobytes()
        write_atomically(self.path, (_header(shard_size, content) if shard_size else bytes(_HEADER.size)) + content)

    def finish(self, shard_size: int) -> None:
        """Note the size of the finished shard, and what shows whether the index is whole."""
        with self.path.open("r+b") as file:
            header = _header(shard_size, file.read()[_HEADER.size :])
            file.seek(0)
            file.write(header)


def as_entries(entries: Iterable[Entry]) -> Entries:
    return np.fromiter(entries, ENTRY)


def _header(shard_size: int, entries: bytes) -> bytes:
    return _HEADER.pack(shard_size, len(entries) // ENTRY.itemsize, zlib.crc32(entries))


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
        except (ValueError, KeyError, TypeError, RecursionError):
            file.truncate(start)
        else:
            file.write(b"\n")
        os.fsync(file.fileno())


def _last_line_start(file: Any, size: int) -> int:
    """The offset behind the last newline of the first `size` bytes."""
    chunk = 1 << 16
    for end in range(size, 0, -chunk):
        begin = max(0, end - chunk)
        file.seek(begin)
        if (found := file.read(end - begin).rfind(b"\n")) >= 0:
            return int(begin + found + 1)
    return 0


def read_lines(
    path: Path, shape: RecordShape, growing: bool = False
) -> Iterator[tuple[bytes, dict[str, Any], tuple[str, int, bool]]]:
    """Each line of a shard, its record, and what it is about. Fatal if one is damaged: no kill does that.

    Of one that is `growing`, by another task or until a kill, the end may be torn; it is read as `repair` mends it.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            is_end = growing and not line.endswith(b"\n")
            try:
                record = json.loads(line)
                key = shape.key(record)
            except (ValueError, KeyError, TypeError, RecursionError):
                if is_end:
                    return
                raise Fatal(
                    f"{path}:{number}: this record is damaged, and not by an interrupted run. Restore the file, "
                    "or start anew with --overwrite."
                ) from None
            yield line, record, key
            if is_end:
                return


def write_atomically(path: Path, content: str | bytes) -> None:
    """Put a whole file in place, or leave what was there."""
    data = content.encode() if isinstance(content, str) else content
    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    publish(scratch, path)


def publish(scratch: Path, final: Path) -> None:
    """Rename a complete file to its final name, and make the name durable."""
    scratch.replace(final)
    folder = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "..."
