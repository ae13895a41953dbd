"""The rows that are still to be done -> requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from cbatch.errors import Fatal
from cbatch.rows.prompt import PromptBuilder
from cbatch.rows.rank import Rank
from cbatch.rows.reader import BROKEN_DIGEST, UNKNOWN_DIGEST, Source, spans
from cbatch.rows.request import Request, Row


class Remaining:
    """Makes requests of the rows that belong to a rank and are not done yet.

    `digest_of(source, row)`: the checksum of a row when it was completed, 0 if it is not done. `check`: raises RowError
    if a row can't be written down.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        rank: Rank,
        builder: PromptBuilder,
        digest_of: Callable[[int, int], int],
        check: Callable[[Row], None],
    ) -> None:
        self._source_ids = {source.name: index for index, source in enumerate(sources)}
        self._rank, self._builder, self._digest_of, self._check = rank, builder, digest_of, check
        self.seen = [range(0)] * len(sources)  # of each source, the rows that were read

    def request(self, row: Row) -> Request | None:
        """The request of a row, or None if the row is done or another rank's; RowError if it can't be a request."""
        source = self._source_ids[row.source]
        self.seen[source] = range(self.seen[source].start if self.seen[source] else row.index, row.index + 1)
        digest = self._digest_of(source, row.index)
        if digest or not self._rank.owns(source, row.index):
            _check_unchanged(row, digest)
            self._builder.skip(row)
            return None
        if not row.problem:
            self._check(row)
        return self._builder(row)


def _check_unchanged(row: Row, digest: int) -> None:
    """Fatal if a row is not what it was when it was completed; `digest` is 0 if it was not completed."""
    if digest and row.digest == BROKEN_DIGEST != digest:
        raise Fatal(f"{row.problem}. Rows from here on were read before; restore the input to go on.")
    if digest not in (0, UNKNOWN_DIGEST, row.digest):
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
