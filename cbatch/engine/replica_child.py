"""The child process of a replica: an engine that runs the requests which its parent sends."""

from __future__ import annotations

import os
import queue
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from cbatch.engine.places import Place
from cbatch.engine.plan import EnginePlan
from cbatch.engine.protocol import Orders, Report
from cbatch.errors import Fatal
from cbatch.rows.request import Request
from cbatch.watch.stats import EngineStats

if TYPE_CHECKING:
    from cbatch.model.loader import ModelFiles

_STATS_SECONDS = 0.25  # between reports with statistics


def work(connection: Connection, plan: EnginePlan, place: Place, files: ModelFiles) -> None:
    """Run an engine until the parent says to leave, then end the process.

    Sends the engine's Facts once the model is loaded, or a Fatal error if it can't be, then Reports.
    """
    try:
        if place.cpus:
            os.sched_setaffinity(0, place.cpus)
        _run_engine(connection, plan, place, files)
    except BrokenPipeError:  # the parent is gone
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _run_engine(connection: Connection, plan: EnginePlan, place: Place, files: ModelFiles) -> None:
    from cbatch.engine.start import start_engine

    inbox, stats = Inbox(connection), EngineStats()
    try:
        engine = start_engine(plan, place, files, stats)
    except Fatal as error:
        return connection.send(error)
    connection.send(engine.facts)
    num_running, told_at = 0, 0.0
    for completions in engine.steps(inbox, inbox):
        before, num_running, now = num_running, stats.num_running, time.perf_counter()
        if now - told_at >= _STATS_SECONDS:
            connection.send(Report(completions, num_running, stats))
            told_at = now
        elif completions or num_running != before:
            connection.send(Report(completions, num_running))
    return connection.send(Report([], 0, stats))


class Inbox:
    """The parent's orders as an engine sees them: a source of requests, and a time limit.

    A thread receives the orders while the engine computes. It ends this process as soon as the parent is gone.
    """

    ended = False  # the parent may always send more; an engine leaves when `is_near`
    is_near = is_past = False

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="inbox", daemon=True).start()

    def take(self, wait: bool) -> Request | None:
        """The next request; None if there is none now. With `wait`, a request has a moment to come."""
        try:
            return self._queue.get(timeout=0.1) if wait else self._queue.get_nowait()
        except queue.Empty:
            return None

    def _receive(self) -> None:
        while True:
            try:
                orders: Orders = self._connection.recv()
            except (EOFError, OSError):
                os._exit(1)
            self.is_near, self.is_past = orders.is_near, orders.is_past
            for request in orders.requests:
                self._queue.put(request)
            if self.is_near:
                self._queue.put(None)  # ends a wait
