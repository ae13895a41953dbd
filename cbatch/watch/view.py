"""The state of a run while it goes on: as data, as a line of text, and as a panel on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cbatch.watch.rates import Rates
from cbatch.watch.report import duration
from cbatch.watch.stats import RunStats

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def state(stats: RunStats, rates: Rates) -> dict[str, Any]:
    """Plain data, as `--progress json` prints it; seconds, tokens and shares."""
    num_done = stats.num_rows_earlier + stats.num_rows_done
    return {
        "rows_done": num_done,
        "rows_total": stats.num_rows,
        "rows_failed": stats.num_rows_failed,
        "eta_seconds": rates.eta(num_done),
        "prefill_tokens_per_second": rates.prefill,
        "decode_tokens_per_second": rates.decode,
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "kv_cache_use": stats.kv_cache_use,
        "prefix_cache_hit_tokens": stats.num_cached_tokens,
        "preemptions": stats.num_preemptions,
        "generated_tokens": stats.num_generated_tokens,
        "steps": stats.num_steps,
        "occupancy": stats.occupancy,
        "to_first_step": stats.to_first_step,
        "seconds": stats.seconds,
    }


def line(now: dict[str, Any], doing: str) -> str:
    """The state on one line. `doing`: what the run is busy with before its first step."""
    total = f"/{now['rows_total']:,}" if now["rows_total"] is not None else ""
    rows = f"{now['rows_done']:,}{total} rows"
    if not now["steps"]:
        return f"{rows}, {doing} ({duration(now['seconds'])})"
    eta = f", ETA {duration(now['eta_seconds'])}" if now["eta_seconds"] is not None else ""
    return (
        f"{rows}, {now['rows_failed']:,} failed, "
        f"{now['prefill_tokens_per_second']:,.0f} prefill and {now['decode_tokens_per_second']:,.0f} decode tokens/s, "
        f"{now['running']} running, KV {now['kv_cache_use']:.0%}, {now['preemptions']:,} preemptions{eta}"
    )


def panel(now: dict[str, Any], doing: str, max_num_seqs: int) -> RenderableType:
    """The state as a few lines for rich. `doing`: what the run is busy with before its first step."""
    from rich.console import Group
    from rich.text import Text

    if now["steps"]:
        return Group(_rows_bar(now), _figures(now, max_num_seqs))
    return Group(_rows_bar(now), Text(f"{doing} ... {duration(now['seconds'])}", style="dim"))


def _rows_bar(now: dict[str, Any]) -> Table:
    """Rows done, a bar, the time left, and rows failed; on one line."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    done, total = now["rows_done"], now["rows_total"]
    share = f" {done / total:4.0%}" if total else ""
    eta = f"  ETA {duration(now['eta_seconds'])}" if now["eta_seconds"] is not None else ""
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        Text(f"{done:,}/{total:,} rows" if total is not None else f"{done:,} rows", style="bold"),
        ProgressBar(total=total or None, completed=done, width=30, pulse=not total),
        Text(share + eta),
        Text(f"{now['rows_failed']:,} failed", style="red" if now["rows_failed"] else "dim"),
    )
    return bar


def _figures(now: dict[str, Any], max_num_seqs: int) -> Table:
    """Three columns of names and figures: speed, sequences, KV cache."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True)
    table.add_row(
        "decode", f"{now['decode_tokens_per_second']:,.0f} tok/s",
        "running", f"{now['running']:,} of {max_num_seqs:,}",
        "KV cache", f"{now['kv_cache_use']:.0%} used",
    )  # fmt: skip
    table.add_row(
        "prefill", f"{now['prefill_tokens_per_second']:,.0f} tok/s",
        "waiting", f"{now['waiting']:,}",
        "prefix hits", f"{now['prefix_cache_hit_tokens']:,} tokens",
    )  # fmt: skip
    table.add_row("elapsed", duration(now["seconds"]), "preempted", f"{now['preemptions']:,}", "", "")
    return table
