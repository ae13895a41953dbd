"""Runs of several contenders -> medians, ratios and the table that is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from cbatch.bench.contender import Outcome
from cbatch.bench.workload import Workload

OURS = "cbatch"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.1f}"


def _gib(value: float) -> str:
    return f"{value / 1024**3:.2f}"


_ROWS: dict[str, tuple[str, Callable[[float], str]]] = {  # measure -> how the table shows it
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
    """The least time the workload can take here: its matrix products, and one reading of keys and values a token."""
    work = workload.work
    flops = work.computed * cost["flops_per_token"] + work.sampled * cost["flops_per_sampled"]
    read = work.read * cost["kv_bytes_per_token"]
    return flops / ceilings["flops"] + read / ceilings["block_bytes_per_second"]


def measures(outcome: Outcome, workload: Workload, ceilings: Mapping[str, float], least: float) -> dict[str, Any]:
    """What is known of one run; None for what the contender does not tell. `least`: `roofline_seconds`, or 0."""
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
    cost = next((one.figures["cost"] for one in outcomes[OURS] if not one.problem), None)
    least = roofline_seconds(workload, cost, ceilings) if cost and ceilings else 0.0
    result: dict[str, dict[str, Any]] = {}
    for name, several in outcomes.items():
        problem = next((one.problem for one in several if one.problem), "")
        runs = [measures(one, workload, ceilings, least) for one in several if not one.problem]
        result[name] = {
            "valid": not problem,
            "problem": problem,
            "version": several[-1].figures.get("version"),
            "median": {} if problem else medians(runs),
            "runs": runs,
        }
    ours = result[OURS]["median"].get("output_tokens_per_second")
    for one in result.values():
        if ours and one["valid"]:
            one["median"]["speedup_of_cbatch"] = ours / one["median"]["output_tokens_per_second"]
    return result


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of each measure over the runs that have it."""
    result = {}
    for name in runs[0]:
        known = [run[name] for run in runs if run[name] is not None]
        result[name] = median(known) if known else None
    return result


def table(contenders: Mapping[str, Mapping[str, Any]]) -> str:
    """One column for each contender, one line for each measure."""
    lines = [["", *contenders]]
    for name, (label, shown) in _ROWS.items():
        values = [one["median"].get(name) for one in contenders.values()]
        lines.append([label, *("-" if value is None else shown(value) for value in values)])
    lines.append(["valid", *("yes" if one["valid"] else "INVALID" for one in contenders.values())])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        f"{line[0]:<{widths[0]}}  "
        + "  ".join(f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))
        for line in lines
    )


def notes(contenders: Mapping[str, Mapping[str, Any]], ceilings: Mapping[str, float]) -> list[str]:
    """What belongs below the table: why a contender is invalid, and what the machine can do."""
    lines = [f"{name} is invalid: {one['problem']}" for name, one in contenders.items() if one["problem"]]
    if ceilings:
        lines.append(
            f"This machine reads {ceilings['bytes_per_second'] / 1e9:.1f} GB/s in order and "
            f"{ceilings['block_bytes_per_second'] / 1e9:.1f} GB/s in random blocks of 16 KiB, and multiplies "
            f"{ceilings['flops'] / 1e9:,.0f} GFLOP/s."
        )
    return lines
