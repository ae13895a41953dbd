"""Something that computes a workload: a command whose standard output is completions, and what came of running it."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cbatch.bench import process
from cbatch.bench.workload import Workload
from cbatch.config import EngineConfig
from cbatch.settings import as_flags

_INTERVAL = "0.1"  # seconds between the marks of a timeline


@dataclass(frozen=True)
class Contender:
    """`command` prints a JSON line on standard output for each row, with `row` and `completion_tokens`, and on
    standard error, among other lines, its figures: a JSON object with `seconds` and in it `generation`."""

    name: str
    command: list[str]
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)


@dataclass(frozen=True)
class Outcome:
    """One run of a contender. Times in seconds since its command was started."""

    problem: str = ""  # why it does not count
    wall: float = 0.0  # to the last byte of output
    first: float = 0.0  # to the first completion
    generation: float = 0.0  # without loading and warming up; a duration
    peak_memory: int | None = None  # bytes
    figures: dict[str, Any] = field(default_factory=dict)
    marks: list[dict[str, Any]] = field(default_factory=list)  # counters as they grew


def schedule(name: str, engine: EngineConfig, scheduling: str, workload: Path) -> Contender:
    """cbatch itself, as a user runs it, with one of its schedules."""
    command = [sys.executable, "-m", "cbatch", "run", str(workload), "--output=-", "--ignore-eos", "--temperature=0"]
    command += ["--progress=json", f"--progress-interval={_INTERVAL}"]
    return Contender(name, command + as_flags(replace(engine, scheduling=scheduling)))


def run(contender: Contender, workload: Workload) -> Outcome:
    ended = process.run(contender.command, contender.environ)
    notes = [note for line in ended.errors if isinstance(note := _parsed(line), dict)]
    figures = next((note for note in reversed(notes) if isinstance(note.get("seconds"), dict)), {})
    problem = check([_parsed(line) for _, line in ended.lines], workload) if figures else "it gave no figures"
    if problem or ended.code:
        last = next((line for line in reversed(ended.errors) if line.strip() and _parsed(line) is None), b"")
        said = [f"exit code {ended.code}"] * bool(ended.code) + [problem, last.decode(errors="replace").strip()]
        return Outcome("; ".join(f"{part:.300}" for part in said if part))
    return Outcome(
        wall=ended.lines[-1][0],
        first=ended.lines[0][0],
        generation=figures["seconds"]["generation"],
        peak_memory=ended.peak_memory,
        figures=figures,
        marks=[note for note in notes if note.get("to_first_step") is not None],
    )


def check(completions: list[Any], workload: Workload) -> str:
    """What is wrong with these completions; nothing if each row is there once and has just the tokens asked for."""
    given: Counter[int] = Counter()
    for one in completions:
        if not isinstance(one, dict) or type(one.get("row")) is not int:
            return f"a line of output is no completion: {one!r:.80}"
        given[one["row"]] += 1
        if not 0 <= one["row"] < len(workload.items):
            return f"there is no row {one['row']}"
        if one.get("error"):
            return f"row {one['row']} failed: {one['error']}"
        asked = workload.items[one["row"]].max_tokens
        if one.get("completion_tokens") != asked:
            return f"row {one['row']} has {one.get('completion_tokens')} tokens instead of {asked}"
    wrong = [row for row in range(len(workload.items)) if given[row] != 1]
    return f"{len(wrong)} rows are missing or there twice, row {wrong[0]} among them" if wrong else ""


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
