"""Several engines that share the requests of a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from cbatch.engine.backlog import Backlog
from cbatch.engine.plan import EnginePlan
from cbatch.engine.protocol import Facts, Report, Requests, Until
from cbatch.engine.recovery import Recovery
from cbatch.engine.replica import Replica
from cbatch.engine.replica_process import ReplicaProcess, wait
from cbatch.errors import Fatal
from cbatch.rows.request import Completion, Request
from cbatch.watch.stats import RunStats

if TYPE_CHECKING:
    from cbatch.model.loader import ModelFiles

_MOMENT = 0.05  # seconds between looks at the input and the clock


class Replicas:
    """Engines in other processes, used like one `Engine`.

    Requests go, a few at a time, to the replica that holds least. A replica that dies is started again, and `Recovery`
    decides what becomes of its requests.
    """

    def __init__(
        self,
        plan: EnginePlan,
        files: ModelFiles,
        stats: RunStats,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Start a replica at each place of the plan and wait until all have loaded the model. `note` gets lines for the user."""
        self._run_stats = stats
        stats.num_replicas = len(plan.places)
        self._waiting: deque[Request] = deque()
        self._recovery = Recovery(note)
        self._is_leaving = False
        files = replace(files)  # a copy without the tokenizer and the templates that have been read
        self._replicas = [Replica(str(place), partial(ReplicaProcess, plan, place, files)) for place in plan.places]
        try:
            while not (loaded := self._loaded()):
                list(self._receive())
        except BaseException:
            self._kill()
            raise
        smallest = min(loaded, key=lambda facts: facts.capacity)
        self.facts = replace(smallest, num_replicas=len(plan.places))
        self._backlog = Backlog(len(plan.places) * smallest.max_num_seqs, smallest.longest_row, plan.order)

    def _loaded(self) -> list[Facts]:
        """The facts of all replicas if each has loaded the model; none before that."""
        known = [replica.facts for replica in self._replicas if replica.facts]
        return known if len(known) == len(self._replicas) else []

    @property
    def has_unfinished(self) -> bool:
        """Whether a request that was taken has no completion yet."""
        return bool(self._waiting or self._recovery.has_suspects or any(replica.held for replica in self._replicas))

    def generate(self, requests: Requests, until: Until) -> Generator[Completion, None, None]:
        """Yield a completion for each request, or only for those that finish in time. The replicas end with it."""
        try:
            while not (until.is_near or until.is_past):
                self._waiting += self._backlog.take(requests, len(self._waiting), is_idle=not self.has_unfinished)
                if requests.ended and not self.has_unfinished:
                    break
                self._hand_out()
                yield from self._receive()
            yield from self._leave(until)
        finally:
            self._kill()

    def _hand_out(self) -> None:
        """Give suspects to a replica that holds nothing, other requests to the replica that holds least."""
        for replica in self._replicas:
            if self._recovery.has_suspects and replica.facts and not replica.held:
                replica.give(self._recovery.next_suspects(), are_suspects=True)
        while self._waiting and (with_room := [replica for replica in self._replicas if replica.has_room]):
            min(with_room, key=lambda replica: replica.num_held_sequences).give([self._waiting.popleft()])
        for replica in self._replicas:
            replica.send()

    def _receive(self) -> Iterator[Completion]:
        """Wait a moment for messages of the replicas; yields the completions in them."""
        by_process = {replica.process: replica for replica in self._replicas if not replica.process.has_ended}
        for process in wait(list(by_process), _MOMENT):
            replica, message = by_process[process], process.receive()
            if isinstance(message, Fatal):
                raise message
            if isinstance(message, Facts):
                replica.facts = message
            elif isinstance(message, Report):
                yield from replica.take_in(message)
                if message.stats:
                    self._gather_stats()
            else:
                yield from self._bury(replica)

    def _bury(self, replica: Replica) -> Iterator[Completion]:
        """A replica has ended: start it again, unless it was told to leave."""
        how = replica.end()
        self._gather_stats()
        if self._is_leaving:
            return
        if failed := self._recovery.died(replica, how):
            yield failed
        replica.start()

    def _leave(self, until: Until) -> Iterator[Completion]:
        """Start no more sequences. A replica ends when nothing runs in it any more, or after its step if time is up."""
        self._is_leaving = True
        for replica in self._replicas:
            replica.send(is_near=True)
        told = False
        while not all(replica.process.has_ended for replica in self._replicas):
            if until.is_past and not told:
                told = True
                for replica in self._replicas:
                    replica.send(is_near=True, is_past=True)
            yield from self._receive()

    def _gather_stats(self) -> None:
        self._run_stats.gather([stats for replica in self._replicas for stats in replica.stats])

    def _kill(self) -> None:
        for replica in self._replicas:
            replica.process.kill()
