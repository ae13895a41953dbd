from __future__ import annotations

import functools
import math
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cbatch import deadline
from cbatch.config import TaskConfig
from cbatch.deadline import Deadline, parse_duration, time_limit
from cbatch.errors import INTERRUPTED, OK, UsageError
from cbatch.model.runner import Runner
from tests.child import SLOW, Child
from tests.jobs import num_records, records, replace_start_engine, row_numbers, summary, wait_until, write_input

pytestmark = pytest.mark.usefixtures("empty_folder")


# What is asked for


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("1.5m", 90),
        ("30m", 1800),
        ("2h", 7200),
        ("1d", 86400),
        ("01:30", 90),
        ("02:00:30", 7230),
        ("1-00", 86400),
        ("1-02:03", 93780),
        ("2-03:04:05", 183845),
    ],
)
def test_durations_are_read_as_slurm_writes_them(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-5", "1:2:3:4", "1-", "-1", "2 h", "1h30m", "inf"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a duration such as 90"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["99999999999999d", "9" * 400, "999999999-00", "36601d"])
def test_a_duration_that_no_clock_can_show_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="more than 100 years"):
        parse_duration(text)


def test_the_earlier_of_the_time_limit_and_the_end_of_the_slurm_job_counts() -> None:
    slurm = {"SLURM_JOB_END_TIME": str(int(time.time()) + 100)}
    assert time_limit("50", slurm) == (50, "--time-limit")
    for asked in (None, "2h"):
        seconds, whose = time_limit(asked, slurm)
        assert 0 < seconds <= 100
        assert whose == "SLURM_JOB_END_TIME"
    assert time_limit("none", slurm) == (math.inf, "")
    assert time_limit(None, {}) == (math.inf, "")
    assert time_limit(None, {"SLURM_JOB_END_TIME": "1"}) == (math.inf, "")  # raised since


def test_a_run_leaves_ten_seconds_before_its_limit_and_starts_no_row_that_would_not_end_by_then() -> None:
    for grace, seconds in ((0, 7), (30, 30)):
        near = [
            Deadline(TaskConfig(time_limit=f"{limit}", grace=grace), lambda: 7.0, {})
            for limit in (9, 11, 9 + seconds, 11 + seconds)
        ]
        assert [deadline.is_past for deadline in near] == [True, False, False, False]
        assert [deadline.is_near for deadline in near] == [True, True, True, False]
    endless = Deadline(TaskConfig(), lambda: 1e9, {})
    assert not endless.is_near
    assert str(endless) == ""


def test_there_is_time_for_what_was_finished_to_reach_the_disk() -> None:
    assert deadline._STEP + deadline._LAST_WORDS < deadline._LEAVING


# Processes


def stuck_after(num_steps: int) -> None:
    """A model whose steps take for ever, in a process that does not wait for that as long as usual."""
    deadline._STEP = 0.5
    launch, steps = Runner.launch, iter(range(num_steps))

    def slow(self: Runner, *step: Any) -> Any:
        if next(steps, None) is None:
            Path("stuck").touch()
            time.sleep(100)
        return launch(self, *step)

    Runner.launch = slow  # type: ignore[assignment, method-assign]


def stuck_in_loading() -> None:
    """A library that takes long and catches whatever a handler of a signal might raise."""

    def slow_start(*_: object) -> None:
        Path("stuck").touch()
        while True:
            with suppress(BaseException):
                time.sleep(100)

    replace_start_engine(slow_start)


@pytest.mark.parametrize("grace", [0, 1])
def test_a_step_that_does_not_end_is_left_and_what_was_finished_is_kept(command: list[object], grace: int) -> None:
    write_input(20, bad=(3,))
    args = ["--max-num-seqs", 1, "--max-tokens", 1, "--grace", grace]
    child = Child(*command, *args, prepare=functools.partial(stuck_after, 10))
    wait_until(Path("stuck").exists)
    child.send(signal.SIGTERM)
    assert child.wait() == INTERRUPTED
    assert "run the same command again" in Path("stderr").read_text()
    figures = summary()
    assert not figures["finished"]
    assert num_records("out") == figures["rows"]["ok"] + figures["rows"]["failed"] > 5
    assert Child(*command, "--max-tokens", 1).wait() == 3
    assert row_numbers() == list(range(20))


def test_a_signal_during_loading_ends_the_run_whatever_the_libraries_do(command: list[object]) -> None:
    write_input(5, bad=(2,))
    child = Child(*command, prepare=stuck_in_loading)
    wait_until(Path("stuck").exists)
    child.send(signal.SIGUSR1)
    assert child.wait() == INTERRUPTED
    assert "run the same command again" in Path("stderr").read_text()
    assert num_records("out") == 1  # the bad row
    assert Child(*command, "--max-tokens", 2).wait() == 3
    assert row_numbers() == list(range(5))


def test_with_grace_the_running_rows_end_and_no_other_starts(command: list[object]) -> None:
    write_input(200)
    args = ["--max-num-seqs", 2, "--ignore-eos", "--max-tokens", 40, "--grace", 60]
    child = Child(*command, *args)
    child.wait_for_records()
    child.send(signal.SIGTERM)
    assert child.wait() == INTERRUPTED
    rows = [record["row"] for record in records(unfinished=True)]
    assert rows == list(range(len(rows)))  # a row that had started has not been given up
    assert "SIGTERM: what runs may go on for 60 s" in Path("stderr").read_text()
    assert len(rows) < 200


def test_a_second_signal_ends_the_grace(command: list[object]) -> None:
    write_input(200)
    child = Child(*command, "--grace", 1000, "--max-tokens", 1, prepare=functools.partial(stuck_after, 1))
    wait_until(Path("stuck").exists)
    child.send(signal.SIGUSR1)
    child.send(signal.SIGTERM)
    assert child.wait() in (128 + signal.SIGTERM, 128 + signal.SIGUSR1)


def test_a_time_limit_ends_the_run_before_it_is_over(command: list[object]) -> None:
    write_input(3000)
    for limit in (11.5, 16, 60):  # on a busy machine no row may be done after the first
        assert Child(*command, *SLOW, "--time-limit", limit).wait() == INTERRUPTED
        if num_records("out"):
            break
    said = Path("stderr").read_text()
    assert re.search(r": until [0-9: -]+ \(--time-limit\)$", said.splitlines()[0])
    done = num_records("out")
    assert 0 < done < 3000
    assert Child(*command, "--max-tokens", 30, "--ignore-eos", "--limit", done).wait() == OK
