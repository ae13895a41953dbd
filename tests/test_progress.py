from __future__ import annotations

import io
import json
import re
import sys
import time
from typing import Any

import pytest
from rich.console import Console

from cbatch.watch import progress, report
from cbatch.watch.progress import Progress, resolve_mode, say
from cbatch.watch.rates import Rates
from cbatch.watch.stats import RunStats


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def busy(**values: Any) -> RunStats:
    """The statistics of a run that has been going on for 50 seconds."""
    defaults: dict[str, Any] = {
        "started_at": time.perf_counter() - 50,
        "first_completion_at": time.perf_counter() - 45,
        "num_rows": 1_000,
        "num_rows_ok": 199,
        "num_rows_failed": 1,
        "num_steps": 900,
        "busy_seconds": 40.0,
        "num_prefill_tokens": 5_000,
        "num_decode_tokens": 9_000,
        "num_running": 17,
        "num_waiting": 3,
        "max_num_seqs": 32,
        "kv_cache_use": 0.47,
        "num_preemptions": 4,
        "num_cached_tokens": 1_234,
    }
    return RunStats(**{**defaults, **values})


STATES = {
    "starting": RunStats(),
    "busy": busy(),
    "no total": busy(num_rows=None),
    "nothing done yet": busy(num_rows_ok=0, num_rows_failed=0, first_completion_at=None),
    "no rows": busy(num_rows=0, num_rows_ok=0, num_rows_failed=0),
    "more done than counted": busy(num_rows=100),
    "only failures": busy(num_rows_ok=0, num_rows_failed=5, first_completion_at=None),
    "resumed": busy(num_rows_earlier=700),
    "huge": busy(num_rows=10**12, num_rows_ok=10**11, num_decode_tokens=10**12, num_running=10**6),
}


@pytest.mark.parametrize("state", STATES)
def test_a_plain_line_is_one_line_of_plain_text(state: str) -> None:
    shown = Progress(STATES[state], "plain")
    shown.doing = "loading"
    line = shown.line()
    assert line.isascii()
    assert line.isprintable()


def test_a_plain_line_says_how_far_the_run_is() -> None:
    line = Progress(busy(), "plain").line()
    for part in ("200/1,000 rows", "1 failed", "17 running", "KV 47%", "4 preemptions", "ETA 2 min 33 s"):
        assert part in line
    starting = Progress(RunStats(num_rows=5), "plain")
    starting.doing = "loading the tokenizer"
    assert starting.line().startswith("0/5 rows, loading the tokenizer (")
    assert "ETA" not in Progress(busy(num_rows=None), "plain").line()


@pytest.mark.parametrize("state", STATES)
def test_the_values_are_json(state: str) -> None:
    values = Progress(STATES[state], "json").state()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert values["eta_seconds"] is None or values["eta_seconds"] >= 0


def test_rows_of_earlier_runs_count_as_done_but_not_for_the_pace() -> None:
    values = Progress(busy(num_rows_earlier=700), "plain").state()
    assert values["rows_done"] == 900
    assert values["eta_seconds"] == pytest.approx((100 - 17 / 2) * 40 / (199 + 17 / 2))


@pytest.mark.parametrize("width", [1, 5, 20, 40, 80, 200])
@pytest.mark.parametrize("state", STATES)
def test_the_live_view_fits_any_width(state: str, width: int) -> None:
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    shown = Progress(STATES[state], "rich")
    shown.doing = "loading [model]"
    console.print(shown.panel())
    lines = console.export_text().splitlines()
    assert all(len(line) <= width for line in lines)
    if width >= 80 and state == "busy":
        text = "\n".join(lines)
        for part in ("200/1,000 rows", "20%", "ETA", "1 failed", "17 of 32", "47% used", "1,234 tokens", "preempted"):
            assert part in text


def test_text_in_brackets_is_no_markup() -> None:
    console = Console(record=True, width=100, file=io.StringIO())
    shown = Progress(RunStats(), "rich")
    shown.doing = "looking for models/[red]new"
    console.print(shown.panel())
    assert "models/[red]new" in console.export_text()


@pytest.mark.parametrize("mode", ["plain", "json", "none"])
def test_no_escape_and_no_return_where_there_is_no_terminal(
    mode: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.01)
    monkeypatch.setattr(progress, "_LATER_SECONDS", 0.01)
    text, deadline = "", time.monotonic() + (0.1 if mode == "none" else 10)
    with Progress(busy(), mode) as shown:
        shown.note("hello [bold]there[/]")
        while time.monotonic() < deadline and text.count("\n") < 3:
            time.sleep(0.02)
            text += capsys.readouterr().err
    text += capsys.readouterr().err
    assert not re.search(r"[\x1b\r]", text)
    if mode == "none":
        assert text == ""
    else:
        lines = text.splitlines()
        assert len(lines) > 2
        assert "hello [bold]there[/]" in lines[0]
    if mode == "json":
        assert [json.loads(line).get("rows_done", "note") for line in lines[:2]] == ["note", 200]


def test_plain_lines_come_at_a_bounded_rate(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(busy(), "plain"):
        time.sleep(0.05)
    assert capsys.readouterr().err == ""
    assert progress._LINE_SECONDS >= 5
    assert progress._LATER_SECONDS >= 30


def test_lines_come_as_often_as_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    text, deadline = "", time.monotonic() + 10
    with Progress(busy(), "json", interval=0.01):
        while time.monotonic() < deadline and text.count("\n") < 2:
            time.sleep(0.01)
            text += capsys.readouterr().err
    assert json.loads(text.splitlines()[1])["steps"] == 900


def test_nothing_comes_after_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    stats = busy()
    with Progress(stats, "json", interval=0.01) as shown:
        shown.end(report.summary(stats, True), "out")
        time.sleep(0.1)
    assert json.loads(capsys.readouterr().err.splitlines()[-1])["finished"]


def test_the_live_view_starts_and_ends_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Progress(busy(), "rich") as shown:
        shown.note("a note [red]")
        time.sleep(0.05)
    assert "a note [red]" in terminal.getvalue()


@pytest.mark.parametrize(
    ("stream", "term", "mode"),
    [
        (Terminal(), "xterm-256color", "rich"),
        (Terminal(), "dumb", "plain"),
        (Terminal(), "", "plain"),
        (Terminal(), None, "plain"),
        (io.StringIO(), "xterm", "plain"),
        (None, "xterm", "plain"),
    ],
)
def test_auto_is_live_only_on_a_capable_terminal(
    stream: Any, term: str | None, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.delenv("TERM", raising=False)
    if term is not None:
        monkeypatch.setenv("TERM", term)
    assert resolve_mode("auto") == mode
    for explicit in ("rich", "plain", "json", "none"):
        assert resolve_mode(explicit) == explicit


class Broken(io.StringIO):
    def write(self, _text: str) -> int:
        raise BrokenPipeError


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("make", [Broken, closed, lambda: None], ids=["broken", "closed", "none"])
def test_without_a_standard_error_nothing_is_said_and_nothing_breaks(
    make: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", make())
    for _ in range(3):
        say("hello")
    assert capsys.readouterr().out == ""


def test_rates_look_at_the_last_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("cbatch.watch.rates.time.perf_counter", lambda: now[0])
    stats = RunStats(started_at=0.0)
    rates = Rates(stats)
    for second in range(60):
        now[0] = float(second)
        stats.num_decode_tokens += 100 if second < 30 else 7
        stats.num_prefill_tokens += 40
        rates.update()
    assert rates.decode == pytest.approx(7)
    assert rates.prefill == pytest.approx(40)
    assert len(rates._marks) < 15
