"""`cbatch bench`: how fast cbatch is on this machine, beside other schedules and other engines.

Each contender runs in a process of its own, one after the other and never two at once; A B C, A B C, ..., so that a
machine that becomes slower or faster meanwhile does so for all of them. What is shown are medians.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cbatch import __version__
from cbatch.bench import contender, plot, result
from cbatch.bench.contender import Contender, Outcome
from cbatch.bench.peers import Peers, Skipped, interpreters
from cbatch.bench.timeline import timeline
from cbatch.bench.workload import Workload, make, read_file
from cbatch.config import SCHEDULES, BenchConfig, EngineConfig
from cbatch.errors import KILLED, OK, SOME_FAILED, UsageError
from cbatch.watch.progress import say

_ROWS = 256
_GENERATED = ("ragged", "fixed", "prefix")


def bench(config: BenchConfig, engine: EngineConfig) -> int:
    """Measure, print a table, and write the files that were asked for; SOME_FAILED if a contender failed."""
    from cbatch.model.ceilings import device_name
    from cbatch.model.loader import locate, parallelism, resolve_device, resolve_dtype

    # So that the contender that runs is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(KILLED + signal.SIGTERM))
    if config.plot:
        plot.check(config.plot)
    for file in filter(None, (config.json, config.plot)):
        _make_room(Path(file))
    if engine.scheduling != "continuous":
        raise UsageError("--scheduling: name the schedules to compare with in --compare")
    if engine.data_parallel_size != "1":
        raise UsageError("--data-parallel-size: what is compared here runs in one engine")
    pythons = interpreters(config.python)
    device, threads, files = resolve_device(engine.device), parallelism(engine.threads), locate(engine.model)
    files.check()
    dtype = str(resolve_dtype(engine.dtype, device, files.config)).removeprefix("torch.")
    if config.workload in _GENERATED:
        workload = make(config.workload, config.rows or _ROWS, files.tokenizer, files.context)
    else:
        workload = read_file(config.workload, config.rows, files.context)
    settings = {
        "model": str(files.path),
        "dtype": dtype,
        "device": device,
        "threads": threads,
        "cpus": sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_getaffinity") else [],
        "longest": workload.longest,
        "prefix_caching": engine.enable_prefix_caching,
    }
    with tempfile.TemporaryDirectory(prefix="cbatch-bench-") as scratch:
        path = Path(scratch) / f"{Path(workload.name).stem}.jsonl"
        path.write_text(workload.lines(), encoding="utf-8")
        contenders, skipped = [contender.schedule(result.OURS, engine, "continuous", path)], {}
        peers = Peers(files, path, settings, pythons, config.openvino_model)
        for name in config.compared:
            try:
                contenders.append(
                    contender.schedule(name, engine, name, path) if name in SCHEDULES else peers.contender(name)
                )
            except Skipped as reason:
                skipped[name] = str(reason)
                say(str(reason))
        say(f"{workload.name}: {len(workload.items):,} rows, {workload.prompt_tokens:,} prompt and "
            f"{workload.output_tokens:,} output tokens; {dtype} on {device}, {threads} threads")  # fmt: skip
        outcomes, ceilings = _rounds(contenders, workload, config.repeat, [device, dtype, str(threads)])
    measured = result.summarize(outcomes, workload, ceilings)
    curves = _curves(outcomes, measured)
    print("\n".join(["", result.table(measured), "", *result.notes(measured, ceilings)]), flush=True)
    if config.json:
        found = {
            "cbatch": __version__,
            "workload": workload.about(),
            "machine": {"name": device_name(device), "platform": platform.platform()} | settings,
            "versions": {name: version(name) for name in ("torch", "transformers")},
            "engine": asdict(engine),
            "ceilings": ceilings,
            "contenders": measured,
            "skipped": skipped,
            "timelines": {name: [asdict(piece) for piece in pieces] for name, pieces in curves.items()},
        }
        Path(config.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if config.plot:
        title = f"{files.path.name}, workload {Path(workload.name).name}"
        Path(config.plot).write_text(plot.page(curves, title), encoding="utf-8")
    return OK if all(one["valid"] for one in measured.values()) else SOME_FAILED


def _make_room(path: Path) -> None:
    """UsageError if this file can't be written, before anything is measured."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise UsageError(f"{path}: can't be written: {error.strerror}") from None


def _rounds(
    contenders: list[Contender], workload: Workload, repeat: int, machine: list[str]
) -> tuple[dict[str, list[Outcome]], dict[str, float]]:
    """Run all of them in turn, `repeat` times, and measure the machine before each turn; its best counts."""
    outcomes: dict[str, list[Outcome]] = {one.name: [] for one in contenders}
    ceilings: dict[str, float] = {}
    for number in range(1, repeat + 1):
        found = _ceilings(machine)
        ceilings = {name: max(value, ceilings.get(name, 0.0)) for name, value in found.items()}
        for one in contenders:
            if any(outcome.problem for outcome in outcomes[one.name]):
                continue  # it won't become valid any more
            outcome = contender.run(one, workload)
            outcomes[one.name].append(outcome)
            rate = outcome.problem or f"{workload.output_tokens / outcome.generation:,.0f} output tokens/s"
            say(f"{number}/{repeat} {one.name}: {rate}")
    return outcomes, ceilings


def _ceilings(machine: list[str]) -> dict[str, float]:
    """The ceilings of this machine, measured now; none if it has no memory for that."""
    done = subprocess.run([sys.executable, "-m", "cbatch.model.ceilings", *machine], capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout) if done.returncode == 0 else {}
    return found


def _curves(outcomes: dict[str, list[Outcome]], measured: dict[str, dict[str, Any]]) -> plot.Curves:
    """For each schedule the run in the middle."""
    names = {result.OURS: "continuous"} | {name: name for name in SCHEDULES if name in outcomes}
    valid = {name: sorted(outcomes[name], key=lambda one: one.generation) for name in names if measured[name]["valid"]}
    return {names[name]: timeline(several[len(several) // 2]) for name, several in valid.items()}
