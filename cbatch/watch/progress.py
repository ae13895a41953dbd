"""What a run shows while it goes on: a live view on a terminal, plain or JSON lines elsewhere. Always on stderr."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from cbatch.watch import report
from cbatch.watch.report import duration
from cbatch.watch.stats import RunStats

if TYPE_CHECKING:
    from rich.console import RenderableType

_LINE_SECONDS, _LATER_SECONDS = 10.0, 60.0  # between lines: in the first minute, after it


class Progress:
    """Reads `stats` from a thread of its own while it is open.

    `mode`: rich, plain, json or none. `interval`: seconds between lines; by default fewer lines after a minute.
    """

    def __init__(self, stats: RunStats, mode: str, interval: float | None = None) -> None:
        self.stats, self.mode, self.interval = stats, mode, interval
        self.doing = ""  # what the run is busy with before the first step
        self._rates = Rates(stats)
        self._stop = threading.Event()
        self._live: Any = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if self.mode == "rich":
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                get_renderable=self._view, console=Console(stderr=True), refresh_per_second=4, transient=True
            )
            self._live.start()
        elif self.mode in ("plain", "json"):
            self._thread = threading.Thread(target=self._lines, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_lines()
        if self._live:
            self._live.stop()

    def note(self, text: str) -> None:
        """Say something above the view; nothing in mode none."""
        if self.mode == "json":
            say(json.dumps({"note": text}))
        elif self._live:
            from rich.text import Text

            self._live.console.print(Text(text), soft_wrap=True)
        elif self.mode != "none":
            say(text)

    def abandon(self) -> None:
        """The process ends at once: leave the terminal as it was."""
        if self._live:
            say("\N{ESCAPE}[?25h")  # the cursor

    def end(self, figures: dict[str, Any], output: str) -> None:
        """Say how the run ended (`report.summary`); in mode none only if something is wrong."""
        self._stop_lines()
        text = report.text(figures, output)
        if self.mode == "json":
            say(json.dumps(figures))
        elif self.mode != "none":
            self.note(text)
        elif figures["rows"]["failed"] or not figures["finished"]:
            say("cbatch: " + text.splitlines()[0])

    def _stop_lines(self) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()

    def _lines(self) -> None:
        while not self._stop.wait(self.interval or (_LINE_SECONDS if self.stats.seconds < 60 else _LATER_SECONDS)):
            self._rates.update()
            say(self.line() if self.mode == "plain" else json.dumps(self.values()))

    def values(self) -> dict[str, Any]:
        """The state of the run as plain data."""
        s, rates = self.stats, self._rates
        done = s.num_rows_earlier + s.num_rows_done
        return {
            "rows_done": done,
            "rows_total": s.num_rows,
            "rows_failed": s.num_rows_failed,
            "eta_seconds": rates.eta(done),
            "prefill_tokens_per_second": rates.prefill,
            "decode_tokens_per_second": rates.decode,
            "running": s.num_running,
            "waiting": s.num_waiting,
            "kv_cache_use": s.kv_cache_use,
            "prefix_cache_hit_tokens": s.num_cached_tokens,
            "preemptions": s.num_preemptions,
            "generated_tokens": s.num_generated_tokens,
            "steps": s.num_steps,
            "occupancy": s.occupancy,
            "to_first_step": s.to_first_step,
            "seconds": s.seconds,
        }

    def line(self) -> str:
        v = self.values()
        total = f"/{v['rows_total']:,}" if v["rows_total"] is not None else ""
        eta = f", ETA {duration(v['eta_seconds'])}" if v["eta_seconds"] is not None else ""
        if not self.stats.num_steps:
            return f"{v['rows_done']:,}{total} rows, {self.doing} ({duration(v['seconds'])})"
        return (
            f"{v['rows_done']:,}{total} rows, {v['rows_failed']:,} failed, "
            f"{v['prefill_tokens_per_second']:,.0f} prefill and {v['decode_tokens_per_second']:,.0f} decode tokens/s, "
            f"{v['running']} running, KV {v['kv_cache_use']:.0%}, {v['preemptions']:,} preemptions{eta}"
        )

    def _view(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        self._rates.update()
        v = self.values()
        total, done = v["rows_total"], v["rows_done"]
        share = f" {done / total:4.0%}" if total else ""
        head = Table.grid(padding=(0, 1))
        head.add_row(
            Text(f"{done:,}/{total:,} rows" if total is not None else f"{done:,} rows", style="bold"),
            ProgressBar(total=total or None, completed=done, width=30, pulse=not total),
            Text(share + (f"  ETA {duration(v['eta_seconds'])}" if v["eta_seconds"] is not None else "")),
            Text(f"{v['rows_failed']:,} failed", style="red" if v["rows_failed"] else "dim"),
        )
        if not self.stats.num_steps:
            return Group(head, Text(f"{self.doing} ... {duration(v['seconds'])}", style="dim"))
        body = Table.grid(padding=(0, 2))
        for _ in range(3):
            body.add_column(style="dim", no_wrap=True)
            body.add_column(no_wrap=True)
        body.add_row(
            "decode", f"{v['decode_tokens_per_second']:,.0f} tok/s",
            "running", f"{v['running']:,} of {self.stats.max_num_seqs:,}",
            "KV cache", f"{v['kv_cache_use']:.0%} used",
        )  # fmt: skip
        body.add_row(
            "prefill", f"{v['prefill_tokens_per_second']:,.0f} tok/s",
            "waiting", f"{v['waiting']:,}",
            "prefix hits", f"{v['prefix_cache_hit_tokens']:,} tokens",
        )  # fmt: skip
        body.add_row("elapsed", duration(v["seconds"]), "preempted", f"{v['preemptions']:,}", "", "")
        return Group(head, body)


class Rates:
    """Tokens and rows a second over the last while."""

    _WINDOW = 10.0  # seconds

    def __init__(self, stats: RunStats) -> None:
        self._stats = stats
        self._marks: list[tuple[float, int, int]] = []
        self.prefill = self.decode = 0.0

    def update(self) -> None:
        s, now = self._stats, time.perf_counter()
        self._marks.append((now, s.num_prefill_tokens, s.num_decode_tokens))
        while len(self._marks) > 2 and now - self._marks[1][0] >= self._WINDOW:
            self._marks.pop(0)
        then, prefill, decode = self._marks[0]
        if now > then:
            self.prefill = (s.num_prefill_tokens - prefill) / (now - then)
            self.decode = (s.num_decode_tokens - decode) / (now - then)

    def eta(self, done: int) -> float | None:
        """Seconds left, at the pace of this run's steps so far; a running row counts as half done."""
        s = self._stats
        if s.num_rows is None or not s.num_rows_ok:
            return None
        return max(0, s.num_rows - done - s.num_running / 2) * s.model_seconds / (s.num_rows_ok + s.num_running / 2)


def resolve_mode(mode: str) -> str:
    """auto -> rich on a terminal that can move its cursor, else plain."""
    if mode != "auto":
        return mode
    capable = os.environ.get("TERM", "dumb") not in ("", "dumb")
    return "rich" if sys.stderr is not None and sys.stderr.isatty() and capable else "plain"


def say(text: str) -> None:
    """A line on stderr; a closed stderr never ends a run."""
    if sys.stderr is None:  # print would take stdout instead
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):  # nobody is there to be told
        sys.stderr = None
