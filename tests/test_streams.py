from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cbatch.errors import FATAL, READER_GONE, SOME_FAILED
from tests.child import Child, nothing
from tests.jobs import row_numbers, write_input

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.usefixtures("empty_folder")


def lose_the_reader_of_stderr() -> None:
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.close(reader)


@pytest.mark.parametrize(
    ("err", "prepare"),
    [("/dev/full", nothing), ("stderr", lose_the_reader_of_stderr)],
    ids=["full", "broken"],
)
@pytest.mark.parametrize("mode", ["plain", "rich", "json"])
def test_a_standard_error_that_takes_nothing_ends_no_run(
    tiny_model: Path, mode: str, err: str, prepare: Callable[[], object]
) -> None:
    write_input(20, bad=(4,))
    args = ["run", "in.jsonl", "-m", tiny_model, "-o", "out", "--threads", 1, "--max-tokens", 2, "--progress", mode]
    assert Child(*args, err=err, prepare=prepare).wait() == SOME_FAILED
    assert row_numbers() == list(range(20))


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["check", "in.jsonl"], ["--version"]])
def test_a_command_that_nobody_reads_ends_with_the_code_of_a_broken_pipe(
    tiny_model: Path, arguments: list[str]
) -> None:
    write_input(50)
    model = ["-m", str(tiny_model)] if "check" in arguments else []
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "cbatch", *arguments, *model]
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (READER_GONE, "")


@pytest.mark.parametrize("arguments", [["check", "in.jsonl", "-m", "MODEL"], ["--help"], ["--version"]])
def test_a_report_that_can_not_be_written_is_an_error(tiny_model: Path, arguments: list[str]) -> None:
    write_input(3)
    words = [str(tiny_model) if word == "MODEL" else word for word in arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cbatch", *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert done.returncode == FATAL
    assert done.stderr == "cbatch: standard output: can't write: No space left on device\n"
