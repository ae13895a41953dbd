from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cbatch.config import EngineConfig
from cbatch.errors import FATAL, INTERRUPTED, OK, SOME_FAILED, SettingError, UsageError
from tests.jobs import num_records, records, run_job, summary, wait_until, write_rows

ROOT = Path(__file__).parents[1]
NUM_ROWS = 150
SLOW = {"CBATCH_TEST_STEP": "0.02"}


pytestmark = pytest.mark.usefixtures("empty_folder")


def write_input(num_rows: int = NUM_ROWS, **of_all: Any) -> None:
    write_rows(
        {"id": f"r{row}", "prompt": f"the rain {row} " * (1 + row % 5), "é": [row], **of_all} for row in range(num_rows)
    )


# The real model


@pytest.fixture
def job(tiny_model: Path) -> Callable[..., int]:
    def run(**settings: Any) -> int:
        given = {"model": str(tiny_model), "dtype": "float32", "max_tokens": 8, "kv_cache_memory": 0.1, "seed": 1}
        return run_job("in.jsonl", **{**given, **settings})

    return run


def test_completions_and_counts_are_those_of_one_engine(job: Callable[..., int]) -> None:
    rows = [
        {"id": row, "prompt": f"the rain {row % 9}", "meta": "é" * row, "params": {"temperature": float(row % 2)}}
        for row in range(80)
    ]
    rows[7]["prompt"] = "the rain " * 400
    write_rows(rows)
    settings: dict[str, Any] = {"max_num_seqs": 8, "enable_prefix_caching": False}
    assert job(output="single", **settings) == SOME_FAILED
    assert job(output="double", data_parallel_size="2", **settings) == SOME_FAILED
    assert records("double") == records("single")
    assert records("single")[7]["error_kind"] == "prompt_too_long"
    single, double = summary("single"), summary("double")
    assert (single["engines"], double["engines"]) == (1, 2)
    assert double["rows"] == single["rows"]
    work = [found["tokens"]["computed_prefill"] + found["tokens"]["computed_decode"] for found in (single, double)]
    assert work[0] == work[1]
    assert double["cost"] == single["cost"]


def test_what_is_wrong_for_an_engine_is_said_as_if_there_were_one(job: Callable[..., int]) -> None:
    write_input(3)
    with pytest.raises(UsageError, match=r"--kv-cache-memory and --block-size"):
        job(output="out", data_parallel_size="2", kv_cache_memory=0.0)


@pytest.mark.parametrize("size", ["0", "-1", "two", "1.5", ""])
def test_what_is_no_number_of_engines_is_refused(size: str) -> None:
    with pytest.raises(SettingError, match="data_parallel_size must be a number, at least 1, or auto"):
        EngineConfig(data_parallel_size=size)


def test_a_baseline_has_one_engine() -> None:
    with pytest.raises(SettingError, match="scheduling static"):
        EngineConfig(data_parallel_size="2", scheduling="static")


# Processes that die. The model is the one of tests/failing_replicas.py


class Run:
    """A `cbatch run` with several engines, in a process group of its own."""

    def __init__(self, model: Path, num_engines: int, *more: object, **environ: Any) -> None:
        command = [
            "run",
            "in.jsonl",
            "-m",
            model,
            "-o",
            f"out-{num_engines}",
            "--max-tokens",
            12,
            "--progress",
            "plain",
        ]
        command += ["--shard-rows", 40, "--data-parallel-size", num_engines, *more]
        with Path("stderr").open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.failing_replicas", *map(str, command)],
                stderr=stderr,
                env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", **environ},
                start_new_session=True,
            )
        self.output = f"out-{num_engines}"

    def wait(self) -> int:
        return self.process.wait(120)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def said(self) -> str:
        return Path("stderr").read_text()

    def wait_for_records(self, count: int) -> None:
        wait_until(lambda: self.process.poll() is not None or num_records(self.output) >= count)
        assert self.process.poll() is None, self.said()


