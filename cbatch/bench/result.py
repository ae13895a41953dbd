"""Outcomes of several contenders -> medians, ratios and the table that is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from cbatch.bench.contender import Outcome
from cbatch.bench.workload import Workload

OURS = "cbatch"

_ANY_WIDTH = 10_000  # characters


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.1f}"


def _gib(value: float) -> str:
    return f"{value / 1024**3:.2f}"


_LINES: dict[str, tuple[str, Callable[[float], str]]] = {  # measure -> its label and format in the table
    "output_tokens_per_second": ("output tokens/s", _number),
    "total_tokens_per_second": ("total tokens/s", _number),
    "wall_seconds": ("wall time, s", _number),
    "first_completion_seconds": ("to first completion, s", _number),
    "peak_memory_bytes": ("peak memory, GiB", _gib),
    "mean_occupancy": ("sequences at once", _number),
    "kv_cache_use": ("KV cache in use", _percent),
    "mbu": ("MBU", _percent),
    "mfu": ("MFU", _percent),
    "roofline_share": ("share of the roofline", _percent),
    "speedup_of_cbatch": ("speed of cbatch / this", "{:.2f}".format),
}


def roofline_seconds(workload: Workload, cost: Mapping[str, int], ceilings: Mapping[str, float]) -> float:
    """The least time that a workload can take on this machine.

    That is the time of its matrix products, and of reading, for each token, the keys and values it attends to.
    """
    work = workload.work
    flops = work.computed * cost["flops_per_token"] + work.sampled * cost["flops_per_sampled"]
    read = work.read * cost["kv_bytes_per_token"]
    return flops / ceilings["flops"] + read / ceilings["block_bytes_per_second"]


def measures(outcome: Outcome, workload: Workload, ceilings: Mapping[str, float], least: float) -> dict[str, Any]:
    """The figures of one run; None where the contender does not tell. `least`: `roofline_seconds`, or 0 if unknown."""
    figures, seconds = outcome.figures, outcome.generation
    work = figures.get("work") or {}

    def utilisation(kind: str, ceiling: str) -> float | None:
        return work[kind] / seconds / ceilings[ceiling] if kind in work and ceiling in ceilings else None

    return {
        "output_tokens_per_second": workload.output_tokens / seconds,
        "total_tokens_per_second": (workload.output_tokens + workload.prompt_tokens) / seconds,
        "wall_seconds": outcome.wall,
        "first_completion_seconds": outcome.first,
        "generation_seconds": seconds,
        "peak_memory_bytes": outcome.peak_memory,
        "mean_occupancy": figures.get("mean_batch_occupancy"),
        "kv_cache_use": (figures.get("kv_cache_use") or {}).get("mean"),
        "mbu": utilisation("bytes", "bytes_per_second"),
        "mfu": utilisation("flops", "flops"),
        "roofline_share": least / seconds if least else None,
    }


def summarize(
    outcomes: Mapping[str, Sequence[Outcome]], workload: Workload, ceilings: Mapping[str, float]
) -> dict[str, dict[str, Any]]:
    """For each contender: whether it is valid, the median of every measure, and all its runs."""
    cost = next((outcome.figures["cost"] for outcome in outcomes[OURS] if not outcome.problem), None)
    least = roofline_seconds(workload, cost, ceilings) if cost and ceilings else 0.0
    summary: dict[str, dict[str, Any]] = {}
    for name, turns in outcomes.items():
        problem = next((outcome.problem for outcome in turns if outcome.problem), "")
        runs = [measures(outcome, workload, ceilings, least) for outcome in turns if not outcome.problem]
        summary[name] = {
            "valid": not problem,
            "problem": problem,
            "version": turns[-1].figures.get("version"),
            "median": {} if problem else medians(runs),
            "runs": runs,
        }
    ours = summary[OURS]["median"].get("output_tokens_per_second")
    for found in summary.values():
        if ours and found["valid"]:
            found["median"]["speedup_of_cbatch"] = ours / found["median"]["output_tokens_per_second"]
    return summary


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of each measure over the runs that have it."""
    found = {}
    for name in runs[0]:
        known = [run[name] for run in runs if run[name] is not None]
        found[name] = median(known) if known else None
    return found


def table(summary: Mapping[str, Mapping[str, Any]]) -> Table:
    """A column for each contender, a line for each measure."""
    table = Table("", box=None, pad_edge=False)
    for name in summary:
        table.add_column(name, justify="right", no_wrap=True)
    for measure, (label, shown) in _LINES.items():
        values = [found["median"].get(measure) for found in summary.values()]
        table.add_row(label, *("-" if value is None else shown(value) for value in values))
    table.add_row("valid", *("yes" if found["valid"] else "INVALID" for found in summary.values()))
    return table


def print_table(table: Table, console: Console) -> None:
    """Print a table with every figure whole: on a narrow terminal only labels wrap, in a file nothing does."""
    width = Measurement.get(console, console.options.update(max_width=_ANY_WIDTH), table)
    console.width = max(console.width, width.minimum) if console.is_terminal else width.maximum
    console.print(table, highlight=False)


def notes(summary: Mapping[str, Mapping[str, Any]], ceilings: Mapping[str, float]) -> list[str]:
    """The lines below the table: why a contender is invalid, and the ceilings of the machine."""
    lines = [f"{name} is invalid: {found['problem']}" for name, found in summary.items() if found["problem"]]
    if ceilings:
        lines.append(
            f"This machine reads {ceilings['bytes_per_second'] / 1e9:.1f} GB/s in order and "
            f"{ceilings['block_bytes_per_second'] / 1e9:.1f} GB/s in random blocks of 16 KiB, and multiplies "
            f"{ceilings['flops'] / 1e9:,.0f} GFLOP/s."
        )
    return lines
