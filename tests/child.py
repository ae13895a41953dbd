"""The command line in processes that are forked off one which has imported everything: that saves five seconds each."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pyarrow.parquet  # noqa: F401 what a job imports is imported here

import cbatch.engine.start  # noqa: F401
from cbatch.cli import main
from cbatch.watch import progress  # noqa: F401
from tests.jobs import num_records, wait_until

SLOW = ["--max-num-seqs", 1, "--max-tokens", 30, "--ignore-eos"]  # a job with these flags can be caught while it runs


def run_cli(args: list[str], streams: dict[int, str], prepare: Callable[[], object]) -> None:
    for number, name in {0: os.devnull, **streams}.items():
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o644), number)
    sys.argv = ["cbatch", *args]
    prepare()
    main()


def nothing() -> None: ...


class Child:
    """The command line in a process that calls `prepare` first; its exit code is negative if a signal ended it."""

    context: ForkServerContext | None = None

    def __init__(
        self, *args: object, out: str = "stdout", err: str = "stderr", prepare: Callable[[], object] = nothing
    ) -> None:
        if Child.context is None:
            Child.context = multiprocessing.get_context("forkserver")
            Child.context.set_forkserver_preload(["tests.child"])
        arguments = ([*map(str, args)], {1: out, 2: err}, prepare)
        self.process = Child.context.Process(target=run_cli, args=arguments, daemon=True)
        self.process.start()

    def send(self, number: int) -> None:
        assert self.process.pid
        os.kill(self.process.pid, number)

    def wait(self, seconds: float = 60) -> int:
        self.process.join(seconds)
        assert self.process.exitcode is not None, "it does not end"
        return self.process.exitcode

    def wait_for_records(self, output: str = "out", count: int = 1) -> None:
        wait_until(lambda: not self.process.is_alive() or num_records(output) >= count)
        assert num_records(output) >= count, Path("stderr").read_text()
