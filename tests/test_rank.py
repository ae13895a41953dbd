from __future__ import annotations

import errno
import fcntl
import functools
import json
import os
import random
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from cbatch.errors import OK, SOME_FAILED, USAGE, UsageError
from cbatch.rows.rank import Rank, find_rank
from cbatch.rows.reader import spans
from tests.child import SLOW, Child
from tests.jobs import num_records, records, row_numbers, write_input

TASK = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}  # in the script of a job with four tasks
STEP = {**TASK, "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}  # in one of the tasks that srun starts there


def array(task: int, first: int, last: int, count: int) -> dict[str, str]:
    names = {"ID": task, "MIN": first, "MAX": last, "COUNT": count}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in names.items()}


pytestmark = pytest.mark.usefixtures("empty_folder")


# Which rank


@pytest.mark.parametrize(
    ("asked", "environ", "place", "told_by"),
    [
        (None, {}, (0, 1), ""),
        ("2/5", {}, (2, 5), "--shard"),
        ("2/5", STEP, (2, 5), "--shard"),
        ("none", {**STEP, **array(1, 0, 2, 3)}, (0, 1), ""),
        (None, array(1, 0, 2, 3), (1, 3), "SLURM_ARRAY_TASK_ID"),
        (None, array(9, 3, 15, 5), (2, 5), "SLURM_ARRAY_TASK_ID"),
        (None, array(4, 4, 4, 1), (0, 1), ""),
        (None, {"SLURM_PROCID": "1", "SLURM_NTASKS": "3"}, (1, 3), "SLURM_PROCID"),
        (None, STEP, (2, 4), "SLURM_PROCID"),
        (None, TASK, (0, 1), ""),
        (None, {"RANK": "1", "WORLD_SIZE": "2"}, (1, 2), "RANK"),
        (None, {"RANK": "1"}, (0, 1), ""),
        (None, {**STEP, "RANK": "1", "WORLD_SIZE": "2"}, (2, 4), "SLURM_PROCID"),
        (None, {**STEP, **array(1, 0, 2, 3)}, (6, 12), "SLURM_ARRAY_TASK_ID and SLURM_PROCID"),
    ],
)
def test_the_rank_is_what_is_asked_for_or_what_the_environment_tells(
    asked: str | None, environ: Mapping[str, str], place: tuple[int, int], told_by: str
) -> None:
    found = find_rank(asked, environ)
    assert (found, found.told_by) == (Rank(*place), told_by)


