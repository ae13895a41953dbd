"""One replica as its parent sees it: the requests that it holds and what it last reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from cbatch.engine.protocol import Facts, Orders, Report
from cbatch.engine.replica_process import ReplicaProcess
from cbatch.rows.request import Completion, Request
from cbatch.watch.stats import EngineStats


class Replica:
    """An engine that runs elsewhere, and that is started again when it dies. `name` says where it runs."""

    def __init__(self, name: str, launch: Callable[[], ReplicaProcess]) -> None:
        self.name, self._launch = name, launch
        self.num_deaths = 0  # since it last completed a row
        self._past_stats: list[EngineStats] = []  # of engines here that have ended
        self.start()

    def start(self) -> None:
        """Start the engine, with nothing to run."""
        self.facts: Facts | None = None  # once the model is loaded
        self.held: dict[tuple[str, int], Request] = {}  # given and not completed, by source and row
        self.num_held_sequences = 0  # of these requests; a row counts with all of them until it is completed
        self.holds_suspects = False
        self._stats = EngineStats()
        self._unsent: list[Request] = []
        self._num_running = self._num_ended = 0  # sequences in its last step
        self.process = self._launch()

    @property
    def stats(self) -> list[EngineStats]:
        """Statistics of each engine that has run here."""
        return [*self._past_stats, self._stats]

    @property
    def has_room(self) -> bool:
        """Whether it should get another request.

        It gets a little more than it runs, so that it never idles, and never much more, so that no replica is left
        alone with many.
        """
        if self.facts is None or (self.holds_suspects and self.held):
            return False
        ahead = max(self._num_running // 2, 2 * self._num_ended, self.facts.max_num_seqs // 8, 1)
        return self.num_held_sequences < self._num_running + ahead

    def give(self, requests: Iterable[Request], are_suspects: bool = False) -> None:
        """Let it hold more requests. `send` sends them, without the columns that an engine does not need."""
        self.holds_suspects = are_suspects
        for request in requests:
            self.held[request.row.source, request.row.index] = request
            self.num_held_sequences += request.num_sequences
            self._unsent.append(replace(request, row=replace(request.row, data={})))

    def send(self, is_near: bool = False, is_past: bool = False) -> None:
        """Send the requests given since the last time, and whether time is short; stops an engine that still loads."""
        if self.facts is None and is_near:
            self.process.stop()
        elif self._unsent or is_near:
            self.process.send(Orders(self._unsent, is_near, is_past))
            self._unsent = []

    def take_in(self, report: Report) -> Iterator[Completion]:
        """Learn from a report; yields its completions, with the rows as they were read."""
        self._stats = report.stats or self._stats
        self._num_running, self._num_ended = report.num_running, 0
        for completion in report.completions:
            request = self.held.pop((completion.row.source, completion.row.index))
            self.num_held_sequences -= request.num_sequences
            self._num_ended += request.num_sequences
            self.num_deaths = 0
            yield replace(completion, row=request.row)

    def end(self) -> str:
        """Count a death: make sure that the engine has ended, keep its statistics; returns how it ended, in words."""
        self.num_deaths += 1
        self._past_stats.append(self._stats.at_rest())
        self._stats = EngineStats()
        return self.process.end()
