"""Whole jobs in the current folder: write their input, run them in this process, read what they wrote."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pyarrow.parquet as pq
import pytest

import cbatch.run
from cbatch.config import RunConfig


def run_job(*inputs: object, **settings: Any) -> int:
    """Run a job whose settings are named as in `cbatch.config`; its exit code."""
    return cbatch.run.run(job_config(*inputs, **settings))


def job_config(*inputs: object, **settings: Any) -> RunConfig:
    """The settings of a job, named as in `cbatch.config`."""
    given = {"inputs": tuple(map(str, inputs)) or ("in.jsonl",), "threads": 1, "progress": "none", **settings}
    names, parts = frozenset(settings), {}
    for part, kind in get_type_hints(RunConfig).items():
        if part == "given":
            continue
        parts[part] = kind(**{field.name: given.pop(field.name) for field in fields(kind) if field.name in given})
    assert not given
    return RunConfig(**parts, given=names)


def replace_start_engine(start: Callable[..., Any], patch: pytest.MonkeyPatch | None = None) -> None:
    """Jobs of this process get their engines from `start` from now on, or until `patch` is undone."""
    (patch or pytest.MonkeyPatch()).setattr("cbatch.engine.start.start_engine", start)


def prompt(row: int) -> dict[str, Any]:
    """An input row."""
    return {
        "id": f"r{row}",
        "prompt": f"the rain {row}" + " in spain" * (row % 5),
        "meta": {"a": [row, None, "é\u2028"]},
    }


def write_rows(rows: Iterable[Any], path: Path | str = "in.jsonl") -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_input(num_rows: int, name: str = "in.jsonl", bad: tuple[int, ...] = ()) -> None:
    """Write rows that can be completed, except those in `bad`."""
    write_rows(({**prompt(row), **({"prompt": 7} if row in bad else {})} for row in range(num_rows)), name)


def read_jsonl(path: Path | str) -> list[dict[str, Any]]:
    """The records of a file that is empty or ends with a newline."""
    content = Path(path).read_bytes()
    assert not content or content.endswith(b"\n")
    return [json.loads(line) for line in content.split(b"\n")[:-1]]


def records(output: str = "out", unfinished: bool = False) -> list[dict[str, Any]]:
    """The records of a job in the order of their rows; with `unfinished` also those in JSONL files that still grow."""
    path = Path(output)
    files = [path, *path.glob("part-*"), *(path.glob(".cbatch/part-*.jsonl") if unfinished else [])]
    found: list[dict[str, Any]] = []
    for file in filter(Path.is_file, files):
        found += pq.read_table(file).to_pylist() if file.suffix == ".parquet" else read_jsonl(file)
    return sorted(found, key=lambda record: record["row"])


def row_numbers(output: str = "out") -> list[int]:
    return [record["row"] for record in records(output)]


def num_records(output: str = "out") -> int:
    """Count the records in JSONL files, finished or growing, of a job that may be running."""
    try:
        return sum(path.read_bytes().count(b"\n") for path in Path(output).rglob("*.jsonl"))
    except FileNotFoundError:  # renamed meanwhile
        return 0


def summary(output: str = "out") -> dict[str, Any]:
    """What the last run of a job wrote to its summary.json."""
    path = Path(output)
    state = path.with_name(f".{path.name}.cbatch") if path.suffix else path / ".cbatch"
    figures: dict[str, Any] = json.loads((state / "summary.json").read_text())
    return figures


def wait_until(is_so: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.01)
