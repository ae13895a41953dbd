"""A single file, or a folder in the order of the input: published whole when the job ends."""

from __future__ import annotations

from itertools import chain, islice

import numpy as np

from cbatch.output import durable
from cbatch.output.file_sink import FileSink
from cbatch.output.growing import Indexed
from cbatch.output.index import Done, Entries, as_entries, input_order
from cbatch.output.lines import read_in_order
from cbatch.output.shard import Shard


class WholeOutput(FileSink):
    """All records go to one growing shard. While it exists, it says what is done, and the final files do not count."""

    def _resume(self) -> Done:
        files, done = self._files, Done(self._rank)
        growing = files.growing_files()
        for shard, path in growing.items():
            done.add(files.recover(shard, path, self._retry_failed))
        for shard, path in files.final_files().items() if not growing else ():
            entries = files.read_final(shard, path)
            done.add(entries[entries["failed"] == 0] if self._retry_failed else entries)
        return done

    def _prepare(self) -> Entries:
        """Copy the published records to the growing shard; with --retry-failed, without those of failed rows."""
        files, finals = self._files, self._files.final_files()
        entries = np.concatenate([as_entries(()), *(files.read_final(*final) for final in finals.items())])
        keep = entries["failed"] == 0 if self._retry_failed else np.ones(len(entries), bool)
        records = zip(chain.from_iterable(map(files.records, finals.values())), keep, strict=True)
        durable.replace(files.growing(self._shard), files.lines(record for record, kept in records if kept))
        kept_entries: Entries = entries[keep]
        return kept_entries

    def _append(self, records: list[Indexed]) -> None:
        self._grow().append(records)

    def _publish(self) -> None:
        output = self._files.target.output
        if output.ordered:
            self._publish_in_order(None if self._files.target.single_file else output.shard_rows)
        else:
            self._files.publish(self._shard)

    def _publish_in_order(self, shard_rows: int | None) -> None:
        """Write final shards of `shard_rows` records each (None: all in one), and remove final shards of earlier runs."""
        files, growing = self._files, self._files.growing(self._shard)
        stale = files.final_files().keys()
        entries = files.index(self._shard).read()
        assert entries is not None
        order = input_order(entries)
        size = shard_rows or max(1, len(order))
        records = read_in_order(growing, order)
        shards = [Shard(self._rank, number) for number in range(max(1, -(-len(order) // size)))]
        for shard in shards:
            files.write_final(shard, islice(records, size))
        for shard in stale - set(shards):
            files.final(shard).unlink()
        growing.unlink()  # from here on the final files say what is done
        for shard in shards:
            files.write_index(shard, entries[order[shard.number * size :][:size]])
