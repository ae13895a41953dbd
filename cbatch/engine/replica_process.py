"""A replica in a child process: how it starts, how messages reach it, how it ends.

Nothing else knows that a replica is a process. A placement elsewhere, such as on a cluster, replaces this module.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, get_context, resource_tracker
from typing import TYPE_CHECKING

from cbatch.deadline import SIGNALS
from cbatch.engine.places import Place
from cbatch.engine.plan import EnginePlan
from cbatch.engine.protocol import Facts, Orders, Report
from cbatch.engine.replica_child import work
from cbatch.errors import Fatal

if TYPE_CHECKING:
    from cbatch.model.loader import ModelFiles

_SPAWN = get_context("spawn")  # a fork would inherit threads and CUDA


class ReplicaProcess:
    """The parent's handle on a child process that runs an engine. The child starts with it and loads the model."""

    def __init__(self, plan: EnginePlan, place: Place, files: ModelFiles) -> None:
        self.has_ended = False
        self._connection, childs_end = _SPAWN.Pipe()
        arguments = (childs_end, plan, place, files)
        self._process = _SPAWN.Process(target=work, args=arguments, daemon=True)
        with _signals_blocked():
            self._process.start()
        childs_end.close()  # the child has the only other one, so its death is seen as the end of the pipe

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, orders: Orders) -> None:
        """Send orders; to a child that has died this does nothing, as `receive` will tell."""
        with suppress(OSError):
            self._connection.send(orders)

    def receive(self) -> Facts | Report | Fatal | None:
        """The next message; None when the child has ended and all its messages have been received."""
        try:
            message: Facts | Report | Fatal = self._connection.recv()
        except (EOFError, OSError):
            return None
        return message

    def stop(self) -> None:
        """Make the child end now. `receive` tells when it has."""
        self._process.kill()

    def end(self) -> str:
        """Make sure that the child has ended; returns how it did, in words."""
        self._process.join(1)  # it may be about to exit by itself, with its own exit code
        self.kill()
        code = self._process.exitcode or 0
        if code == -signal.SIGKILL:
            return "SIGKILL, perhaps for lack of memory"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """End the child and wait until it is gone."""
        self._process.kill()
        self._process.join()
        self._connection.close()
        self.has_ended = True


def wait(processes: Sequence[ReplicaProcess], seconds: float) -> list[ReplicaProcess]:
    """The processes that have sent a message or have ended; waits until there is one, but no longer than `seconds`."""
    ready: list[ReplicaProcess] = connection.wait(processes, seconds)  # type: ignore[assignment,arg-type]
    return ready


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Let children that are started meanwhile ignore the signals that ask a run to leave: they are for the parent."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        resource_tracker.ensure_running()  # a process of multiprocessing's own, whose start unblocks some of them
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
