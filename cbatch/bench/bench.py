"""`cbatch bench`: how fast cbatch is on this machine, beside other schedules and other engines.

Each contender runs in a process of its own, never two at once, and they take turns: A B C, A B C, ..., so that a
machine that becomes slower or faster meanwhile does so for all of them. The table shows medians.
"""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cbatch import __version__
from cbatch.bench import plot, result
from cbatch.bench.contender import Contender, Outcome, run, schedule
from cbatch.bench.peers import Peers, Skipped, interpreters
from cbatch.bench.timeline import timeline
from cbatch.bench.workload import Workload, make, read_file
from cbatch.config import SCHEDULES, BenchConfig, EngineConfig
from cbatch.errors import KILLED, OK, SOME_FAILED, UsageError
from cbatch.isolation import python
from cbatch.machine import allowed_cpus, device_name
from cbatch.watch.progress import say

if TYPE_CHECKING:
    from cbatch.model.loader import ModelFiles

_ROWS = 256
_GENERATED = ("ragged", "fixed", "prefix")


def bench(config: BenchConfig, engine: EngineConfig) -> int:
    """Measure, print a table, and write the files that were asked for; SOME_FAILED if a contender failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(KILLED + signal.SIGTERM))  # ends the running contender, too
    _check(config, engine)
    pythons = interpreters(config.python)
    setup = _set_up(config, engine)
    with tempfile.TemporaryDirectory(prefix="cbatch-bench-") as folder:
        contenders, skipped = _contenders(setup, config, pythons, Path(folder))
        say(str(setup))
        outcomes, ceilings = _take_turns(contenders, setup, config.repeat)
    summary = result.summarize(outcomes, setup.workload, ceilings)
    curves = _curves(outcomes, summary)
    print()
    result.print_table(result.table(summary), Console())
    print("\n".join(["", *result.notes(summary, ceilings)]), flush=True)
    if config.json:
        timelines = {name: [asdict(piece) for piece in pieces] for name, pieces in curves.items()}
        record = {"ceilings": ceilings, "contenders": summary, "skipped": skipped, "timelines": timelines}
        Path(config.json).write_text(json.dumps(setup.record() | record, indent=1) + "\n", encoding="utf-8")
    if config.plot:
        title = f"{setup.files.path.name}, workload {Path(setup.workload.name).name}"
        Path(config.plot).write_text(plot.page(curves, title), encoding="utf-8")
    return OK if all(contender["valid"] for contender in summary.values()) else SOME_FAILED


def _check(config: BenchConfig, engine: EngineConfig) -> None:
    """UsageError if a setting makes no sense here, or a file can't be written, before anything is measured."""
    for path in (Path(name) for name in (config.json, config.plot) if name):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            raise UsageError(f"{path}: can't be written: {error.strerror}") from None
    if engine.scheduling != "continuous":
        raise UsageError("--scheduling: name the schedules to compare with in --compare")
    if engine.data_parallel_size != "1":
        raise UsageError("--data-parallel-size: what is compared here runs in one engine")


@dataclass(frozen=True)
class Setup:
    """What is measured: a model and a workload, and on which device, in which precision, with how many threads."""

    engine: EngineConfig
    files: ModelFiles
    workload: Workload
    device: str
    dtype: str
    num_threads: int

    def for_peers(self) -> dict[str, Any]:
        """The settings of `peer_driver.py`."""
        return {
            "model": str(self.files.path),
            "dtype": self.dtype,
            "device": self.device,
            "threads": self.num_threads,
            "cpus": allowed_cpus()[: self.num_threads],
            "longest": self.workload.longest,
            "prefix_caching": self.engine.enable_prefix_caching,
        }

    def record(self) -> dict[str, Any]:
        """The setup as the file of `--json` keeps it."""
        return {
            "cbatch": __version__,
            "workload": self.workload.about(),
            "machine": {"name": device_name(self.device), "platform": platform.platform()} | self.for_peers(),
            "versions": {name: version(name) for name in ("torch", "transformers")},
            "engine": asdict(self.engine),
        }

    def __str__(self) -> str:
        workload = self.workload
        return (
            f"{workload.name}: {len(workload.items):,} rows, {workload.prompt_tokens:,} prompt and "
            f"{workload.output_tokens:,} output tokens; {self.dtype} on {self.device}, {self.num_threads} threads"
        )


def _set_up(config: BenchConfig, engine: EngineConfig) -> Setup:
    from cbatch.engine.places import find_places
    from cbatch.engine.plan import resolve
    from cbatch.model.loader import locate

    [place], files = find_places(engine), locate(engine.model)
    files.check(dummy=engine.load_format == "dummy")
    dtype = resolve(engine, [place], files).dtype
    if config.workload in _GENERATED:
        workload = make(config.workload, config.rows or _ROWS, files.tokenizer, files.context)
    else:
        workload = read_file(config.workload, config.rows, files.context)
    return Setup(engine, files, workload, place.device, dtype, place.num_threads)


def _contenders(
    setup: Setup, config: BenchConfig, pythons: dict[str, str], folder: Path
) -> tuple[list[Contender], dict[str, str]]:
    """cbatch and what it is compared with, and why others are skipped. The workload is written into `folder`."""
    path = folder / f"{Path(setup.workload.name).stem}.jsonl"
    path.write_text(setup.workload.lines(), encoding="utf-8")
    peers = Peers(setup.files, path, setup.for_peers(), pythons, config.openvino_model)
    contenders, skipped = [schedule(result.OURS, setup.engine, "continuous", path)], {}
    for name in config.compared:
        if name in SCHEDULES:
            contenders.append(schedule(name, setup.engine, name, path))
            continue
        try:
            contenders.append(peers.contender(name))
        except Skipped as reason:
            skipped[name] = str(reason)
            say(str(reason))
    return contenders, skipped


def _take_turns(
    contenders: list[Contender], setup: Setup, repeat: int
) -> tuple[dict[str, list[Outcome]], dict[str, float]]:
    """Run each contender `repeat` times, in turn. The machine is measured before each turn; its best counts."""
    outcomes: dict[str, list[Outcome]] = {contender.name: [] for contender in contenders}
    ceilings: dict[str, float] = {}
    for turn in range(1, repeat + 1):
        for name, value in _ceilings(setup).items():
            ceilings[name] = max(value, ceilings.get(name, 0.0))
        for contender in contenders:
            earlier = outcomes[contender.name]
            if any(outcome.problem for outcome in earlier):
                continue  # it can't become valid any more
            outcome = run(contender, setup.workload)
            earlier.append(outcome)
            rate = outcome.problem or f"{setup.workload.output_tokens / outcome.generation:,.0f} output tokens/s"
            say(f"{turn}/{repeat} {contender.name}: {rate}")
    return outcomes, ceilings


def _ceilings(setup: Setup) -> dict[str, float]:
    """The ceilings of this machine, measured now; none if it has no memory for that."""
    command = python("cbatch.model.ceilings", setup.device, setup.dtype, str(setup.num_threads))
    done = subprocess.run(command, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout) if done.returncode == 0 else {}
    return found


def _curves(outcomes: dict[str, list[Outcome]], summary: dict[str, dict[str, Any]]) -> plot.Curves:
    """The timeline of each schedule, from the run of median speed."""
    labels = {result.OURS: "continuous"} | {name: name for name in SCHEDULES if name in outcomes}
    curves = {}
    for name, label in labels.items():
        if summary[name]["valid"]:
            runs = sorted(outcomes[name], key=lambda outcome: outcome.generation)
            curves[label] = timeline(runs[len(runs) // 2])
    return curves
