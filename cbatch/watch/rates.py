"""The pace of a run: tokens a second over the last seconds, and the time that is left."""

from __future__ import annotations

import time

from cbatch.watch.stats import RunStats

_WINDOW = 10.0  # seconds


class Rates:
    """Tokens a second, averaged between the updates of the last 10 seconds."""

    def __init__(self, stats: RunStats) -> None:
        self._stats = stats
        self._marks: list[tuple[float, int, int]] = []  # time, prefill and decode tokens so far; oldest first
        self.prefill = self.decode = 0.0

    def update(self) -> None:
        """Take a new mark, and compute the rates since the oldest one in the window."""
        now, prefill, decode = time.perf_counter(), self._stats.num_prefill_tokens, self._stats.num_decode_tokens
        self._marks.append((now, prefill, decode))
        while len(self._marks) > 2 and now - self._marks[1][0] >= _WINDOW:
            self._marks.pop(0)
        then, prefill_then, decode_then = self._marks[0]
        if now > then:
            self.prefill = (prefill - prefill_then) / (now - then)
            self.decode = (decode - decode_then) / (now - then)

    def eta(self, num_done: int) -> float | None:
        """Seconds left, at the pace of all steps of this run; None if it can't be known yet.

        A running row counts as half done.
        """
        stats = self._stats
        if stats.num_rows is None or not stats.num_rows_ok:
            return None
        half_done = stats.num_running / 2
        num_left = max(0, stats.num_rows - num_done - half_done)
        return num_left * stats.model_seconds / (stats.num_rows_ok + half_done)
