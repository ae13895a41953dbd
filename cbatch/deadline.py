"""When a run has to end: soon after a signal, and before its time limit."""

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
_LONGEST = 100 * 366 * 86400  # seconds of a time limit
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


class Deadline:
    """The moment at which a run begins to end. A time limit sets it; a signal moves it to now, or `--grace` from now.

    Python runs signal handlers in the main thread, between two bytecodes: never while that thread is deep in a forward
    pass, a tokenizer or the loading of weights. So a thread of its own learns of signals, through a pipe to which the
    interpreter's handler in C writes at once, and ends the process if the main thread has not ended the run in time.
    """

    def __init__(
        self, task: TaskConfig, expected: Callable[[], float], environ: Mapping[str, str] = os.environ
    ) -> None:
        """`expected`: returns an estimate of the seconds that a row takes from its start to its end."""
        self.grace, self._expected = task.grace, expected
        self.seconds, self.reason = time_limit(task.time_limit, environ)  # reason: the flag, variable or signal
        self.at = time.monotonic() + self.seconds - _LEAVING  # when to leave
        self.rows_run = False  # rows are being completed; before that there is nothing to wait for
        self.note: Callable[[str], None] = lambda _: None
        self.last_words: Callable[[], None] = lambda: None  # called in a thread before the process is ended

    @property
    def is_near(self) -> bool:
        """Whether it is too late to start a row."""
        return time.monotonic() >= self.at - (self.grace or self._expected())

    @property
    def is_past(self) -> bool:
        """Whether the run has to end after the present step."""
        return time.monotonic() >= self.at

    def __str__(self) -> str:
        if self.seconds == math.inf:
            return ""
        return f"until {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(time.time() + self.seconds))} ({self.reason})"

    def __enter__(self) -> Deadline:
        read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        numbers = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup stays nohup
        self._handlers_before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, args=(read_end,), name="deadline", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        os.close(self._write_end)
        self._thread.join()

    def _watch(self, read_end: int) -> None:
        """Take signals from the pipe until its other end is closed; end the process when the last moment has come."""
        asked = False  # to end, by a signal
        while True:
            seconds = self.at + (_STEP if self.rows_run else 0) - time.monotonic()
            if seconds <= 0:
                self._end(INTERRUPTED, _LAST_WORDS)
            if not select.select([read_end], [], [], min(seconds, 1e6))[0]:
                continue
            numbers = os.read(read_end, 64)
            if not numbers:
                return os.close(read_end)
            for number in numbers:
                if number not in self._handlers_before:
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
    """Call a function that may hang, as writing to a terminal or a disk can, and wait for it at most so many seconds."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)


def time_limit(asked: str | None, environ: Mapping[str, str]) -> tuple[float, str]:
    """The seconds that a run has, from `asked` (`--time-limit`) or the end of the Slurm job, and which of the two it is."""
    if asked == "none":
        return math.inf, ""
    limits = [(math.inf, "")]
    if asked:
        limits.append((parse_duration(asked), "--time-limit"))
    end = environ.get("SLURM_JOB_END_TIME", "")  # seconds since 1970
    if (
        re.fullmatch("[0-9]{1,11}", end) and int(end) > time.time()
    ):  # else the limit has been raised since the job started
        limits.append((int(end) - time.time(), "SLURM_JOB_END_TIME"))
    return min(limits)


def parse_duration(text: str) -> float:
    """A duration in seconds: 90, 90s, 30m, 2h, 1d, or in Slurm's forms MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS."""
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text):
        found = float(match[1]) * _UNITS[match[2]]
    elif re.fullmatch(r"\d{1,9}-\d{1,9}(:\d{1,9}){0,2}|\d{1,9}(:\d{1,9}){1,2}", text):
        days, _, clock = text.rpartition("-")
        numbers = [int(number) for number in clock.split(":")]
        missing = [0] * (3 - len(numbers))
        hours, minutes, seconds = numbers + missing if days else missing + numbers
        found = float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)
    else:
        raise UsageError(
            f"--time-limit {text:.80}: not a duration such as 90 (seconds), 30m, 2h, HH:MM:SS or D-HH:MM:SS"
        )
    if found > _LONGEST:
        raise UsageError(f"--time-limit {text:.80}: is more than 100 years; none is no limit")
    return found
