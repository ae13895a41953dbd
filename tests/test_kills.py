"""Kills, full disks and lost inputs; see tests/kills.py, which does it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = int(os.environ.get("CBATCH_TEST_KILLS", "100"))

pytestmark = pytest.mark.slow


def provoke(*args: object, seconds: int = 600) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.kills", *map(str, args)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_no_kill_at_any_moment_loses_doubles_or_damages_a_row() -> None:
    tally = json.loads(provoke("kill", KILLS, os.environ.get("CBATCH_TEST_SEED", "1"), seconds=KILLS * 10))
    assert tally["kills"] == KILLS
    assert min(tally[moment] for moment in ("before a row", "among the rows", "at the end")) > 0


def test_a_limit_to_the_size_of_files_ends_the_job_in_words_and_it_goes_on_without() -> None:
    provoke("limit")


def test_a_full_and_a_read_only_disk_end_the_job_in_words_and_it_goes_on_once_there_is_room() -> None:
    if "can't mount" in provoke("fill"):
        pytest.skip("only root may mount a small disk")


def test_a_lost_input_changes_nothing_and_the_job_goes_on_once_it_is_back() -> None:
    provoke("lose")


def test_of_runs_that_start_at_once_one_writes_and_the_others_are_refused() -> None:
    provoke("race")
