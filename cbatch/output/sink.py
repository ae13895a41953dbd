"""The face of an output, whatever is behind it: open, write, sync, finish, close."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, BinaryIO, Protocol

from cbatch.output.index import Done
from cbatch.output.journal import Journal, Settings
from cbatch.output.rolling import RollingShards
from cbatch.output.shard_files import ShardFiles
from cbatch.output.stream import StreamSink
from cbatch.output.target import Target
from cbatch.output.whole import WholeOutput
from cbatch.rows.rank import Rank
from cbatch.rows.reader import Source
from cbatch.rows.request import Completion


class Sink(Protocol):
    """Where completions go. Open it first and close it last; `write` and `sync` may be called from another thread."""

    resumable: bool  # whether the same command, run again, goes on where this run ended

    def open(self, settings: Settings, drawn: Collection[str] = (), /) -> tuple[Settings, Done]:
        """Begin a job, or continue an earlier one; returns the settings that hold, and what is done.

        A setting named in `drawn` was drawn at random, so that of an earlier run holds. UsageError if other settings
        differ from the earlier run's.
        """

    def write(self, completions: Sequence[Completion]) -> None:
        """Write completions, so that they survive the death of this process."""

    def sync(self) -> None:
        """Have everything written so far survive the death of the machine."""

    def finish(self, rows: Sequence[range], /) -> int:
        """Publish the output of a job that has ended, an empty one if there was no row.

        `rows`: of each source, the rows that are part of the job. Returns how many are left to other ranks.
        """

    def write_summary(self, figures: dict[str, Any]) -> None:
        """Keep the figures of this run beside the output."""

    def close(self) -> None:
        """Let go of the output. What is not finished can be resumed."""


def make_sink(
    target: Target, sources: Sequence[Source], rank: Rank, stdout: BinaryIO | None, note: Callable[[str], None]
) -> Sink:
    """The sink for a target. Locks the output; UsageError if another job writes there. `note` tells the user."""
    if target.is_stream:
        assert stdout is not None
        return StreamSink(stdout, target.shape)
    schema = target.schema(sources)
    journal = Journal(target, rank)
    if not journal.is_locked:
        note(f"{target}: this file system has no locks; see that no other job writes there")
    layout = WholeOutput if target.single_file or target.output.ordered else RollingShards
    return layout(journal, ShardFiles(target, sources, rank, schema))
