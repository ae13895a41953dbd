"""When so many rows fail that a run had better end: `--max-failures`."""

from __future__ import annotations

import re

from cbatch.config import MAX_FAILURES
from cbatch.errors import Fatal, RowError
from cbatch.watch.stats import RunStats

_MODEL_FAULTS = ("invalid_logits",)  # kinds of errors that say more about the model than about the row
_ENOUGH = 100  # rows to judge by


class FailureLimit:
    """Ends a run when too many of its rows have failed."""

    def __init__(self, limit: str | None) -> None:
        """`limit`: 100, 5% or none, as `--max-failures` takes it; None: only what is the model's fault ends the run."""
        self._limit = limit
        match = re.fullmatch(MAX_FAILURES, limit or "none")
        self._most: str | None = match[1] if match else None
        self._percent: str | None = match[2] if match else None
        self._last: RowError | None = None

    def check(self, stats: RunStats, error: RowError | None) -> None:
        """Fatal if the rows that failed in this run are too many. `error`: of the row that is done just now."""
        self._last = error or self._last
        if self._last and (problem := self._problem(stats, self._last)):
            raise Fatal(
                f"{problem}; the last: {self._last.kind}: {self._last}. What was finished is safe: the same command goes on, "
                "with --retry-failed also with the rows that failed"
            )

    def _problem(self, stats: RunStats, last: RowError) -> str:
        failed, done = stats.num_rows_failed, stats.num_rows_ok + stats.num_rows_failed
        if self._limit is None:
            is_models = last.kind in _MODEL_FAULTS and not stats.num_rows_ok and stats.errors[last.kind] >= _ENOUGH
            return f"the first {_ENOUGH} rows that ran failed, all for one reason" if is_models else ""
        too_many = self._most is not None and failed > int(self._most)
        too_large = self._percent is not None and done >= _ENOUGH and failed * 100 > done * float(self._percent)
        return (
            f"{failed:,} of {done:,} rows failed, and --max-failures is {self._limit}" if too_many or too_large else ""
        )
