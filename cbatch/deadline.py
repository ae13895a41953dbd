"""When a run has to leave: soon after a signal, and before its time is up."""

from __future__ import annotations

import math
import os
import re
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping

from cbatch.config import TaskConfig
from cbatch.errors import INTERRUPTED, KILLED, UsageError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# A run leaves within 10 seconds: a step may end in the first six, the rest is for what was finished to reach the disk.
_LEAVING, _STEP, _LAST_WORDS = 10.0, 6.0, 2.0  # seconds
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


class Deadline:
    """The moment at which a run leaves. A time limit sets it, and a signal moves it to now, or `--grace` from now.

    Python runs the handlers of signals in the main thread, between two bytecodes: never while that is deep in a
    forward pass, a tokenizer or the loading of weights. So a thread of its own hears them, through a pipe that the
    interpreter's handler in C writes to at once, and ends the process if the main thread has not left in time.
    """

    def __init__(
        self, task: TaskConfig, expected: Callable[[], float], environ: Mapping[str, str] = os.environ
    ) -> None:
        """`expected`: the seconds that a row which starts now will run, as far as one can tell."""
        self.grace, self._expected = task.grace, expected
        self.seconds, self.reason = time_limit(task.time_limit, environ)  # the limit and whose it is
        self.at = time.monotonic() + self.seconds - _LEAVING  # when to leave
        self.rows_run = False  # else there is nothing to wait for
        self.note: Callable[[str], None] = lambda _: None
        self.last_words: Callable[[], None] = lambda: None  # called in a thread before the process is ended

    @property
    def is_near(self) -> bool:
        """Whether a row that starts now would not end in time."""
        return time.monotonic() >= self.at - (self.grace or self._expected())

    @property
    def is_past(self) -> bool:
        return time.monotonic() >= self.at

    def __str__(self) -> str:
        if self.seconds == math.inf:
            return ""
        return f"until {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(time.time() + self.seconds))} ({self.reason})"

    def __enter__(self) -> Deadline:
        ears, self._mouth = os.pipe()
        os.set_blocking(self._mouth, False)
        heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup stays nohup
        self._before = {number: signal.signal(number, lambda *_: None) for number in heard}
        self._mouth_before = signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, args=(ears,), name="deadline", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._mouth_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._mouth)
        self._thread.join()

    def _watch(self, ears: int) -> None:
        """Hear signals until the other end of the pipe is closed; end the process when the last moment has come."""
        asked = False
        while True:
            seconds = self.at + (_STEP if self.rows_run else 0) - time.monotonic()
            if seconds <= 0:
                self._end(INTERRUPTED, _LAST_WORDS)
            if not select.select([ears], [], [], min(seconds, 1e6))[0]:
                continue
            numbers = os.read(ears, 64)
            if not numbers:
                return os.close(ears)
            for number in numbers:
                if number not in self._before:
                    continue
                if asked:
                    self._end(KILLED + number, 0.2)
                asked = True
                self._leave_after(signal.Signals(number).name)

    def _leave_after(self, name: str) -> None:
        self.reason = name
        if not self.rows_run:
            self.at = time.monotonic()
            return
        self.at = min(self.at, time.monotonic() + self.grace)
        how = f"what runs may go on for {self.grace:g} s" if self.grace else "leaving after this step"
        _aside(lambda: self.note(f"{name}: {how}; another signal ends the run at once."), 0.2)

    def _end(self, code: int, seconds: float) -> None:
        _aside(self.last_words, seconds)
        os._exit(code)


def _aside(function: Callable[[], None], seconds: float) -> None:
    """Wait for something that may hang, as writing to a terminal or a disk can, but not longer."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)


def time_limit(asked: str | None, environ: Mapping[str, str]) -> tuple[float, str]:
    """The seconds that a run has, and who says so: the earlier of `--time-limit` and the end of the Slurm job."""
    if asked == "none":
        return math.inf, ""
    limits = [(math.inf, "")]
    if asked:
        limits.append((parse_duration(asked), "--time-limit"))
    end = environ.get("SLURM_JOB_END_TIME", "")  # seconds since 1970
    if end.isdecimal() and int(end) > time.time():  # else the limit has been raised since the job started
        limits.append((int(end) - time.time(), "SLURM_JOB_END_TIME"))
    return min(limits)


def parse_duration(text: str) -> float:
    """Seconds of 90, 90s, 30m, 2h, 1d, and of what Slurm takes: MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS."""
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text):
        return float(match[1]) * _UNITS[match[2]]
    if not re.fullmatch(r"\d+-\d+(:\d+){0,2}|\d+(:\d+){1,2}", text):
        raise UsageError(f"--time-limit {text}: not a duration such as 90 (seconds), 30m, 2h, HH:MM:SS or D-HH:MM:SS")
    days, _, clock = text.rpartition("-")
    numbers = [int(number) for number in clock.split(":")]
    missing = [0] * (3 - len(numbers))
    hours, minutes, seconds = numbers + missing if days else missing + numbers
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)