@pytest.mark.parametrize(
    ("asked", "environ", "message"),
    [
        ("3/3", {}, "--shard 3/3: say i/n, with i from 0 to n-1"),
        ("1/0", {}, "--shard 1/0"),
        ("-1/3", {}, "--shard -1/3"),
        ("one", {}, "--shard one"),
        (None, array(3, 0, 9, 4) | {"SLURM_ARRAY_TASK_ID": "1"}, "unevenly spaced.*--shard i/n"),
        (None, {"SLURM_ARRAY_TASK_ID": "1"}, "SLURM_ARRAY_TASK_MIN=: not a number.*--shard i/n"),
        (None, {"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 and WORLD_SIZE=2 contradict each other"),
        (None, {"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x: not a number"),
    ],
)
def test_a_rank_that_can_not_be_told_is_refused(asked: str | None, environ: Mapping[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_rank(asked, environ)


@pytest.mark.parametrize("total", [1, 2, 3, 7])
def test_every_row_belongs_to_one_rank_and_small_files_are_spread(total: int) -> None:
    ranks = [Rank(index, total) for index in range(total)]
    for source in range(5):
        rows = np.arange(100)
        assert (sum(rank.owns(source, rows).astype(int) for rank in ranks) == 1).all()
        for rank in ranks:
            for part in (range(100), range(3, 50), range(99, 100), range(0)):
                assert rank.count(source, part) == sum(bool(rank.owns(source, row)) for row in part)
    assert {next(rank for rank in ranks if rank.owns(source, 0)).index for source in range(total)} == set(range(total))


def test_a_rank_of_another_division_has_one_heir() -> None:
    for total in (1, 2, 3, 5):
        heirs = [Rank(index, total) for index in range(total)]
        for left in (Rank(), Rank(1, 3), Rank(4, 5), Rank(8, 9)):
            assert sum(heir.inherits(left) for heir in heirs) == (left.num_ranks != total)


def test_the_rows_within_skip_and_limit_are_those_that_are_read() -> None:
    counts = [3, 0, 5, 2]
    places = [(source, row) for source, count in enumerate(counts) for row in range(count)]
    for skip in range(12):
        for limit in (None, 0, 1, 4, 20):
            expected = places[skip:] if limit is None else places[skip : skip + limit]
            found = [(source, row) for source, rows in enumerate(spans(counts, skip, limit)) for row in rows]
            assert found == expected


# Several tasks


def set_environ(environ: Mapping[str, str]) -> None:
    os.environ.update(environ)


@pytest.fixture
def command(command: list[object]) -> list[object]:
    return [*command, "--max-tokens", 4]


def start(command: list[object], index: int, total: int, *more: object) -> Child:
    return Child(*command, *more, "--shard", f"{index}/{total}", err=f"stderr-{index}-{total}")


def said(index: int, total: int) -> str:
    return Path(f"stderr-{index}-{total}").read_text()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("environ", [array(1, 0, 2, 3), {"SLURM_PROCID": "1", "SLURM_NTASKS": "3"}])
def test_a_task_completes_its_rows_only_and_says_which_they_are(
    command: list[object], environ: dict[str, str], kind: str
) -> None:
    write_input(20, bad=(4, 5))
    child = Child(*command, "--format", kind, prepare=functools.partial(set_environ, environ))
    assert child.wait() == SOME_FAILED
    assert row_numbers() == list(range(1, 20, 3))
    assert [path.name for path in Path("out").glob("part*")] == [f"part-1-of-3-00000.{kind}"]
    lines = Path("stderr").read_text().splitlines()
    assert f"shard 1 of 3 ({next(iter(environ))})" in lines[0]
    assert "13 rows are left to the others" in lines[-1]
    figures = json.loads(Path("out/.cbatch/summary-1-of-3.json").read_text())
    assert (figures["rows"]["total"], figures["rows"]["ok"], figures["rows_left_to_others"]) == (7, 6, 13)


def num_shards() -> int:
    return len(list(Path("out").glob("part*")))


def kill_after(task: Child, count: int) -> None:
    """Kill a task, at the latest when all of them have published so many shards."""
    deadline = time.monotonic() + 60
    while num_shards() < count and task.process.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    task.process.kill()
    task.wait()


def whole(command: list[object]) -> list[dict[str, object]]:
    """The records of the same job done by one task."""
    assert Child(*command, "-o", "whole", "--shard", "none").wait() in (OK, SOME_FAILED)
    return records("whole")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_three_tasks_killed_and_resumed_as_five_complete_every_row_once(command: list[object], kind: str) -> None:
    write_input(151, bad=(7, 100))
    command += ["--format", kind, "--shard-rows", 6]
    tasks = [start(command, index, 3, *SLOW[:2]) for index in range(3)]
    for count, task in zip((2, 3, 6), tasks, strict=True):
        kill_after(task, count)
    tasks = [start(command, index, 5) for index in range(5)]
    kill_after(tasks[3], num_shards() + random.randrange(4))
    assert {task.wait() for index, task in enumerate(tasks) if index != 3} <= {OK, SOME_FAILED}
    assert start(command, 3, 5).wait() in (OK, SOME_FAILED)
    assert "all rows of the job are done" in said(3, 5)
    assert records() == whole(command)
    found = sorted(Path("out").glob("part*"))
    for index in range(2):  # nothing is left, however it is divided
        assert start(command, index, 2).wait() in (OK, SOME_FAILED)
        assert "all rows of the job are done" in said(index, 2)
    assert Child(*command, "--shard", "none").wait() == SOME_FAILED
    assert sorted(Path("out").glob("part*")) == found
    assert records() == records("whole")
    assert not list(Path("out/.cbatch").glob("*.jsonl"))


def test_what_one_task_began_several_go_on_with_and_back(command: list[object]) -> None:
    write_input(200)
    for division in (1, 4, 2, 4, 1):
        task = start(command, 0, division, *SLOW[:2])
        task.wait_for_records(count=num_records("out") + 3)
        task.send(signal.SIGTERM if division < 4 else signal.SIGKILL)
        task.wait()
    for index in range(3):
        assert start(command, index, 3).wait() == OK
    assert "all rows of the job are done" in said(2, 3)
    assert records() == whole(command)


def test_tasks_that_draw_a_seed_draw_the_same(command: list[object]) -> None:
    write_input(30)
    command += ["--temperature", 1]
    tasks = [start(command, index, 3) for index in range(3)]
    assert [task.wait() for task in tasks] == [OK, OK, OK]
    manifest = json.loads(Path("out/.cbatch/manifest.json").read_text())
    assert records() == whole([*command, "--seed", manifest["seed"]])
    assert start([*command, "--top-k", 3], 0, 3).wait() == USAGE
    assert "top_k: 0 before, 3 now" in said(0, 3)


def test_a_task_is_refused_beside_its_like_and_beside_tasks_of_another_division(command: list[object]) -> None:
    write_input(20_000)
    command += SLOW
    living = start(command, 1, 3)
    living.wait_for_records()
    for index, total, code in ((1, 3, USAGE), (0, 2, USAGE), (0, 1, USAGE), (2, 3, OK)):
        assert Child(*command, "--shard", f"{index}/{total}", "--limit", 9, err="refused").wait() == code
        assert ("another cbatch job is writing there now" in Path("refused").read_text()) == (code == USAGE)
    assert living.process.is_alive()
    living.process.kill()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--ordered"], "--ordered needs all rows in one task"),
        (["--overwrite"], "remove OUT before they start"),
        (["--retry-failed"], "run it when all tasks have ended"),
        (["-o", "out.parquet"], "out.parquet: one file can't take the rows of several tasks"),
        (["-"], "standard input can't be read by several tasks"),
    ],
    ids=str,
)
def test_what_tasks_can_not_do_together_is_refused_at_once(
    command: list[object], more: list[object], message: str
) -> None:
    write_input(3)
    child = Child(*command, *more, prepare=functools.partial(set_environ, array(1, 0, 2, 3)))
    assert child.wait() == USAGE
    last = Path("stderr").read_text().splitlines()[-1]
    assert message in last
    assert "This is shard 1 of 3 (SLURM_ARRAY_TASK_ID); --shard none does all rows in one task" in last
    assert not Path("out").exists()


def test_failed_rows_of_tasks_are_retried_by_one_that_has_the_output_to_itself(command: list[object]) -> None:
    write_input(20, bad=(4, 5))
    for index in (0, 1):
        start(command, index, 2).wait()
    write_input(20)
    assert Child(*command, "--retry-failed").wait() == OK
    assert records() == whole(command)


def without_locks() -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    fcntl.flock = flock


def test_a_file_system_without_locks_will_do(command: list[object]) -> None:
    write_input(20)
    for index in (0, 1):
        assert Child(*command, "--shard", f"{index}/2", prepare=without_locks).wait() == OK
    assert row_numbers() == list(range(20))
    assert "this file system has no locks" in Path("stderr").read_text()
