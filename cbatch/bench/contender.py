"""What is compared: a command that computes a workload and prints completions, and the outcome of running it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cbatch.bench import process
from cbatch.bench.workload import Workload
from cbatch.config import EngineConfig
from cbatch.isolation import python
from cbatch.settings import as_flags

_INTERVAL = "0.1"  # seconds between the marks of a timeline


@dataclass(frozen=True)
class Contender:
    """A command that computes a workload.

    It prints a JSON line on standard output for each row, with `row` and `completion_tokens`, and on standard error,
    among other lines, its figures: a JSON object with `seconds` and in it `generation`.
    """

    name: str
    command: list[str]
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)


@dataclass(frozen=True)
class Outcome:
    """One run of a contender. Times in seconds since its command was started."""

    problem: str = ""  # why the run does not count; empty if it does
    wall: float = 0.0  # to the last byte of output
    first: float = 0.0  # to the first completion
    generation: float = 0.0  # duration of the generation, without loading and warming up
    peak_memory: int | None = None  # bytes
    figures: dict[str, Any] = field(default_factory=dict)
    marks: list[dict[str, Any]] = field(default_factory=list)  # progress lines of cbatch: its counters so far


def schedule(name: str, engine: EngineConfig, scheduling: str, workload: Path) -> Contender:
    """cbatch with one of its schedules, run as a user runs it."""
    command = python("cbatch", "run", str(workload), "--output=-", "--ignore-eos", "--temperature=0")
    command += ["--progress=json", f"--progress-interval={_INTERVAL}"]
    return Contender(name, command + as_flags(replace(engine, scheduling=scheduling)))


def run(contender: Contender, workload: Workload) -> Outcome:
    """Run a contender to its end and check its completions."""
    finished = process.run(contender.command, contender.environ)
    notes = [note for line in finished.errors if isinstance(note := _parsed(line), dict)]
    figures = next((note for note in reversed(notes) if isinstance(note.get("seconds"), dict)), {})
    completions = [_parsed(line) for _, line in finished.lines]
    problem = check(completions, workload) if figures else "it gave no figures"
    if problem or finished.exit_code:
        return Outcome(_explanation(finished, problem))
    return Outcome(
        wall=finished.lines[-1][0],
        first=finished.lines[0][0],
        generation=figures["seconds"]["generation"],
        peak_memory=finished.peak_memory,
        figures=figures,
        marks=[note for note in notes if note.get("to_first_step") is not None],
    )


def check(completions: list[Any], workload: Workload) -> str:
    """The first thing that is wrong; empty if each row is there once and has exactly the tokens asked for."""
    given: Counter[int] = Counter()
    for completion in completions:
        if not isinstance(completion, dict) or type(completion.get("row")) is not int:
            return f"a line of output is no completion: {completion!r:.80}"
        row, num_tokens = completion["row"], completion.get("completion_tokens")
        given[row] += 1
        if not 0 <= row < len(workload.items):
            return f"there is no row {row}"
        if completion.get("error"):
            return f"row {row} failed: {completion['error']}"
        asked = workload.items[row].max_tokens
        if num_tokens != asked:
            return f"row {row} has {num_tokens} tokens instead of {asked}"
    wrong = [row for row in range(len(workload.items)) if given[row] != 1]
    return f"{len(wrong)} rows are missing or there twice, row {wrong[0]} among them" if wrong else ""


def _explanation(finished: process.Finished, problem: str) -> str:
    """Why a run does not count: its exit code, the problem, and the last line of text on standard error."""
    texts = (line for line in reversed(finished.errors) if line.strip() and _parsed(line) is None)
    last = next(texts, b"").decode(errors="replace").strip()
    exit_code = f"exit code {finished.exit_code}" if finished.exit_code else ""
    return "; ".join(f"{part:.300}" for part in (exit_code, problem, last) if part)


def _parsed(line: bytes) -> Any:
    """The JSON value of a line; None if it is not JSON."""
    try:
        return json.loads(line)
    except ValueError:
        return None
