from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job, and then by all children
ROOT = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
)  # children test this checkout, and a fork server finds what to import once for all of them
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models gain nothing from more, and lose much on a busy machine

import pytest
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

import torch

from tests.tiny import save_model

Cbatch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random Llama and its tokenizer."""
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


# Workers take files in this order, the slowest first, so that none of them is what all others wait for at the end.
SLOWEST = [
    "gpu_check",
    "fuzz",
    "kills",
    "readme",
    "replicas",
    "native",
    "triton",
    "aot",
    "engine",
    "fused",
    "bench",
    "run",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = [f"test_{name}.py" for name in SLOWEST]
    items.sort(key=lambda item: names.index(item.path.name) if item.path.name in names else len(names))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Jobs in this process may have set more, and threads that wait for each other on a busy machine take for ever."""
    torch.set_num_threads(1)


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test works in a folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def command(tiny_model: Path) -> list[object]:
    """Arguments that run a job on in.jsonl in the current folder."""
    return ["run", "in.jsonl", "-m", tiny_model, "-o", "out", "--threads", 1, "--progress", "plain"]


@pytest.fixture(scope="session")
def cbatch() -> Cbatch:
    """Runs the command line in a process of its own: cbatch("run", ...)."""

    def run(*args: object, stdin: str | bytes | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "cbatch", *map(str, args)],
            input=stdin.decode() if isinstance(stdin, bytes) else stdin,
            capture_output=True,
            text=True,
            env={**os.environ, **environ},
            timeout=300,
        )

    return run
