"""Reading and tokenizing in a thread beside the engine, a bounded number of requests ahead of it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable

from cbatch.errors import RowError
from cbatch.rows.request import Completion, Request, Row


class Feed:
    """A queue of requests that a thread makes of rows. Leaving its `with` block ends the reading.

    A row that can't become a request goes to `fail` at once, as a completion with an error.
    """

    def __init__(
        self,
        rows: Iterable[Row],
        build: Callable[[Row], Request | None],
        fail: Callable[[Completion], None],
        capacity: int,
    ) -> None:
        self._rows, self._build, self._fail = rows, build, fail
        self._queue: queue.Queue[Request | None] = queue.Queue(capacity)
        self._held: Request | None = None  # taken from the queue by `empty`
        self._error: BaseException | None = None
        self._stopped = threading.Event()
        self.ended = False
        threading.Thread(target=self._run, name="reader", daemon=True).start()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def take(self, wait: bool) -> Request | None:
        """The next request; None if there is none now. With `wait`, a request has a moment to come."""
        if self._held:
            held, self._held = self._held, None
            return held
        if self.ended:
            return None
        try:
            request = self._queue.get(timeout=0.1) if wait else self._queue.get_nowait()
        except queue.Empty:
            return None
        if request is None:
            self.ended = True
            if self._error:
                raise self._error
        return request

    def empty(self) -> bool:
        """Whether no request is left; waits for the next one or for the end of the input."""
        while not self.ended and self._held is None:
            self._held = self.take(wait=True)
        return self._held is None

    def _run(self) -> None:
        try:
            for row in self._rows:
                if self._stopped.is_set():
                    return
                try:
                    request = self._build(row)
                except RowError as error:
                    self._fail(Completion.failed(row, error))
                    continue
                if request and not self._put(request):
                    return
        except BaseException as error:  # handed to the main thread by take()
            self._error = error
        self._put(None)

    def _put(self, request: Request | None) -> bool:
        """Queue a request, or None at the end; False if nobody wants it any more."""
        while not self._stopped.is_set():
            try:
                self._queue.put(request, timeout=0.2)
            except queue.Full:
                continue
            return True
        return False
