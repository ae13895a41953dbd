"""The figures of a run: as data for summary.json, and as the text that ends a run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cbatch.watch.stats import Histogram, RunStats


def summary(stats: RunStats, finished: bool, **ceilings: float) -> dict[str, Any]:
    """Plain data; seconds, tokens and shares. Rates are over generation.

    `ceilings`: those of `model/ceilings.py`, if they could be measured.
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
    """The summary for people, a few lines."""
    rows, tokens, seconds = figures["rows"], figures["tokens"], figures["seconds"]
    parts = [f"{rows['ok']:,} completed", f"{rows['failed']:,} failed"]
    if rows["done_earlier"]:
        failed = f" ({rows['failed_earlier']:,} of them failed)" if rows["failed_earlier"] else ""
        parts.append(f"{rows['done_earlier']:,} done earlier{failed}")
    if rows["errors"]:
        parts[1] += " (" + ", ".join(f"{count:,} {kind}" for kind, count in sorted(rows["errors"].items())) + ")"
    lines = [
        f"{'Done' if figures['finished'] else 'Interrupted'}: {', '.join(parts)} in {duration(seconds['wall'])}. Output: {output}"
    ]
    if figures["steps"]:
        rate = figures["completion_tokens_per_second"] or 0
        cut = rows["length_limited"] / rows["ok"] if rows["ok"] else 0
        lines += [
            f"Tokens      {tokens['prompt']:,} prompt ({tokens['prefix_cache_hits']:,} from the prefix cache), "
            f"{tokens['completion']:,} completion; {rate:,.0f} completion tokens/s; "
            f"{cut:.0%} of rows ended by --max-tokens or the context",
            f"Latency     first token {_spread(figures['time_to_first_token'])}; "
            f"between tokens {_spread(figures['inter_token_latency'])}",
            f"Batch       {figures['mean_batch_occupancy']:.1f} sequences on average, {figures['preemptions']:,} preemptions"
            + (f"; MBU {figures['mbu']:.0%}, MFU {figures['mfu']:.0%}" if figures["mbu"] is not None else ""),
        ]
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """3.2 s, 4 min 05 s, 3 h 07 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _percentiles(histogram: Histogram) -> dict[str, float | None]:
    return {f"p{share}": histogram.percentile(share / 100) for share in (50, 90, 99)}


def _spread(percentiles: dict[str, float | None]) -> str:
    known = [f"{name} {_milliseconds(value)}" for name, value in percentiles.items() if value is not None]
    return ", ".join(known) or "-"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None
