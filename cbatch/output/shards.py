"""The files of one output: appended to as rows finish, complete whenever they stand under their final name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cbatch.errors import Fatal
from cbatch.output.journal import Done, Entries, Entry, IndexFile, Journal, as_entries, publish, read_lines, repair
from cbatch.output.record import RecordShape, dumps
from cbatch.output.shard import Shard, find_shards
from cbatch.rows.reader import UNKNOWN_DIGEST

if TYPE_CHECKING:
    import pyarrow as pa


class Shards:
    """Where records go.

    A folder without `ordered` is a row of shards: one grows in the state folder as JSONL until it has `shard_rows`
    records, and is then published under its final name. A single file, or an ordered folder, is published whole when
    the job ends, from one growing file; as long as that exists, it and not the final files says what is done.

    A task with a share of the rows has shards of its own, under names that say which share that is. It may start while
    others run, so it neither changes nor removes any file but its own. What is left where the job was divided otherwise
    (nobody writes to that any more) counts as done; the task that inherits it publishes a copy when it ends itself.
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
        self.rank = journal.rank
        self._part = Shard(self.rank, 0)  # that grows
        self._num_rows = 0  # in the growing shard
        self._drop_failed = False  # when the growing file is made from the final ones
        self._file = self._index = -1
        self._replacement: dict[str, Any] | None = None

    def resume(self, retry_failed: bool) -> Done:
        """Find out what is done. With `retry_failed`, rows that failed are not, and their records go away."""
        done = Done(len(self.source_names), self.rank)
        growing, finals = self._growing_files(), self._final_files()
        if self._rolling:
            for part in [part for part in growing if part in finals]:  # killed between the two
                path = growing.pop(part)
                if self._keeps(part):
                    path.unlink()
            own = [part.number + (part in finals) for part in (*growing, *finals) if part.rank == self.rank]
            self._part = Shard(self.rank, max(own, default=0))
        elif growing:
            finals = {}
        for part, path in finals.items():
            if self._is_siblings(part):
                continue
            if retry_failed and self._rolling:
                self._drop_failed_of_final(part, path)
            entries = self._entries_of_final(part, path)
            done.add(entries[entries["failed"] == 0] if retry_failed else entries)
        for part, path in growing.items():
            if not self._is_siblings(part):
                done.add(self._entries_of_growing(part, path, retry_failed))
        self._drop_failed = retry_failed
        return done

    def survey(self) -> Done:
        """What all tasks of the job together have done up to now."""
        growing = {part: self._read_growing(part, path) for part, path in self._growing_files().items()}
        finals = {part: self._entries_of_final(part, path) for part, path in self._final_files().items()}
        done = Done(len(self.source_names), self.rank)
        for entries in {**growing, **finals}.values():
            done.add(entries)
        return done

    def _keeps(self, part: Shard) -> bool:
        """Whether its files are this task's to change."""
        return self.rank.is_whole or part.rank == self.rank

    def _is_siblings(self, part: Shard) -> bool:
        """Whether it holds rows of another task of the same division: none of this task's, and it may run now."""
        return part.rank.num_ranks == self.rank.num_ranks and part.rank != self.rank

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
        if self._rolling:
            self._publish_inheritance()
        if self._file < 0 and (self._growing(self._part).exists() or not self._final_files()):
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

    # Names

    def _growing(self, part: Shard) -> Path:
        return self.journal.state / f"{part.name}.jsonl"

    def _index_file(self, part: Shard) -> IndexFile:
        return IndexFile(self.journal.state / f"{part.name}.idx")

    def _final(self, part: Shard) -> Path:
        return self.journal.output if self.single_file else self.journal.output / f"{part.name}.{self.suffix}"

    def _growing_files(self) -> dict[Shard, Path]:
        return find_shards(self.journal.state, ".jsonl")

    def _final_files(self) -> dict[Shard, Path]:
        if self.single_file:
            return {Shard(self.rank, 0): self.journal.output} if self.journal.output.exists() else {}
        return find_shards(self.journal.output)

    # Resuming

    def _entries_of_final(self, part: Shard, path: Path) -> Entries:
        index = self._index_file(part)
        entries = index.read(path.stat().st_size)
        if entries is None or (entries["source"] >= len(self.source_names)).any():
            keys = (self.shape.key(record) for record in self._records(path))
            entries = as_entries(self.entry(*key, UNKNOWN_DIGEST) for key in keys)
            if self._keeps(part):
                index.write(entries, path.stat().st_size)
        return entries

    def _entries_of_growing(self, part: Shard, path: Path, retry_failed: bool) -> Entries:
        """Those of a growing shard that no task writes to; if it is this one's, bring it and its index into step."""
        if not self._keeps(part):
            return self._read_growing(part, path)
        repair(path, self.shape)
        entries = self._read_growing(part, path)
        if retry_failed and entries["failed"].any():
            lines = zip((line for line, _, _ in read_lines(path, self.shape)), entries["failed"], strict=True)
            _replace(path, (line for line, failed in lines if not failed))
            entries = entries[entries["failed"] == 0]
        self._index_file(part).write(entries)
        return entries

    def _read_growing(self, part: Shard, path: Path) -> Entries:
        """Those of the whole records of a growing shard; none if it has just been published."""
        try:
            lines = read_lines(path, self.shape, growing=True)
            entries = as_entries(self.entry(*key, UNKNOWN_DIGEST) for _, _, key in lines)
        except FileNotFoundError:
            return as_entries(())
        if (remembered := self._index_file(part).read()) is not None:
            remembered = remembered[: len(entries)]
            head = entries[: len(remembered)]
            same = (head["row"] == remembered["row"]) & (head["source"] == remembered["source"])
            known = same & (remembered["digest"] != 0)  # where power was lost, a file may end in zeros
            head["digest"] = np.where(known, remembered["digest"], UNKNOWN_DIGEST)
        return entries

    def _drop_failed_of_final(self, part: Shard, path: Path) -> None:
        entries = self._entries_of_final(part, path)
        if entries["failed"].any():
            records = zip(self._records(path), entries["failed"], strict=True)
            self._write_final(part, (record for record, failed in records if not failed))
            self._index_file(part).write(entries[entries["failed"] == 0], path.stat().st_size)

    def _records(self, path: Path) -> Iterator[dict[str, Any]]:
        if path.suffix == ".parquet":
            from cbatch.output import parquet

            return parquet.read_records(path)
        return (record for _, record, _ in read_lines(path, self.shape))

    # Writing

    def _open(self) -> None:
        """Open the growing shard; what an output that is published whole holds already goes into it first."""
        path, index = self._growing(self._part), self._index_file(self._part)
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
        path = self._growing(self._part)
        if self._rolling:
            self._publish_shard(self._part, path)
            self._part = Shard(self.rank, self._part.number + 1)
        elif self.single_file and not self.ordered:
            self._publish_shard(self._part, path)
        else:
            self._publish_in_order(path)

    def _publish_inheritance(self) -> None:
        """Publish copies of what is left where the job was divided otherwise.

        Only a task that has the whole job to itself removes the originals. Another that starts at this moment may, on
        a network's file system, see the state folder as it is and the output as it was a minute ago.
        """
        finals = self._final_files()
        for part, path in self._growing_files().items():
            if not self.rank.inherits(part.rank) or part in finals:
                continue
            if len(entries := self._read_growing(part, path)):
                records = (record for _, record, _ in read_lines(path, self.shape, growing=True))
                self._write_final(part, records)
                self._index_file(part).write(entries, self._final(part).stat().st_size)
            if self.rank.is_whole:
                path.unlink()

    def _publish_in_order(self, path: Path) -> None:
        stale = self._final_files().keys()
        entries = self._index_file(self._part).read()
        assert entries is not None
        order = np.lexsort((entries["row"], entries["source"]))
        records, size = _in_order(path, order), len(order) if self.single_file else self.shard_rows
        starts = range(0, max(1, len(order)), max(1, size))
        parts = [Shard(self.rank, number) for number in range(len(starts))]
        for part in parts:
            self._write_final(part, islice(records, size))
        for part in stale - set(parts):
            self._final(part).unlink()
        path.unlink()
        for part, start in zip(parts, starts, strict=True):
            self._index_file(part).write(entries[order[start : start + size]], self._final(part).stat().st_size)

    def _publish_shard(self, part: Shard, path: Path) -> None:
        final = self._final(part)
        if self.schema is None:
            publish(path, final)
        else:
            self._write_final(part, _parsed(path))
            path.unlink()
        self._index_file(part).finish(final.stat().st_size)

    def _write_final(self, part: Shard, records: Iterable[dict[str, Any]]) -> None:
        final = self._final(part)
        scratch = self.journal.state / f"{final.name}.tmp"
        if self.schema is None:
            _replace(final, (dumps(record).encode() + b"\n" for record in records), scratch)
            return
        from cbatch.output import parquet

        parquet.write(scratch, records, self.schema)
        with scratch.open("rb") as file:
            os.fsync(file.fileno())
        publish(scratch, final)


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
