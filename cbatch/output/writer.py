"""Completions -> records on disk or standard output, in a thread beside the engine."""

from __future__ import annotations

import queue
import threading
import time
from typing import BinaryIO, Protocol

from cbatch.errors import Fatal
from cbatch.output.record import RecordShape, dumps
from cbatch.output.shards import Shards
from cbatch.rows.request import Completion

_QUEUE = 4096  # completions
_SYNC_SECONDS = 1.0


class ReaderGone(Exception):
    """Whoever read standard output has closed it."""


class Sink(Protocol):
    def write(self, completions: list[Completion]) -> None: ...

    def sync(self) -> None: ...


class StreamSink:
    """Records to standard output, each flushed."""

    def __init__(self, stream: BinaryIO, shape: RecordShape) -> None:
        self._stream, self._shape = stream, shape

    def write(self, completions: list[Completion]) -> None:
        try:
            for completion in completions:
                self._stream.write(dumps(self._shape.record(completion)).encode() + b"\n")
            self._stream.flush()
        except BrokenPipeError:
            raise ReaderGone from None
        except OSError as error:
            raise Fatal(f"standard output: can't write: {error.strerror}") from None

    def sync(self) -> None:
        """Nothing: a stream can't be made durable."""


class ShardSink:
    """Records to the files of a job."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def write(self, completions: list[Completion]) -> None:
        self._shards.append(
            [
                (
                    self._shards.shape.record(one),
                    self._shards.entry(one.row.source, one.row.index, one.error is not None, one.row.digest),
                )
                for one in completions
            ]
        )

    def sync(self) -> None:
        self._shards.sync()


class Writer:
    """Hands completions to a sink from a thread of its own: written at once, made durable every second."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._queue: queue.Queue[Completion | None] = queue.Queue(_QUEUE)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

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
        """Wait until everything is written and durable."""
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
                    self._sink.write(batch)
                    num_loose += len(batch)
                if num_loose and (ended or time.monotonic() - last_sync >= _SYNC_SECONDS):
                    self._sink.sync()
                    for _ in range(num_loose):
                        self._queue.task_done()
                    last_sync, num_loose = time.monotonic(), 0
        except BaseException as error:  # handed to the main thread by put() and close()
            self._error = error

    def _next_batch(self) -> tuple[list[Completion], bool]:
        """All that is queued, after waiting a while for the first; and whether that was the end."""
        batch: list[Completion] = []
        try:
            one = self._queue.get(timeout=_SYNC_SECONDS)
            while one is not None:
                batch.append(one)
                one = self._queue.get_nowait()
        except queue.Empty:
            return batch, False
        return batch, True
