"""The shards of an output on disk: their paths, the records in them, and how they are written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.errors import Fatal
from cbatch.output import durable
from cbatch.output.index import Done, Entries, Entry, IndexFile, as_entries
from cbatch.output.lines import read_lines, repair, to_lines
from cbatch.output.record import RecordKey
from cbatch.output.shard import Shard, find_shards
from cbatch.output.target import Target
from cbatch.rows.rank import WHOLE, Rank
from cbatch.rows.reader import UNKNOWN_DIGEST, Source

if TYPE_CHECKING:
    import pyarrow as pa


class ShardFiles:
    """The growing and the final shards of an output, as one of the ranks that may share it sees them.

    A rank may start while others run, so it neither changes nor removes any file but its own. Records of ranks of another
    division of the job (nobody writes to these shards any more) count as done.
    """

    def __init__(
        self, target: Target, sources: Sequence[Source], rank: Rank = WHOLE, schema: pa.Schema | None = None
    ) -> None:
        self.target, self.rank, self.schema = target, rank, schema
        self._source_ids = {source.name: index for index, source in enumerate(sources)}

    # Names

    def growing(self, shard: Shard) -> Path:
        return self.target.state / f"{shard.name}.jsonl"

    def index(self, shard: Shard) -> IndexFile:
        return IndexFile(self.target.state / f"{shard.name}.idx")

    def final(self, shard: Shard) -> Path:
        target = self.target
        return target.path if target.single_file else target.path / f"{shard.name}.{target.format}"

    def growing_files(self) -> dict[Shard, Path]:
        return find_shards(self.target.state, ".jsonl")

    def final_files(self) -> dict[Shard, Path]:
        return self.target.final_files()

    def owns(self, shard: Shard) -> bool:
        """Whether the files of a shard are this rank's to change."""
        return self.rank.is_whole or shard.rank == self.rank

    def concerns(self, shard: Shard) -> bool:
        """Whether a shard may hold rows of this rank: not if another rank of the same division writes it."""
        return shard.rank == self.rank or shard.rank.num_ranks != self.rank.num_ranks

    # Reading

    def exist(self) -> bool:
        """Whether there is any shard, published or not."""
        return bool(self.final_files() or self.growing_files())

    def hold_completions(self) -> bool:
        """Whether any record is of a row that did not fail; also True if that can't be told."""
        paths = [*self.final_files().values(), *self.growing_files().values()]
        try:
            return any(not self.target.shape.key(record).failed for path in paths for record in self.records(path))
        except (Fatal, KeyError, TypeError):
            return True

    def records(self, path: Path) -> Iterator[dict[str, Any]]:
        """The records of a whole file."""
        if path.suffix == ".parquet":
            from cbatch.output import parquet

            return parquet.read_records(path)
        return (line.record for line in read_lines(path, self.target.shape))

    def entry(self, key: RecordKey, digest: int, is_content: bool = False) -> Entry:
        """The index entry of a record; Fatal if the record's source is no input of the job."""
        if key.source not in self._source_ids:
            raise Fatal(f"{self.target} holds a row of {key.source}, which is not an input of this job")
        return Entry(key.row, self._source_ids[key.source], digest, key.failed, is_content)

    def _entries(self, records: Iterable[dict[str, Any]], remembered: Entries | None = None) -> Iterator[Entry]:
        """The entries of records, with the digests that an index remembers of them, else of what they hold of their rows.

        A record in Parquet may hold a row in other types than it had, so its digest is unknown.
        """
        shape, known = self.target.shape, as_entries(()) if remembered is None else remembered
        for number, record in enumerate(records):
            entry = self.entry(shape.key(record), UNKNOWN_DIGEST)
            last = known[number] if number < len(known) else None
            if last is not None and _is_same(last, entry) and last["digest"]:  # 0: a loss of power left zeros
                yield entry._replace(digest=int(last["digest"]), is_content=bool(last["is_content"]))
            elif self.schema is None:
                yield entry._replace(digest=shape.content_of_record(record), is_content=True)
            else:
                yield entry

    def read_final(self, shard: Shard, path: Path) -> Entries:
        """The entries of a final shard: from its index, or from the shard itself if the index does not fit the shard."""
        size = path.stat().st_size
        entries = self.index(shard).read(size)
        if entries is None or (entries["source"] >= len(self._source_ids)).any():
            entries = as_entries(self._entries(self.records(path)))
            if self.owns(shard):
                self.index(shard).write(entries, size)
        return entries

    def read_growing(self, shard: Shard, path: Path) -> Entries:
        """The entries of the whole records of a growing shard; none if it has just been published."""
        try:
            lines = read_lines(path, self.target.shape, growing=True)
            return as_entries(self._entries((line.record for line in lines), self.index(shard).read()))
        except FileNotFoundError:
            return as_entries(())

    def survey(self) -> Done:
        """What all ranks together have done up to now."""
        growing = {shard: self.read_growing(shard, path) for shard, path in self.growing_files().items()}
        finals = {shard: self.read_final(shard, path) for shard, path in self.final_files().items()}
        done = Done(self.rank)
        for entries in {**growing, **finals}.values():
            done.add(entries)
        return done

    # Writing

    def lines(self, records: Iterable[dict[str, Any]]) -> Iterator[bytes]:
        """The lines of these records in a growing shard. One that becomes Parquet keeps NaN and infinities."""
        return to_lines(records, keep_nan=self.schema is not None)

    def recover(self, shard: Shard, path: Path, drop_failed: bool) -> Entries:
        """Mend what a killed job left of a growing shard, if it is this rank's, and its index; the entries."""
        if not self.owns(shard):
            return self.read_growing(shard, path)
        repair(path, self.target.shape)
        entries = self.read_growing(shard, path)
        if drop_failed and entries["failed"].any():
            lines = read_lines(path, self.target.shape)
            durable.replace(path, (line.text for line in lines if not line.key.failed))
            entries = entries[entries["failed"] == 0]
        self.index(shard).write(entries)
        return entries

    def write_final(self, shard: Shard, records: Iterable[dict[str, Any]]) -> None:
        """Write a final shard and put it in place at once. Its index is not changed."""
        final = self.final(shard)
        with durable.replacing(final, self.target.state / f"{final.name}.tmp") as scratch:
            if self.schema is None:
                with scratch.open("wb") as file:
                    file.writelines(to_lines(records))
                return
            from cbatch.output import parquet

            parquet.write(scratch, records, self.schema)

    def write_index(self, shard: Shard, entries: Entries) -> None:
        """Write the index of a final shard."""
        self.index(shard).write(entries, self.final(shard).stat().st_size)

    def publish(self, shard: Shard) -> None:
        """Turn a growing shard, which is closed, into a final one."""
        growing, final = self.growing(shard), self.final(shard)
        if self.schema is None:
            durable.publish(growing, final)
        else:
            self.write_final(shard, self.records(growing))
            growing.unlink()
        self.index(shard).finish(final.stat().st_size)

    def remove(self) -> None:
        """Throw away all shards, final and growing."""
        for path in [*self.final_files().values(), *self.target.state.glob("part-*")]:
            path.unlink()


def _is_same(remembered: Any, entry: Entry) -> bool:
    """Whether an entry of an index is of the same row as a record."""
    return bool(remembered["row"] == entry.row and remembered["source"] == entry.source)
