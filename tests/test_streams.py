from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cbatch.errors import SOME_FAILED
from tests.child import Child, nothing
from tests.jobs import row_numbers, write_input

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
