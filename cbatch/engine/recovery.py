"""Finds the request that ends its engine when a replica dies, so that no other request is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from cbatch.engine.places import split
from cbatch.engine.replica import Replica
from cbatch.errors import Fatal, RowError
from cbatch.rows.request import Completion, Output, Request

_NUM_GROUPS = 8  # that the requests of a dead replica are divided into
_MAX_DEATHS = 8  # of one replica, without a completed row in between


class Recovery:
    """Keeps the requests of dead replicas as suspects, in groups that are each to run alone in a replica.

    When a group ends its replica, too, it is divided into smaller ones. A request that does so alone is to blame.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        """`note` gets a line for the user when a replica has died."""
        self._note = note
        self._suspects: deque[list[Request]] = deque()

    @property
    def has_suspects(self) -> bool:
        return bool(self._suspects)

    def next_suspects(self) -> list[Request]:
        """A group of requests to run alone in a replica."""
        return self._suspects.popleft()

    def died(self, replica: Replica, how: str) -> Completion | None:
        """Take back the requests that a dead replica held; a failed completion if one of them is to blame.

        Fatal if the replica keeps dying, so that no request is likely to be the reason.
        """
        requests = list(replica.held.values())
        if replica.num_deaths == _MAX_DEATHS:
            raise Fatal(
                f"the engine on {replica.name} died {_MAX_DEATHS} times and completed no row in between, the last time "
                f"by {how}. What was finished is safe."
            )
        self._note(f"The engine on {replica.name} died ({how}) with {len(requests)} rows; it starts again.")
        if replica.holds_suspects and len(requests) == 1:
            return _blame(requests[0], how)
        self._suspects.extend(list(group) for group in split(requests, _NUM_GROUPS) if group)
        return None


def _blame(request: Request, how: str) -> Completion:
    error = RowError("worker_died", f"the engine died with this row, also when it had no other ({how})")
    return Completion.of(request, Output(error=error.at(request.row.where)))
