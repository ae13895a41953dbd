from __future__ import annotations

import json
import time

import pytest

from cbatch.errors import RowError
from cbatch.rows.request import Completion, Output, Row
from cbatch.watch import report
from cbatch.watch.stats import RunStats


def stats_of_a_run() -> RunStats:
    stats = RunStats(started_at=time.perf_counter() - 100, num_rows=12, num_rows_earlier=2)
    for number in range(10):
        row = Row("prompts", number, "row", {}, 1)
        if number < 2:
            stats.finished(Completion.failed(row, RowError("empty_prompt", "no tokens")))
        else:
            reason = "length" if number < 4 else "stop"
            stats.finished(Completion(row, (Output("text", (1,) * 50, reason),), num_prompt_tokens=100))
    stats.num_steps, stats.occupancy, stats.num_preemptions, stats.busy_seconds = 100, 450, 3, 70.0
    stats.first_step_at, stats.last_completion_at = stats.started_at + 10, stats.started_at + 90
    stats.kv_cache_use_sum, stats.kv_cache_use_most = 40.0, 0.9
    stats.num_prefill_tokens, stats.num_decode_tokens, stats.num_cached_tokens = 700, 392, 100
    stats.bytes, stats.flops = 8 * 10**11, 4 * 10**12
    for seconds in (0.1, 0.2, 3.0):
        stats.ttft.add(seconds)
        stats.inter_token.add(seconds / 10)
    return stats


def test_the_figures_add_up() -> None:
    figures = report.summary(stats_of_a_run(), True, bytes_per_second=2e10, flops=1e12)
    rows, tokens = figures["rows"], figures["tokens"]
    assert rows["total"] == rows["done_earlier"] + rows["ok"] + rows["failed"]
    assert sum(rows["errors"].values()) == rows["failed"] == 2
    assert (tokens["prompt"], tokens["completion"], tokens["prefix_cache_hits"]) == (800, 400, 100)
    assert figures["completion_tokens_per_second"] == pytest.approx(400 / 80)
    assert figures["total_tokens_per_second"] == pytest.approx(1200 / 80)
    assert figures["mean_batch_occupancy"] == 4.5
    assert figures["kv_cache_use"] == {"mean": 0.4, "most": 0.9}
    assert figures["seconds"]["generation"] == pytest.approx(80)
    assert figures["seconds"]["model"] == 70
    assert figures["mbu"] == pytest.approx(8e11 / 80 / 2e10)
    assert figures["mfu"] == pytest.approx(4e12 / 80 / 1e12)
    assert figures["seconds"]["wall"] == pytest.approx(100, abs=5)
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures


def test_the_text_says_what_matters() -> None:
    text = report.text(report.summary(stats_of_a_run(), True, bytes_per_second=2e10, flops=1e12), "out")
    for part in (
        "Done: 8 completed, 2 failed (2 empty_prompt), 2 done earlier",
        "800 prompt (100 from the prefix cache), 400 completion; 5 completion tokens/s; 25% of rows ended",
        "4.5 sequences on average, 3 preemptions; MBU 50%, MFU 5%",
        "first token p50 2",
    ):
        assert part in text
    assert "\x1b" not in text


def test_a_run_without_ceilings_claims_no_utilisation() -> None:
    figures = report.summary(stats_of_a_run(), False)
    assert figures["mbu"] is figures["mfu"] is None
    assert report.text(figures, "out").startswith("Interrupted: ")
    assert "MBU" not in report.text(figures, "out")


def test_a_run_with_nothing_to_do_has_a_summary_too() -> None:
    figures = report.summary(RunStats(num_rows=0), True, bytes_per_second=1.0, flops=1.0)
    json.dumps(figures, allow_nan=False)
    assert figures["time_to_first_token"] == {"p50": None, "p90": None, "p99": None}
    assert report.text(figures, "out").startswith("Done: 0 completed, 0 failed in 0.0 s. Output: out")
    assert "\n" not in report.text(figures, "out")


def test_a_run_of_nothing_but_failures_has_a_summary_too() -> None:
    stats = RunStats(num_rows=1, num_steps=1, occupancy=1, busy_seconds=0.1)
    stats.finished(Completion.failed(Row("prompts", 0, "row", {}, 1), RowError("invalid_logits", "no")))
    assert "1 failed (1 invalid_logits)" in report.text(report.summary(stats, True), "out")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (3.21, "3.2 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (60, "1 min 00 s"),
        (245.4, "4 min 05 s"),
        (3599.7, "1 h 00 min"),
        (11_220, "3 h 07 min"),
        (360_000, "100 h 00 min"),
    ],
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert report.duration(seconds) == text
