"""The figures of a run that has ended: as data for summary.json, and as a text of a few lines."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cbatch.rows import remarks
from cbatch.watch.stats import Histogram, RunStats


def summary(stats: RunStats, finished: bool, **ceilings: float) -> dict[str, Any]:
    """Plain data; seconds, tokens and shares. Rates are over the time from the first step to the last completion.

    `ceilings`: the fields of `model.ceilings.Ceilings`, if they could be measured; without them no MBU and MFU.
    """
    seconds, busy, generation = stats.seconds, stats.model_seconds, stats.generation_seconds
    first = stats.first_completion_at
    return {
        "finished": finished,
        "rows": {
            "total": stats.num_rows,
            "done_earlier": stats.num_rows_earlier,
            "failed_earlier": stats.num_rows_earlier_failed,
            "ok": stats.num_rows_ok,
            "failed": stats.num_rows_failed,
            "length_limited": stats.num_rows_length,
            "errors": dict(stats.errors),
            "remarks": dict(stats.remarks),
        },
        "tokens": {
            "prompt": stats.num_prompt_tokens,
            "completion": stats.num_completion_tokens,
            "prefix_cache_hits": stats.num_cached_tokens,
            "computed_prefill": stats.num_prefill_tokens,
            "computed_decode": stats.num_decode_tokens,
        },
        "seconds": {
            "wall": seconds,
            "to_first_step": stats.to_first_step,
            "generation": generation,
            "model": busy,
            "to_first_completion": first and first - stats.started_at,
        },
        "completion_tokens_per_second": _ratio(stats.num_completion_tokens, generation),
        "total_tokens_per_second": _ratio(stats.num_completion_tokens + stats.num_prompt_tokens, generation),
        "time_to_first_token": _percentiles(stats.ttft),
        "inter_token_latency": _percentiles(stats.inter_token),
        "engines": stats.num_replicas,
        "steps": stats.num_steps,
        "mean_batch_occupancy": _ratio(stats.occupancy, stats.num_steps),
        "kv_cache_use": {"mean": _ratio(stats.kv_cache_use_sum, stats.num_steps), "most": stats.kv_cache_use_most},
        "preemptions": stats.num_preemptions,
        "mbu": _ratio(stats.bytes, generation * ceilings.get("bytes_per_second", 0)),
        "mfu": _ratio(stats.flops, generation * ceilings.get("flops", 0)),
        "work": {"bytes": stats.bytes, "flops": stats.flops},
        "cost": asdict(stats.cost),
    }


def text(figures: dict[str, Any], output: str) -> str:
    """The figures of `summary` for people. `output`: where the records are."""
    seconds = duration(figures["seconds"]["wall"])
    lines = [
        f"{'Done' if figures['finished'] else 'Interrupted'}: {_rows(figures['rows'])} in {seconds}. Output: {output}"
    ]
    if figures["rows"]["remarks"]:
        lines.append(f"Of these    {remarks.summary(figures['rows']['remarks'])}")
    if figures["steps"]:
        lines += [_tokens(figures), _latency(figures), _batch(figures)]
    return "\n".join(lines)


def _rows(rows: dict[str, Any]) -> str:
    parts = [f"{rows['ok']:,} completed", f"{rows['failed']:,} failed"]
    if rows["errors"]:
        parts[1] += " (" + ", ".join(f"{count:,} {kind}" for kind, count in sorted(rows["errors"].items())) + ")"
    if rows["done_earlier"]:
        failed = f" ({rows['failed_earlier']:,} of them failed)" if rows["failed_earlier"] else ""
        parts.append(f"{rows['done_earlier']:,} done earlier{failed}")
    return ", ".join(parts)


def _tokens(figures: dict[str, Any]) -> str:
    rows, tokens, rate = figures["rows"], figures["tokens"], figures["completion_tokens_per_second"] or 0
    return (
        f"Tokens      {tokens['prompt']:,} prompt ({tokens['prefix_cache_hits']:,} from the prefix cache), "
        f"{tokens['completion']:,} completion; {rate:,.0f} completion tokens/s; "
        f"{_ratio(rows['length_limited'], rows['ok']) or 0:.0%} of rows ended by --max-tokens or the context"
    )


def _latency(figures: dict[str, Any]) -> str:
    first, next_ones = _spread(figures["time_to_first_token"]), _spread(figures["inter_token_latency"])
    return f"Latency     first token {first}; between tokens {next_ones}"


def _batch(figures: dict[str, Any]) -> str:
    use = f"; MBU {figures['mbu']:.0%}, MFU {figures['mfu']:.0%}" if figures["mbu"] is not None else ""
    num_sequences, num_preemptions = figures["mean_batch_occupancy"], figures["preemptions"]
    return f"Batch       {num_sequences:.1f} sequences on average, {num_preemptions:,} preemptions{use}"


def duration(seconds: float) -> str:
    """Seconds for people: 3.2 s, 4 min 05 s, 3 h 07 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _percentiles(histogram: Histogram) -> dict[str, float | None]:
    """The 50th, 90th and 99th percentile in seconds, as p50, p90 and p99."""
    return {f"p{share}": histogram.percentile(share / 100) for share in (50, 90, 99)}


def _spread(percentiles: dict[str, float | None]) -> str:
    """Percentiles on one line, a dash if there are none."""
    known = [f"{name} {_milliseconds(value)}" for name, value in percentiles.items() if value is not None]
    return ", ".join(known) or "-"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _ratio(a: float, b: float) -> float | None:
    """`a / b`; None if `b` is 0."""
    return a / b if b else None
