"""The command in this process on inputs that nobody should give it, and what must be true of every ending.

Models that are only read, never damaged, are read once and generate with the model of tests/chain.py; all others are
loaded as in a real run.
"""

from __future__ import annotations

import faulthandler
import io
import json
import os
import re
import resource
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer.main

import cbatch.engine.start
import cbatch.model.loader
from cbatch.cli import main
from cbatch.engine.block_pool import BlockPool
from cbatch.engine.engine import Engine
from cbatch.engine.scheduler import make_scheduler
from cbatch.errors import FATAL, INTERRUPTED, OK, SOME_FAILED, USAGE
from cbatch.model.loader import ModelFiles
from tests.chain import ChainRunner, continuation
from tests.chain_engine import BLOCK_SIZE, decoder
from tests.tiny import VOCAB_SIZE, make_tokenizer

MAX_TOKENS, EOS = 2, 2
_NUM_BLOCKS = 400
_SECONDS = 30  # that a case may take on a busy machine; one takes a hundredth of a second
_HANGS = 300  # seconds after which the process ends with a traceback of what it does
_MEMORY = 4 * 1024**3  # bytes that the address space may grow
_CODES = (OK, FATAL, USAGE, SOME_FAILED, INTERRUPTED)
_BUILT_IN = "smollm2-135m"
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


class Ending:
    """How one run of the command ended."""

    def __init__(self, args: Sequence[str]) -> None:
        self.args, self.code = args, -1
        self.stdout = self.stderr = ""
        self.seconds = 0.0
        self.raised = list[str]()  # tracebacks

    def __str__(self) -> str:
        return f"{self.args!r} ended with {self.code} in {self.seconds:.1f} s\n{self.stderr[-3000:]}\n{''.join(self.raised)}"


def command(*args: object) -> Ending:
    """Run the command, and check what must be true however it ends."""
    ending = Ending([str(arg) for arg in args])
    out, err = io.StringIO(), io.StringIO()
    start = time.monotonic()
    with _process(ending.args, out, err, ending.raised):
        try:
            main()
        except SystemExit as end:
            ending.code = end.code if isinstance(end.code, int) else OK if end.code is None else FATAL
        except BaseException:
            ending.raised.append(traceback.format_exc())
    ending.seconds = time.monotonic() - start
    ending.stdout, ending.stderr = out.getvalue(), err.getvalue()
    check(ending)
    return ending


@contextmanager
def _process(args: Sequence[str], out: io.StringIO, err: io.StringIO, raised: list[str]) -> Iterator[None]:
    """What a process has of its own: arguments, streams, and threads whose exceptions are noted."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(sys, "argv", ["cbatch", *args])
        stdin = open(os.devnull)  # noqa: PTH123, SIM115
        patch.setattr(sys, "stdin", stdin)
        patch.setattr(os, "_exit", sys.exit)  # in the thread of a time limit, which has the run end anyway
        patch.setattr(threading, "excepthook", lambda hook: raised.append(f"in a thread: {hook.exc_value!r}"))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        faulthandler.dump_traceback_later(_HANGS, exit=True, file=sys.__stderr__ or 2)
        stack.callback(faulthandler.cancel_dump_traceback_later)
        try:
            yield
        finally:
            with suppress(ValueError):  # a run that reads standard input detaches it
                stdin.close()


def check(ending: Ending) -> None:
    """The exit code is a documented one, an error is one line that says why, and nothing takes for ever."""
    assert not ending.raised, ending
    assert ending.code in _CODES, ending
    assert "Traceback" not in ending.stderr, ending
    assert "MemoryError" not in ending.stderr, ending
    assert ending.seconds < _SECONDS, ending
    reasons = [line for line in ending.stderr.split("\n") if line.startswith("cbatch: ")]
    if ending.code in (FATAL, USAGE) and not ending.stderr.lstrip().startswith("Usage: "):
        assert len(reasons) == 1, ending
        assert len(reasons[0]) > len("cbatch: ") + 5, ending
        assert not _UNPRINTABLE.search(reasons[0]), ending
        assert ending.stderr.rstrip("\n").endswith(reasons[0]), ending
    if ending.code in (OK, SOME_FAILED):
        assert not reasons, ending


# Models


class Known(ModelFiles):
    """A model that nobody damages: it is found good once."""

    def check(self, dummy: bool = False) -> None:  # noqa: ARG002
        if "is_good" not in self.__dict__:
            super().check()
            self.__dict__["is_good"] = True


def in_place_of_models(patch: pytest.MonkeyPatch, known: Sequence[Path]) -> None:
    """Have jobs find these models known, generate with the chain model if theirs is, and fetch nothing."""
    models = {str(path): Known(str(path), path) for path in known}
    locate, load = cbatch.model.loader.locate, cbatch.engine.start.start_engine

    def find(name: str) -> ModelFiles:
        return models.get(name) or locate(name if name != _BUILT_IN else "no-such-model")

    def start(plan: Any, place: Any, files: ModelFiles, stats: Any) -> Any:
        if not isinstance(files, Known):
            return load(plan, place, files, stats)
        scheduler = make_scheduler("continuous", BlockPool(_NUM_BLOCKS, BLOCK_SIZE), 256, 32)
        runner: Any = ChainRunner(_NUM_BLOCKS * BLOCK_SIZE, BLOCK_SIZE, files.config.vocab_size)
        decode = decoder(files.tokenizer)
        return Engine(runner, scheduler, decode, files.eos_token_ids, plan.max_model_len, stats, order=plan.order)

    def start_several(plan: Any, files: ModelFiles, stats: Any, _note: Callable[[str], None]) -> Any:
        return start(plan, plan.places[0], files, stats)

    patch.setattr("cbatch.model.loader.locate", find)
    patch.setattr("cbatch.engine.start.start_engine", start)
    patch.setattr("cbatch.engine.replicas.Replicas", start_several)
    patch.setattr("cbatch.model.ceilings.ceilings", lambda *_: None)
    patch.setattr("os.fsync", lambda _: None)  # no case loses power
    patch.setattr("os.fdatasync", lambda _: None)
    patch.setattr("typer.main.get_command", cache(typer.main.get_command))
    patch.setattr("cbatch.machine.version", cache(version))


@contextmanager
def bounded_memory() -> Iterator[None]:
    """The address space may grow only so far, so that a size taken from a damaged file is not believed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + _MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# Rows


def good_row(number: int) -> dict[str, Any]:
    return {"id": f"good {number}", "prompt": f"the rain {number}" + " in spain" * (number % 3)}


@cache
def completion_of(number: int) -> str:
    """What the chain model says to a good row."""
    tokenizer = make_tokenizer()
    messages = [{"role": "user", "content": good_row(number)["prompt"]}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    made = continuation(ids, VOCAB_SIZE, lambda made: len(made) == MAX_TOKENS or made[-1:] == [EOS])
    return decoder(tokenizer)(made)


def check_good(records: Sequence[dict[str, Any]]) -> set[str]:
    """The ids of good rows among records, each of which is there once and completed as if it were alone."""
    good = [record for record in records if str(record.get("id")).startswith("good ")]
    for record in good:
        number = int(record["id"].removeprefix("good "))
        assert {name: record[name] for name in good_row(number)} == good_row(number), record
        assert (record["completion"], record["error"]) == (completion_of(number), None), record
    ids = [record["id"] for record in good]
    assert len(set(ids)) == len(ids)
    return set(ids)


def lines(rows: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def empty(folder: Path) -> None:
    """Remove all that is in a folder."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(FileNotFoundError):
                path.unlink()
