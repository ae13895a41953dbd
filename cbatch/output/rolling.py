"""A folder of shards that are published one after another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cbatch.output.file_sink import FileSink
from cbatch.output.growing import Indexed
from cbatch.output.index import Done, Entries, as_entries
from cbatch.output.lines import read_lines
from cbatch.output.shard import Shard


class RollingShards(FileSink):
    """Each shard grows until it has `--shard-rows` records, and is then published.

    Each of several ranks has shards of its own, under names that say which rank that is.
    """

    def _resume(self) -> Done:
        files, done = self._files, Done(self._rank)
        growing, finals = files.growing_files(), files.final_files()
        for shard in (
            growing.keys() & finals.keys()
        ):  # a kill came between writing the final and removing the growing one
            path = growing.pop(shard)
            if files.owns(shard):
                path.unlink()
        numbers = [shard.number for shard in growing if shard.rank == self._rank]
        numbers += [shard.number + 1 for shard in finals if shard.rank == self._rank]
        self._shard = Shard(self._rank, max(numbers, default=0))
        for shard in filter(files.concerns, finals):
            done.add(self._read_final(shard, finals[shard]))
        for shard in filter(files.concerns, growing):
            done.add(files.recover(shard, growing[shard], self._retry_failed))
        return done

    def _read_final(self, shard: Shard, path: Path) -> Entries:
        """The entries of a final shard. With --retry-failed, the records of failed rows are removed from it first."""
        files = self._files
        entries = files.read_final(shard, path)
        if not self._retry_failed or not entries["failed"].any():
            return entries
        records = zip(files.records(path), entries["failed"], strict=True)
        files.write_final(shard, (record for record, failed in records if not failed))
        kept: Entries = entries[entries["failed"] == 0]
        files.write_index(shard, kept)
        return kept

    def _prepare(self) -> Entries:
        return as_entries(())

    def _append(self, records: list[Indexed]) -> None:
        size = self._files.target.output.shard_rows
        while records:
            growing = self._grow()
            room = max(0, size - growing.num_rows)
            growing.append(records[:room])
            records = records[room:]
            if growing.num_rows >= size:
                self._close_growing()
                self._publish()

    def _publish(self) -> None:
        self._files.publish(self._shard)
        self._shard = Shard(self._rank, self._shard.number + 1)

    def finish(self, rows: Sequence[range], /) -> int:
        self._start_anew()
        self._inherit()
        return super().finish(rows)

    def _inherit(self) -> None:
        """Publish copies of the growing shards that ranks of another division of the job left.

        Only a task that has the whole job to itself removes the originals. Another task that starts at this moment may, on
        a network's file system, see the state folder as it is and the output as it was a minute ago.
        """
        files, finals = self._files, self._files.final_files()
        for shard, path in files.growing_files().items():
            if not self._rank.inherits(shard.rank) or shard in finals:
                continue
            if len(entries := files.read_growing(shard, path)):
                lines = read_lines(path, files.target.shape, growing=True)
                files.write_final(shard, (line.record for line in lines))
                files.write_index(shard, entries)
            if self._rank.is_whole:
                path.unlink()
