"""The files of one output: appended to as rows finish, complete whenever they stand under their final name."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cbatch.errors import Fatal
from cbatch.rows.journal import Done, Entries, Entry, IndexFile, Journal, as_entries, publish, read_lines, repair
from cbatch.rows.reader import UNKNOWN_DIGEST
from cbatch.rows.record import RecordShape, dumps

if TYPE_CHECKING:
    import pyarrow as pa

_PART = re.compile(r"part-(\d{5,})\.(?:jsonl|parquet)")


class Shards:
    """Where records go.

    A folder without `ordered` is a row of shards: one grows in the state folder as JSONL until it has `shard_rows`
    records, and is then published under its final name. A single file, or an ordered folder, is published whole when
    the job ends, from one growing file; as long as that exists, it and not the final files says what is done.
    """

    def __init__(
        self,
        journal: Journal,
        shape: RecordShape,
        source_names: Sequence[str],
        schema: pa.Schema | None,
        single_file: bool,
        ordered: bool,
        shard_rows: int,
    ) -> None:
        self.journal, self.shape, self.schema = journal, shape, schema
        self.single_file, self.ordered, self.shard_rows = single_file, ordered, shard_rows
        self.source_names = list(source_names)
        self._index_of = {name: index for index, name in enumerate(source_names)}
        self._rolling = not single_file and not ordered
        self.suffix = "parquet" if schema is not None else "jsonl"
        self._number = 0  # of the growing shard
        self._num_rows = 0  # in the growing shard
        self._drop_failed = False  # when the growing file is made from the final ones
        self._file = self._index = -1
        self._replacement: dict[str, Any] | None = None

    def resume(self, retry_failed: bool) -> Done:
        """Find out what is done. With `retry_failed`, rows that failed are not, and their records go away."""
        done = Done(len(self.source_names))
        growing, finals = self._growing_files(), self._final_files()
        if self._rolling:
            for number in set(growing) & set(finals):  # killed between the two
                growing.pop(number).unlink()
            self._number = max([*growing, *(number + 1 for number in finals)], default=0)
        elif growing:
            finals = {}
        for number, path in finals.items():
            if retry_failed and self._rolling:
                self._drop_failed_of_final(number, path)
            entries = self._entries_of_final(number, path)
            done.add(entries[entries["failed"] == 0] if retry_failed else entries)
        for number, path in growing.items():
            done.add(self._entries_of_growing(number, path, retry_failed))
        self._drop_failed = retry_failed
        return done

    def entry(self, source: str, row: int, failed: bool, digest: int) -> Entry:
        if source not in self._index_of:
            raise Fatal(f"{self.journal.output} holds a row of {source}, which is not an input of this job")
        return row, self._index_of[source], digest, failed

    def append(self, records: Sequence[tuple[dict[str, Any], Entry]]) -> None:
        """Write records and have them survive the death of this process."""
        self._replace_now()
        rest = list(records)
        while rest:
            if self._file < 0:
                self._open()
            room = self.shard_rows - self._num_rows if self._rolling else len(rest)
            now, rest = rest[:room], rest[room:]
            _append(self._file, "".join(dumps(record) + "\n" for record, _ in now).encode())
            _append(self._index, as_entries(entry for _, entry in now).tobytes())
            self._num_rows += len(now)
            if self._rolling and self._num_rows >= self.shard_rows:
                self._publish_growing()

    def sync(self) -> None:
        """Have everything appended so far survive the death of the machine."""
        if self._file >= 0:
            os.fdatasync(self._file)
            os.fdatasync(self._index)

    def finish(self) -> None:
        """The job has ended: publish what is not published yet; an empty output if there was no row at all."""
        self._replace_now()
        if self._file < 0 and (self._growing_files() or not self._final_files()):
            self._open()
        if self._file >= 0:
            self._publish_growing()

    def close(self) -> None:
        if self._file >= 0:
            self.sync()
            os.close(self._file)
            os.close(self._index)
            self._file = self._index = -1

    def exists(self) -> bool:
        """Whether there is any record of this output, published or not."""
        return bool(self._final_files() or self._growing_files())

    def replace(self, settings: dict[str, Any]) -> None:
        """Start anew (`--overwrite`) with the first record: until then, what an earlier job left here stays."""
        self._replacement = settings

    def _replace_now(self) -> None:
        if self._replacement is not None:
            self.remove()
            self.journal.begin(self._replacement)
            self._replacement = None

    @property
    def starts_anew(self) -> bool:
        return self._replacement is not None

    def has_completions(self) -> bool:
        """Whether any row of this output did not fail; also if that can't be told."""
        paths = [*self._final_files().values(), *self._growing_files().values()]
        try:
            return any(not self.shape.key(record)[2] for path in paths for record in self._records(path))
        except (Fatal, KeyError, TypeError):
            return True

    def remove(self) -> None:
        """Throw away everything that a job left here."""
        for path in [*self._final_files().values(), *self.journal.state.glob("part-*")]:
            path.unlink()
        (self.journal.state / "manifest.json").unlink(missing_ok=True)

    def holds(self, path: Path) -> bool:
        """Whether this is one of the published files, or lies in the state folder."""
        published = any(path.samefile(final) for final in self._final_files().values())
        return published or path.resolve().is_relative_to(self.journal.state.resolve())

    # Names

    def _growing(self, number: int) -> Path:
        return self.journal.state / f"part-{number:05d}.jsonl"

    def _index_file(self, number: int) -> IndexFile:
        return IndexFile(self.journal.state / f"part-{number:05d}.idx")

    def _final(self, number: int) -> Path:
        return self.journal.output if self.single_file else self.journal.output / f"part-{number:05d}.{self.suffix}"

    def _growing_files(self) -> dict[int, Path]:
        return _numbered(self.journal.state.glob("part-*.jsonl"))

    def _final_files(self) -> dict[int, Path]:
        if self.single_file:
            return {0: self.journal.output} if self.journal.output.exists() else {}
        return _numbered(self.journal.output.glob("part-*"))

    # Resuming

    def _entries_of_final(self, number: int, path: Path) -> Entries:
        index = self._index_file(number)
        entries = index.read(path.stat().st_size)
        if entries is None or (entries["source"] >= len(self.source_names)).any():
            keys = (self.shape.key(record) for record in self._records(path))
            entries = as_entries(self.entry(*key, UNKNOWN_DIGEST) for key in keys)
            index.write(entries, path.stat().st_size)
        return entries

    def _entries_of_growing(self, number: int, path: Path, retry_failed: bool) -> Entries:
        """Bring the growing shard and its index into step."""
        repair(path, self.shape)
        index = self._index_file(number)
        entries = as_entries(self.entry(*key, UNKNOWN_DIGEST) for _, _, key in read_lines(path, self.shape))
        if (remembered := index.read()) is not None:
            remembered = remembered[: len(entries)]
            head = entries[: len(remembered)]
            same = (head["row"] == remembered["row"]) & (head["source"] == remembered["source"])
            head["digest"] = np.where(same, remembered["digest"], UNKNOWN_DIGEST)
        if retry_failed and entries["failed"].any():
            lines = zip((line for line, _, _ in read_lines(path, self.shape)), entries["failed"], strict=True)
            _replace(path, (line for line, failed in lines if not failed))
            entries = entries[entries["failed"] == 0]
        index.write(entries)
        return entries

    def _drop_failed_of_final(self, number: int, path: Path) -> None:
        entries = self._entries_of_final(number, path)
        if entries["failed"].any():
            records = zip(self._records(path), entries["failed"], strict=True)
            self._write_final(number, (record for record, failed in records if not failed))
            self._index_file(number).write(entries[entries["failed"] == 0], path.stat().st_size)

    def _records(self, path: Path) -> Iterator[dict[str, Any]]:
        if path.suffix == ".parquet":
            from cbatch.rows import parquet

            return parquet.read_records(path)
        return (record for _, record, _ in read_lines(path, self.shape))

    # Writing

    def _open(self) -> None:
        """Open the growing shard; what an output that is published whole holds already goes into it first."""
        path, index = self._growing(self._number), self._index_file(self._number)
        if not path.exists():
            index.write(as_entries(()) if self._rolling else self._refill(path))
        entries = index.read()
        self._num_rows = 0 if entries is None else len(entries)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file, self._index = os.open(path, flags, 0o666), os.open(index.path, flags, 0o666)

    def _refill(self, path: Path) -> Entries:
        """Make the growing file out of the final ones; the entries of its records."""
        finals = self._final_files()
        entries = np.concatenate([as_entries(()), *(self._entries_of_final(*final) for final in finals.items())])
        keep = entries["failed"] == 0 if self._drop_failed else np.ones(len(entries), bool)
        records = zip(chain.from_iterable(map(self._records, finals.values())), keep, strict=True)
        _replace(path, (dumps(record).encode() + b"\n" for record, kept in records if kept))
        kept_entries: Entries = entries[keep]
        return kept_entries

    def _publish_growing(self) -> None:
        self.close()
        path = self._growing(self._number)
        if self._rolling:
            self._publish_shard(self._number, path)
            self._number += 1
        elif self.single_file and not self.ordered:
            self._publish_shard(0, path)
        else:
            self._publish_in_order(path)

    def _publish_in_order(self, path: Path) -> None:
        stale = self._final_files().keys()
        entries = self._index_file(0).read()
        assert entries is not None
        order = np.lexsort((entries["row"], entries["source"]))
        records, size = _in_order(path, order), len(order) if self.single_file else self.shard_rows
        starts = range(0, max(1, len(order)), max(1, size))
        for number in range(len(starts)):
            self._write_final(number, islice(records, size))
        for number in stale - set(range(len(starts))):
            self._final(number).unlink()
        path.unlink()
        for number, start in enumerate(starts):
            self._index_file(number).write(entries[order[start : start + size]], self._final(number).stat().st_size)

    def _publish_shard(self, number: int, path: Path) -> None:
        final = self._final(number)
        if self.schema is None:
            publish(path, final)
        else:
            self._write_final(number, _parsed(path))
            path.unlink()
        self._index_file(number).finish(final.stat().st_size)

    def _write_final(self, number: int, records: Iterable[dict[str, Any]]) -> None:
        final = self._final(number)
        scratch = self.journal.state / f"{final.name}.tmp"
        if self.schema is None:
            _replace(final, (dumps(record).encode() + b"\n" for record in records), scratch)
            return
        from cbatch.rows import parquet

        parquet.write(scratch, records, self.schema)
        with scratch.open("rb") as file:
            os.fsync(file.fileno())
        publish(scratch, final)


def _numbered(paths: Iterable[Path]) -> dict[int, Path]:
    found = {int(match[1]): path for path in paths if (match := _PART.fullmatch(path.name))}
    return dict(sorted(found.items()))


def _append(file: int, data: bytes) -> None:
    """All of `data` at the end of the file, or none of it."""
    size = os.fstat(file).st_size
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError:
        os.ftruncate(file, size)
        raise


def _replace(path: Path, lines: Iterable[bytes], scratch: Path | None = None) -> None:
    scratch = scratch or path.with_name(path.name + ".tmp")
    with scratch.open("wb") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    publish(scratch, path)


def _parsed(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for line in file:
            yield json.loads(line)


def _in_order(path: Path, order: npt.NDArray[np.int64]) -> Iterator[dict[str, Any]]:
    """The records of a file in this order. Memory: 8 bytes a record."""
    with path.open("rb") as file:
        lengths = np.fromiter(map(len, file), np.int64)
        offsets = lengths.cumsum() - lengths
        for index in order:
            file.seek(int(offsets[index]))
            yield json.loads(file.readline())
