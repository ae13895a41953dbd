"""Completions in files that a killed job goes on with. How the files are cut and when they are published is a layout's."""

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
    """Base of the layouts: a shard grows in the state folder, and gets its final name when it is whole."""

    resumable = True

    def __init__(self, journal: Journal, files: ShardFiles) -> None:
        output = files.target.output
        self._journal, self._files, self._rank = journal, files, files.rank
        self._overwrite, self._retry_failed = output.overwrite, output.retry_failed
        self._settings: Settings = {}
        self._replaces = False  # the job that is there goes away with the first record of this one
        self._shard = Shard(self._rank, 0)  # the one that grows, or will be next
        self._growing: GrowingShard | None = None  # once there is something to write

    def open(self, settings: Settings, drawn: Collection[str] = (), /) -> tuple[Settings, Done]:
        journal, is_there = self._journal, self._files.exist()  # another rank writes its settings before its rows
        settings = settings | self._files.target.layout
        earlier = None if self._overwrite else journal.manifest
        if not is_there and not self._rank.is_whole:
            earlier = journal.propose(settings)
        if earlier:
            settings |= {name: earlier[name] for name in drawn}
        self._replaces = self._overwrite or (is_there and self._is_void(earlier, settings))
        if not self._replaces:
            self._agree(settings, earlier, is_there)
        journal.forget_summary()
        self._settings = settings
        return settings, Done() if self._replaces else self._resume()

    def _is_void(self, earlier: Settings | None, settings: Settings) -> bool:
        """Whether the job that is there has other settings, but nothing to lose: it completed no row."""
        return (
            self._rank.is_whole and earlier is not None and earlier != settings and not self._files.hold_completions()
        )

    def _agree(self, settings: Settings, earlier: Settings | None, is_there: bool) -> None:
        """Make sure that the manifest holds these settings; UsageError if what is there was made under others."""
        if not is_there and self._rank.is_whole:
            self._journal.begin(settings)
        elif earlier is None:
            target = self._files.target
            raise UsageError(f"{target}: was not made by cbatch, or its state is gone; --overwrite replaces it")
        else:
            self._journal.check(settings, may_differ=("input sizes",) if self._retry_failed else ())

    def write(self, completions: Sequence[Completion]) -> None:
        self._start_anew()
        shape, records = self._files.target.shape, []
        for completion in completions:
            row = completion.row
            entry = self._files.entry(RecordKey(row.source, row.index, completion.error is not None), row.digest)
            records.append(Indexed(shape.record(completion), entry))
        self._append(records)

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
        """Remove the job that this one replaces. Up to this moment, what it left stays."""
        if self._replaces:
            self._files.remove()
            self._journal.forget()
            self._journal.begin(self._settings)
            self._replaces = False

    def _grow(self) -> GrowingShard:
        """The shard that grows, open."""
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

    # What layouts do in their own ways

    @abstractmethod
    def _resume(self) -> Done:
        """Find out what is done. Rows that failed are not if they are to be retried, and their records go away."""

    @abstractmethod
    def _prepare(self) -> Entries:
        """Make what has to be in a growing shard before anything is appended; the entries of that."""

    @abstractmethod
    def _append(self, records: list[Indexed]) -> None:
        """Append records to growing shards."""

    @abstractmethod
    def _publish(self) -> None:
        """Publish the growing shard, which is closed."""
