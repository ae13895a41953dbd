"""Shows a run while it goes on: a live panel on a terminal, plain or JSON lines elsewhere. Always on stderr."""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from cbatch.watch import report, view
from cbatch.watch.rates import Rates
from cbatch.watch.stats import RunStats

if TYPE_CHECKING:
    from rich.console import RenderableType

# Seconds between lines: in the first minute, and after it.
_LINE_SECONDS, _LATER_SECONDS = 10.0, 60.0


class Progress:
    """Shows the statistics of a run as long as it is open. A thread of its own reads them.

    `mode`: rich (a panel), plain, json or none. `interval`: seconds between lines; by default fewer lines after a
    minute.
    """

    def __init__(self, stats: RunStats, mode: str, interval: float | None = None) -> None:
        self.stats, self.mode, self.interval = stats, mode, interval
        self.doing = ""  # what the run is busy with before its first step
        self._rates = Rates(stats)
        self._stop = threading.Event()
        self._live: Any = None  # the panel, in mode rich
        self._thread: threading.Thread | None = None  # prints lines, in the modes plain and json

    def __enter__(self) -> Progress:
        if self.mode == "rich":
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                get_renderable=self.panel, console=Console(stderr=True), refresh_per_second=4, transient=True
            )
            self._live.start()
        elif self.mode in ("plain", "json"):
            self._thread = threading.Thread(target=self._print_lines, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_lines()
        if self._live:
            self._live.stop()

    def note(self, text: str) -> None:
        """Print a line, above the panel if there is one; nothing in mode none."""
        if self.mode == "json":
            say(json.dumps({"note": text}))
        elif self._live:
            from rich.text import Text

            self._live.console.print(Text(text), soft_wrap=True)
        elif self.mode != "none":
            say(text)

    def abandon(self) -> None:
        """Leave the terminal as it was, in a process that is about to end at once."""
        if self._live:
            say("\N{ESCAPE}[?25h")  # shows the cursor

    def end(self, figures: dict[str, Any], output: str) -> None:
        """Print how the run ended, from `report.summary`; in mode none only if something is wrong."""
        self._stop_lines()
        text = report.text(figures, output)
        if self.mode == "json":
            say(json.dumps(figures))
        elif self.mode != "none":
            self.note(text)
        elif figures["rows"]["failed"] or not figures["finished"]:
            say("cbatch: " + text.splitlines()[0])

    def state(self) -> dict[str, Any]:
        """The state of the run as plain data."""
        return view.state(self.stats, self._rates)

    def line(self) -> str:
        """The state of the run on one line."""
        return view.line(self.state(), self.doing)

    def panel(self) -> RenderableType:
        """The state of the run for rich, with new rates."""
        self._rates.update()
        return view.panel(self.state(), self.doing, self.stats.max_num_seqs)

    def _print_lines(self) -> None:
        while not self._stop.wait(self.interval or (_LINE_SECONDS if self.stats.seconds < 60 else _LATER_SECONDS)):
            self._rates.update()
            say(self.line() if self.mode == "plain" else json.dumps(self.state()))

    def _stop_lines(self) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()


def resolve_mode(mode: str) -> str:
    """The mode that `auto` stands for: rich on a terminal that can move its cursor, else plain."""
    if mode != "auto":
        return mode
    capable = os.environ.get("TERM", "dumb") not in ("", "dumb")
    return "rich" if sys.stderr is not None and sys.stderr.isatty() and capable else "plain"


def say(text: str) -> None:
    """Print a line on stderr. A stderr that is closed or broken never ends a run."""
    if sys.stderr is None:  # print would take stdout instead
        return
    try:
        print(text + "\n", end="", file=sys.stderr, flush=True)  # one write, between which no other thread comes
    except (OSError, ValueError):  # nobody reads it any more
        sys.stderr = None
