"""Several engines, each in a process of its own, that this one feeds row by row.

A process that dies is started again, and the rows it had run again: in small groups, each alone in an engine, then in
smaller ones, until the row that ends its process is alone. That one fails, and no other is lost.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from cbatch.deadline import SIGNALS
from cbatch.engine.backlog import Backlog
from cbatch.engine.places import Place, split
from cbatch.engine.protocol import Facts, Requests, Until
from cbatch.errors import Fatal, RowError
from cbatch.rows.request import Completion, Request
from cbatch.watch.stats import EngineStats, RunStats

if TYPE_CHECKING:
    from cbatch.model.loader import ModelFiles

_SPAWN = get_context("spawn")  # a fork would inherit threads and CUDA
_MOMENT = 0.05  # seconds between looks at the input and the clock
_STATS_SECONDS = 0.25
_GROUPS = 8  # that the rows of a process are divided into when it dies
_MOST_DEATHS = 8  # of one worker, without a completed row in between


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker tells after a step."""

    completions: list[Completion]
    running: int  # rows in it
    stats: EngineStats | None = None  # now and then


class Fleet:
    """Engines in other processes, as if they were one `Engine`."""

    def __init__(
        self,
        places: list[Place],
        files: ModelFiles,
        max_model_len: int,
        stats: RunStats,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Start them all, and wait until each has loaded the model. `note` is told when one dies."""
        self.stats, self.note = stats, note
        stats.engines = len(places)
        self._waiting: deque[Request] = deque()
        self._suspects: deque[list[Request]] = deque()  # groups, each of which may hold a row that ends its process
        self._past: list[EngineStats] = []  # of processes that are no more
        self._leaving = False
        self._workers = [Worker(place, replace(files), max_model_len) for place in places]  # without what it has read
        try:
            while not all(worker.facts for worker in self._workers):
                list(self._hear())
        except BaseException:
            self._kill()
            raise
        smallest = min((worker.facts for worker in self._workers if worker.facts), key=lambda facts: facts.capacity)
        self.facts = replace(smallest, num_replicas=len(places))
        self._backlog = Backlog(len(places) * smallest.max_num_seqs, smallest.longest_row, places[0].config.order)

    @property
    def has_unfinished(self) -> bool:
        """Whether a request that it took has no completion yet."""
        return bool(self._waiting or self._suspects or any(worker.held for worker in self._workers))

    def generate(self, requests: Requests, until: Until) -> Generator[Completion, None, None]:
        """Yield a completion for each request, or for those that are finished in time. The processes end with it."""
        try:
            while not (until.is_near or until.is_past):
                self._take(requests)
                if requests.ended and not self.has_unfinished:
                    break
                self._hand_out()
                yield from self._hear()
            yield from self._leave(until)
        finally:
            self._kill()

    def _take(self, requests: Requests) -> None:
        """Keep at least as many requests waiting as all engines could run, in the order in which one would run them."""
        self._waiting += self._backlog.take(requests, len(self._waiting), is_idle=not self.has_unfinished)

    def _hand_out(self) -> None:
        """Suspects go to who has nothing else, other rows to who has least."""
        ready = [worker for worker in self._workers if worker.facts]
        for worker in ready:
            if self._suspects and not worker.held:
                worker.give(self._suspects.popleft(), are_suspect=True)
        while self._waiting and (with_room := [worker for worker in ready if worker.has_room]):
            min(with_room, key=lambda worker: len(worker.held)).give([self._waiting.popleft()])
        for worker in ready:
            worker.send()

    def _hear(self) -> Iterator[Completion]:
        """What the processes have to say, if anything soon."""
        by_connection: dict[Any, Worker] = {worker.connection: worker for worker in self._workers if worker.is_alive}
        for connection in wait(list(by_connection), _MOMENT):
            worker = by_connection[connection]
            try:
                message = worker.connection.recv()
            except (EOFError, OSError):  # what it had said before has been read
                yield from self._lose(worker)
                continue
            if isinstance(message, Fatal):
                raise message
            if isinstance(message, Report):
                yield from worker.completions(message)
                if message.stats:
                    worker.stats = message.stats
                    self._count()
            else:
                worker.facts = message

    def _lose(self, worker: Worker) -> Iterator[Completion]:
        """A process has ended. Unless it was told to, its rows are suspects, and another takes its place."""
        how, rows, were_suspect = worker.bury(), list(worker.held.values()), worker.has_suspects
        self._past.append(worker.stats.at_rest())
        worker.stats = EngineStats()
        self._count()
        if self._leaving:
            return
        worker.deaths += 1
        if worker.deaths == _MOST_DEATHS:
            raise Fatal(
                f"the engine on {worker.place} died {_MOST_DEATHS} times and completed no row in between, the last time "
                f"by {how}. What was finished is safe."
            )
        self.note(f"The engine on {worker.place} died ({how}) with {len(rows)} rows; it starts again.")
        if were_suspect and len(rows) == 1:
            yield _failed(rows[0], how)
        else:
            self._suspects.extend(list(group) for group in split(rows, _GROUPS) if group)
        worker.start()

    def _leave(self, until: Until) -> Iterator[Completion]:
        """No more rows start. A process ends when nothing runs in it any more, or after its step when time is up."""
        self._leaving = True
        for worker in self._workers:
            worker.send(is_near=True)
        told = False
        while any(worker.is_alive for worker in self._workers):
            if until.is_past and not told:
                told = True
                for worker in self._workers:
                    worker.send(is_near=True, is_past=True)
            yield from self._hear()

    def _count(self) -> None:
        self.stats.gather([*self._past, *(worker.stats for worker in self._workers)])

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()


class Worker:
    """A place for an engine, and the process that is there now."""

    def __init__(self, place: Place, files: ModelFiles, max_model_len: int) -> None:
        self.place, self._files, self._max_model_len = place, files, max_model_len
        self.deaths = 0  # since it last completed a row
        self.start()

    def start(self) -> None:
        self.facts: Facts | None = None  # once it has loaded the model
        self.held: dict[tuple[str, int], Request] = {}  # given to it and not completed, by source and row
        self.has_suspects = False
        self.running = self.ended = 0  # of those held, in its last step
        self.stats = EngineStats()
        self.is_alive = True
        self._unsent: list[Request] = []
        self.connection, theirs = _SPAWN.Pipe()
        arguments = (theirs, self.place, self._files, self._max_model_len)
        self._process = _SPAWN.Process(target=work, args=arguments, daemon=True)
        with _signals_blocked():
            self._process.start()
        theirs.close()  # so that this end hears when the process is gone

    @property
    def has_room(self) -> bool:
        """Whether it should get another row: it is a little ahead, so that none idles, and none is left with many."""
        if self.facts is None or (self.has_suspects and self.held):
            return False
        ahead = max(self.running // 2, 2 * self.ended, self.facts.max_num_seqs // 8, 1)
        return len(self.held) < self.running + ahead

    def give(self, requests: Iterable[Request], are_suspect: bool = False) -> None:
        self.has_suspects = are_suspect
        for request in requests:
            self.held[request.row.source, request.row.index] = request
            self._unsent.append(replace(request, row=replace(request.row, data={})))

    def send(self, is_near: bool = False, is_past: bool = False) -> None:
        """What it was given; and whether time is short, which ends one that still loads."""
        if self.facts is None and is_near:
            self._process.kill()
        elif self._unsent or is_near:
            with suppress(OSError):  # it is dead, and will be found so
                self.connection.send((self._unsent, is_near, is_past))
            self._unsent = []

    def completions(self, report: Report) -> Iterator[Completion]:
        """Those of a report, with the rows as they were read."""
        self.running, self.ended = report.running, len(report.completions)
        for completion in report.completions:
            self.deaths = 0
            yield replace(completion, row=self.held.pop((completion.row.source, completion.row.index)).row)

    def bury(self) -> str:
        """The process has ended or is about to; how it did."""
        self._process.join(1)
        self.kill()
        code = self._process.exitcode or 0
        if code == -signal.SIGKILL:
            return "SIGKILL, perhaps for lack of memory"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()
        self.is_alive = False


def _failed(request: Request, how: str) -> Completion:
    error = RowError(
        "worker_died", f"{request.row.where}: the engine died with this row, also when it had no other ({how})"
    )
    return Completion.failed(request.row, error, len(request.token_ids), request.chat)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """A process that is started meanwhile never hears those that ask a run to leave: they are for this one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        resource_tracker.ensure_running()  # a process of multiprocessing's own, whose start unblocks some of them
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In the other process


def work(connection: Connection, place: Place, files: ModelFiles, max_model_len: int) -> None:
    """Run an engine on what comes through the connection, until told to leave. The process ends with it."""
    try:
        if place.cpus:
            os.sched_setaffinity(0, place.cpus)
        _work(Inbox(connection), connection, place, files, max_model_len)
    except BrokenPipeError:  # nobody is there to be told
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _work(inbox: Inbox, connection: Connection, place: Place, files: ModelFiles, max_model_len: int) -> None:
    from cbatch.engine.start import start_engine

    stats = EngineStats()
    try:
        engine = start_engine(place.config, files, max_model_len, stats, place.engines)
    except Fatal as error:
        return connection.send(error)
    connection.send(engine.facts)
    running, told_at = 0, 0.0
    for completions in engine.steps(inbox, inbox):
        before, running, now = running, stats.running, time.perf_counter()
        if now - told_at >= _STATS_SECONDS:
            connection.send(Report(completions, running, stats))
            told_at = now
        elif completions or running != before:
            connection.send(Report(completions, running))
    return connection.send(Report([], 0, stats))


class Inbox:
    """Requests as the engine takes them, and how long it may run, as the process that feeds it tells."""

    ended = is_near = is_past = False

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="inbox", daemon=True).start()

    def take(self, wait: bool) -> Request | None:
        try:
            return self._queue.get(timeout=0.1) if wait else self._queue.get_nowait()
        except queue.Empty:
            return None

    def _listen(self) -> None:
        """For as long as the other process lives; this one ends with it, whatever it does."""
        while True:
            try:
                requests, self.is_near, self.is_past = self._connection.recv()
            except (EOFError, OSError):
                os._exit(1)
            for request in requests:
                self._queue.put(request)
            if self.is_near:
                self._queue.put(None)  # ends a wait
