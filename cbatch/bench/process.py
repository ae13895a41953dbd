"""Runs a command and watches it from outside: when each line of output came, and how much memory was used."""

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

_POLL_SECONDS = 0.5  # long, because the kernel remembers each process's peak


@dataclass
class Finished:
    """A command that has ended."""

    exit_code: int = 0
    lines: list[tuple[float, bytes]] = field(default_factory=list)  # of standard output, each with its second
    errors: list[bytes] = field(default_factory=list)  # lines of standard error
    peak_memory: int | None = None  # bytes, of the command and all its descendants; None where there is no /proc


def run(command: Sequence[str], environ: Mapping[str, str]) -> Finished:
    """Run a command to its end. Whatever it started and left running is killed; so is the command if this is interrupted."""
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
    finished = Finished()

    def keep_lines(stream: IO[bytes]) -> None:
        finished.lines += ((time.perf_counter() - started_at, line) for line in stream)

    def keep_errors(stream: IO[bytes]) -> None:
        finished.errors += stream

    readers = [
        threading.Thread(target=keep_lines, args=(process.stdout,)),
        threading.Thread(target=keep_errors, args=(process.stderr,)),
    ]
    for reader in readers:
        reader.start()
    try:
        while True:
            memory = peak_memory_of(process.pid)
            finished.peak_memory = max(finished.peak_memory or 0, memory) if memory else finished.peak_memory
            with suppress(subprocess.TimeoutExpired):
                finished.exit_code = process.wait(_POLL_SECONDS)
                return finished
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the command's process group
        process.wait()
        for reader in readers:
            reader.join()
        process.stdout.close()
        process.stderr.close()


def peak_memory_of(pid: int) -> int:
    """The peaks in bytes of a process and its descendants, summed up; each may have had its peak at another time."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    total, pids = 0, [pid]
    while pids:
        pid = pids.pop()
        pids += children.get(pid, [])
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return total
