"""A command run as its user would see it: when each line came, and how much memory it took."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

_POLL_SECONDS = 0.5  # the kernel remembers each process's peak, so that few looks suffice


@dataclass
class Ended:
    """Times in seconds since the command was started."""

    code: int = 0
    lines: list[tuple[float, bytes]] = field(default_factory=list)  # of standard output
    errors: list[bytes] = field(default_factory=list)  # lines of standard error
    peak_memory: int | None = None  # bytes, of all its processes; None where there is no /proc


def run(command: Sequence[str], environ: Mapping[str, str]) -> Ended:
    """Run a command to its end. If this is interrupted, it and all it has started is killed."""
    started_at = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        start_new_session=True,
    )
    assert process.stdout
    assert process.stderr
    ended = Ended()

    def keep_lines(stream: IO[bytes]) -> None:
        ended.lines += ((time.perf_counter() - started_at, line) for line in stream)

    def keep_errors(stream: IO[bytes]) -> None:
        ended.errors += stream

    readers = [
        threading.Thread(target=keep_lines, args=(process.stdout,)),
        threading.Thread(target=keep_errors, args=(process.stderr,)),
    ]
    for reader in readers:
        reader.start()
    try:
        while True:
            memory = memory_of(process.pid)
            ended.peak_memory = max(ended.peak_memory or 0, memory) if memory else ended.peak_memory
            with suppress(subprocess.TimeoutExpired):
                ended.code = process.wait(_POLL_SECONDS)
                return ended
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it left behind
        process.wait()
        for reader in readers:
            reader.join()
        process.stdout.close()
        process.stderr.close()


def memory_of(pid: int) -> int:
    """Bytes of memory that a process and its descendants have held at most, each at its own time."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    total, left = 0, [pid]
    while left:
        left += children.get(one := left.pop(), [])
        with suppress(OSError):
            lines = Path(f"/proc/{one}/status").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return total
