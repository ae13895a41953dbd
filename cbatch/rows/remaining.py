"""The rows that are still to be done -> requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from enum import Enum

from cbatch.errors import Fatal
from cbatch.rows.prompt import PromptBuilder
from cbatch.rows.rank import Rank
from cbatch.rows.reader import BROKEN_DIGEST, Source, spans
from cbatch.rows.request import Request, Row


class State(Enum):
    """What is known of a row that was read."""

    LEFT = 0  # to be done
    DONE = 1
    CHANGED = 2  # done, but then it was another
    UNKNOWN = 3  # done, and there is nothing to compare it with


class Remaining:
    """Makes requests of the rows that belong to a rank and are not done yet.

    `state_of(source, row)`: whether it is done. `check`: raises RowError if a row can't be written down.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        rank: Rank,
        builder: PromptBuilder,
        state_of: Callable[[int, Row], State],
        check: Callable[[Row], None],
    ) -> None:
        self._source_ids = {source.name: index for index, source in enumerate(sources)}
        self._rank, self._builder, self._state_of, self._check = rank, builder, state_of, check
        self.seen = [range(0)] * len(sources)  # of each source, the rows that were read and are part of the job
        self._ends = [0] * len(sources)  # of each source, how many rows were read
        self.num_unknown = 0  # rows that are done and could not be compared

    def check_end(self, num_rows_of: Callable[[int], int], limit: int | None) -> None:
        """Fatal if a source ended before the last of its rows that is done. `num_rows_of`: how many it had at least, then.

        With a limit that was reached, nobody knows where the last source that was read ends.
        """
        if limit is not None and sum(map(len, self.seen)) >= limit:
            return
        for name, source in self._source_ids.items():
            if (had := num_rows_of(source)) > (has := self._ends[source]):
                raise Fatal(
                    f"{name}: has {has:,} rows now, and had at least {had:,} when rows of it were completed. "
                    "Use the same input, another output, or --overwrite to start anew."
                )

    def skip(self, row: Row) -> None:
        """Pass over a row that is no part of the job."""
        self._ends[self._source_ids[row.source]] = row.index + 1
        self._builder.skip(row)

    def request(self, row: Row) -> Request | None:
        """The request of a row, or None if the row is done or another rank's; RowError if it can't be a request."""
        source = self._source_ids[row.source]
        self._ends[source] = row.index + 1
        self.seen[source] = range(self.seen[source].start if self.seen[source] else row.index, row.index + 1)
        state = self._state_of(source, row)
        if state != State.LEFT or not self._rank.owns(source, row.index):
            _check_unchanged(row, state)
            self.num_unknown += state == State.UNKNOWN
            self._builder.skip(row)
            return None
        if not row.problem:
            self._check(row)
        return self._builder(row)


def _check_unchanged(row: Row, state: State) -> None:
    """Fatal if a row is not what it was when it was completed."""
    if state != State.CHANGED:
        return
    if row.digest == BROKEN_DIGEST:
        raise Fatal(f"{row.problem}. Rows from here on were read before; restore the input to go on.")
    raise Fatal(
        f"{row.where}: this row has changed since it was completed. Use the same input, another output, or "
        "--overwrite to start anew."
    )


def count_in_background(
    sources: Sequence[Source], skip: int, limit: int | None, rank: Rank, found: Callable[[int], None]
) -> None:
    """Count in a thread how many rows a rank has, done or not. `found` is not called if a source can't tell."""

    def count() -> None:
        try:
            counts = [source.count() for source in sources]
        except Exception:  # the reader will say what is wrong with the file
            return
        known = [count for count in counts if count is not None]
        if len(known) == len(counts):
            found(sum(rank.count(source, rows) for source, rows in enumerate(spans(known, skip, limit))))

    threading.Thread(target=count, name="counter", daemon=True).start()
