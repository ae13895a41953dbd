"""Completions in files, which a killed job continues when it is run again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

from cbatch.errors import UsageError
from cbatch.output.growing import GrowingShard, Indexed
from cbatch.output.index import Done, Entries
from cbatch.output.journal import Journal, Settings
from cbatch.output.record import RecordKey
from cbatch.output.shard import Shard
from cbatch.output.shard_files import ShardFiles
from cbatch.rows.request import Completion


class FileSink(ABC):
    """Base of the two file layouts. A shard grows in the state folder, and gets its final name when it is complete."""

    resumable = True

    def __init__(self, journal: Journal, files: ShardFiles) -> None:
        output = files.target.output
        self._journal, self._files, self._rank = journal, files, files.rank
        self._overwrite, self._retry_failed = output.overwrite, output.retry_failed
        self._settings: Settings = {}
        self._replaces = False  # whether the first record of this job removes the output of an earlier one
        self._shard = Shard(self._rank, 0)  # the shard that grows, or will grow next
        self._growing: GrowingShard | None = None  # once there is something to write

    def open(self, settings: Settings, drawn: Collection[str] = (), /) -> tuple[Settings, Done]:
        journal = self._journal
        is_there = self._files.exist()  # asked before the manifest: ranks write their settings before their rows
        settings = settings | self._files.target.layout
        earlier = None if self._overwrite else journal.manifest
        if not is_there and not self._rank.is_whole:
            earlier = journal.propose(settings)
        if earlier and (unknown := {name: settings[name] for name in drawn if name not in earlier}):
            earlier |= unknown  # the job began under a cbatch that did not record these
            journal.begin(earlier)
        if earlier:
            settings |= {name: earlier[name] for name in drawn}
        self._replaces = self._overwrite or (is_there and self._is_void(earlier, settings))
        if not self._replaces:
            self._agree(settings, earlier, is_there)
        journal.forget_summary()
        self._settings = settings
        return settings, Done() if self._replaces else self._resume()

    def _is_void(self, earlier: Settings | None, settings: Settings) -> bool:
        """Whether the earlier job had other settings and completed no row, so that nothing is lost with its output."""
        return (
            self._rank.is_whole and earlier is not None and earlier != settings and not self._files.hold_completions()
        )

    def _agree(self, settings: Settings, earlier: Settings | None, is_there: bool) -> None:
        """Make sure that the manifest holds these settings; UsageError if there is an output with others."""
        if not is_there and self._rank.is_whole:
            self._journal.begin(settings)
        elif earlier is None:
            target = self._files.target
            raise UsageError(f"{target}: was not made by cbatch, or its state is gone; --overwrite replaces it")
        else:
            self._journal.check(settings, may_differ=("input sizes",) if self._retry_failed else ())

    def write(self, completions: Sequence[Completion]) -> None:
        self._start_anew()
        files, shape = self._files, self._files.target.shape
        rows = ((completion.row, completion.error is not None) for completion in completions)
        entries = [files.entry(RecordKey(row.source, row.index, failed), row.digest) for row, failed in rows]
        self._append(list(map(Indexed, files.lines(map(shape.record, completions)), entries)))

    def sync(self) -> None:
        if self._growing:
            self._growing.sync()

    def finish(self, rows: Sequence[range], /) -> int:
        self._start_anew()
        if self._files.growing(self._shard).exists() or not self._files.final_files():
            self._grow()
        if self._growing:
            self._close_growing()
            self._publish()
        if self._retry_failed:  # the input may have been mended
            self._journal.begin(self._settings)
        if self._rank.is_whole:
            return 0
        done = self._files.survey()
        return sum(done.count_missing(source, wanted) for source, wanted in enumerate(rows))

    def write_summary(self, figures: dict[str, Any]) -> None:
        self._journal.write_summary(figures)

    def close(self) -> None:
        try:
            self._close_growing()
        finally:
            self._journal.close()

    def _start_anew(self) -> None:
        """If this job replaces an earlier one, remove the earlier output, which has been kept up to this moment."""
        if self._replaces:
            self._files.remove()
            self._journal.forget()
            self._journal.begin(self._settings)
            self._replaces = False

    def _grow(self) -> GrowingShard:
        """Open the growing shard, if it is not open."""
        if self._growing is None:
            path, index = self._files.growing(self._shard), self._files.index(self._shard)
            if not path.exists():
                index.write(self._prepare())
            self._growing = GrowingShard(path, index)
        return self._growing

    def _close_growing(self) -> None:
        growing, self._growing = self._growing, None
        if growing:
            growing.close()

    # The parts in which the layouts differ

    @abstractmethod
    def _resume(self) -> Done:
        """Find out what is done. With --retry-failed, failed rows are not done, and their records are removed."""

    @abstractmethod
    def _prepare(self) -> Entries:
        """Write what a new growing shard holds before anything is appended; returns the entries of these records."""

    @abstractmethod
    def _append(self, records: list[Indexed]) -> None:
        """Append records to growing shards."""

    @abstractmethod
    def _publish(self) -> None:
        """Publish the growing shard, which is closed."""
