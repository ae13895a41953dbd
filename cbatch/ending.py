"""How a run ends: its figures in words and beside the output, and its exit code."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from cbatch.deadline import Deadline
from cbatch.errors import INTERRUPTED, OK, SOME_FAILED
from cbatch.machine import versions
from cbatch.output.target import Target
from cbatch.output.writer import Writer
from cbatch.rows.rank import Rank
from cbatch.watch import report
from cbatch.watch.progress import Progress
from cbatch.watch.stats import RunStats

if TYPE_CHECKING:
    from cbatch.engine.protocol import Facts


class Ending:
    """Reports on a run, whenever it ends."""

    def __init__(self, stats: RunStats, progress: Progress, deadline: Deadline, target: Target, rank: Rank) -> None:
        self._stats, self._progress, self._deadline, self._target, self._rank = stats, progress, deadline, target, rank
        self.writer: Writer | None = None  # once the output is open
        self.facts: Facts | None = None  # about the engine, once there is one

    def report(self, finished: bool, left_to_others: int = 0) -> int:
        """Report what the run did, on stderr and in the summary; returns the exit code. `left_to_others`: rows of other ranks."""
        stats, sink = self._stats, self.writer and self.writer.sink
        if finished:
            stats.num_rows = stats.num_rows_earlier + stats.num_rows_done
        figures = report.summary(stats, finished, **(self._ceilings() if finished else {}))
        figures["versions"] = versions()
        is_shared = finished and not self._rank.is_whole
        if is_shared:
            figures |= {"shard": self._rank.suffix[1:], "rows_left_to_others": left_to_others}
        if sink:
            sink.write_summary(figures)
        self._progress.end(figures, str(self._target))
        if is_shared:
            rest = (
                f"{left_to_others:,} rows are left to the others" if left_to_others else "all rows of the job are done"
            )
            self._progress.note(f"This was {self._rank}; {rest}.")
        if finished:
            return SOME_FAILED if stats.num_rows_failed or stats.num_rows_earlier_failed else OK
        if sink and sink.resumable:
            reason = self._deadline.reason
            self._progress.note(f"{reason}: everything finished is on disk; run the same command again to go on.")
        return INTERRUPTED

    def last_words(self) -> None:
        """Report while the process ends in a moment, in the middle of what the main thread does."""
        if self.writer:
            self.writer.flush()
        self.report(finished=False)
        self._progress.abandon()

    def _ceilings(self) -> dict[str, float]:
        """The most that the engine's devices can do together, as far as that can be measured."""
        if self.facts is None:
            return {}
        from cbatch.model.ceilings import ceilings

        measured = ceilings(self.facts.device, self.facts.dtype)
        # CPUs are measured all together, a GPU alone
        num_devices = self.facts.num_replicas if self.facts.device_type == "cuda" else 1
        return {name: num_devices * value for name, value in asdict(measured).items()} if measured else {}