def engines() -> dict[int, list[int]]:
    """The processes that have run a row, and the rows they ran."""
    return {int(path.name[7:]): [*map(int, path.read_text().split())] for path in Path().glob("engine-*")}


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def start(tiny_model: Path) -> Iterator[Callable[..., Run]]:
    """Starts a run that does not outlive its test: start(num_engines, "--flag", NAME="in the environment")."""
    runs: list[Run] = []

    def start(*args: Any, **environ: Any) -> Run:
        runs.append(Run(tiny_model, *args, **environ))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.fixture(scope="module")
def expected(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """The records of a job with one engine."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("single"))
    write_input()
    assert Run(tiny_model, 1).wait() == OK
    yield records("out-1")
    os.chdir(before)


def test_rows_are_shared_evenly_however_few_there_are(start: Callable[..., Run]) -> None:
    write_input(5)
    run = start(3, **SLOW)
    assert run.wait() == OK
    assert " 3 engines (" in run.said()
    assert sorted(map(len, engines().values())) == [1, 2, 2]
    assert [record["id"] for record in records("out-3")] == [f"r{row}" for row in range(5)]


def test_a_process_that_is_killed_costs_no_row(start: Callable[..., Run], expected: list[dict[str, Any]]) -> None:
    write_input()
    run = start(2, **SLOW)
    run.wait_for_records(20)
    os.kill(max(engines(), key=lambda process: len(engines()[process])), signal.SIGKILL)
    assert run.wait() == OK, run.said()
    assert records("out-2") == expected
    assert run.said().count("died (SIGKILL") == 1
    ran = [row for rows in engines().values() for row in rows]
    assert NUM_ROWS < len(ran) <= NUM_ROWS + 2 * 16  # only the rows of the dead process were run again


def test_a_row_that_kills_its_process_fails_and_no_other_does(
    start: Callable[..., Run], expected: list[dict[str, Any]]
) -> None:
    write_input()
    run = start(2, CBATCH_TEST_DEADLY="31")
    assert run.wait() == SOME_FAILED, run.said()
    found = records("out-2")
    assert [record["row"] for record in found] == list(range(NUM_ROWS))
    assert {record["row"]: record["error_kind"] for record in found if record["error"]} == {31: "worker_died"}
    assert all(record["error"] or record == expected[record["row"]] for record in found)
    assert found[31]["error"].startswith("in.jsonl:32: ")
    assert sum(31 in rows for rows in engines().values()) >= 2


def test_processes_that_die_without_a_row_end_the_job_in_words(start: Callable[..., Run]) -> None:
    write_input(5)
    run = start(2, CBATCH_TEST_BOOT="dies")
    assert run.wait() == FATAL
    assert "died 8 times and completed no row in between, the last time by exit code 9" in run.said().splitlines()[-1]
    assert "Traceback" not in run.said()


def test_no_process_outlives_one_that_is_killed(start: Callable[..., Run]) -> None:
    write_input(1000)
    run = start(2, **SLOW)
    run.wait_for_records(20)
    run.close()
    assert len(engines()) == 2
    wait_until(lambda: not any(map(is_alive, engines())))


def test_a_signal_ends_the_run_soon_and_the_same_command_goes_on(
    start: Callable[..., Run], expected: list[dict[str, Any]]
) -> None:
    write_input()
    run = start(2, **SLOW)
    run.wait_for_records(20)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == INTERRUPTED, run.said()
    assert not any(map(is_alive, engines()))
    done = num_records("out-2")
    assert summary("out-2")["rows"]["ok"] == done < NUM_ROWS
    assert start(2).wait() == OK
    assert records("out-2") == expected


def test_an_interrupt_from_the_terminal_leaves_the_engines_to_end_what_they_run(start: Callable[..., Run]) -> None:
    write_input(1000)
    run = start(2, "--grace", 60, **SLOW)
    run.wait_for_records(20)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait() == INTERRUPTED, run.said()
    ran = sorted(row for rows in engines().values() for row in rows)
    assert [record["row"] for record in records("out-2", unfinished=True)] == ran
    assert len(engines()) == 2
    assert len(ran) < 1000
