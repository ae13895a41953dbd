"""Writing in a thread beside the engine."""

from __future__ import annotations

import queue
import threading
import time

from cbatch.output.sink import Sink
from cbatch.rows.request import Completion

_QUEUE = 4096  # completions
_SYNC_SECONDS = 1.0


class Writer:
    """Hands completions to a sink from a thread of its own: written at once, made durable every second.

    Leaving its `with` block waits until everything is written and durable.
    """

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self._queue: queue.Queue[Completion | None] = queue.Queue(_QUEUE)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, completion: Completion | None) -> None:
        """Queue a completion; raises what went wrong in the thread."""
        while True:
            if self._error:
                raise self._error
            try:
                return self._queue.put(completion, timeout=0.5)
            except queue.Full:
                continue

    def flush(self) -> None:
        """Wait until everything put so far is written and durable; for ever if something went wrong."""
        self._queue.join()

    def close(self) -> None:
        """Wait until everything is written and durable; raises what went wrong in the thread."""
        self.put(None)
        self._thread.join()
        if self._error:
            raise self._error

    def _run(self) -> None:
        try:
            last_sync, num_loose, ended = time.monotonic(), 0, False
            while not ended:
                batch, ended = self._next_batch()
                if batch:
                    self.sink.write(batch)
                    num_loose += len(batch)
                if (ended and num_loose) or time.monotonic() - last_sync >= _SYNC_SECONDS:
                    self.sink.sync()
                    for _ in range(num_loose):
                        self._queue.task_done()
                    last_sync, num_loose = time.monotonic(), 0
        except BaseException as error:  # handed to the main thread by put() and close()
            self._error = error

    def _next_batch(self) -> tuple[list[Completion], bool]:
        """All that is queued, after waiting a while for the first; and whether that was the end."""
        batch: list[Completion] = []
        try:
            completion = self._queue.get(timeout=_SYNC_SECONDS)
            while completion is not None:
                batch.append(completion)
                completion = self._queue.get_nowait()
        except queue.Empty:
            return batch, False
        return batch, True
