from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.engine.block_pool import BlockPool
from cbatch.engine.engine import step_record
from cbatch.engine.scheduler import Scheduler, StaticScheduler
from cbatch.engine.sequence import Sequence
from cbatch.errors import RowError
from cbatch.rows.request import Completion, Output, Row
from cbatch.watch.stats import EngineStats, Histogram, ModelCost, RunStats
from tests.drive import make_request


def completion(number: int, output: Output, num_prompt_tokens: int = 0) -> Completion:
    return Completion(Row("prompts", number, "row", {}, 1), (output,), num_prompt_tokens)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(1e-5, 1e4), min_size=1, max_size=200), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_percentiles_agree_with_numpy_within_a_bucket(durations: list[float], share: float) -> None:
    histogram = Histogram()
    for seconds in durations:
        histogram.add(seconds)
    expected = np.quantile(durations, share, method="inverted_cdf")
    assert histogram.percentile(share) == pytest.approx(expected, rel=0.026)


def test_a_histogram_of_nothing_and_of_nothing_but_zero() -> None:
    histogram = Histogram()
    assert histogram.percentile(0.5) is None
    histogram.add(0.0)
    histogram.add(-1.0)
    assert histogram.percentile(0.5) == pytest.approx(1e-6, rel=0.03)


def test_a_histogram_does_not_grow_with_what_it_counts() -> None:
    histogram = Histogram()
    for seconds in np.random.default_rng(0).lognormal(-4, 1, 20_000):
        histogram.add(float(seconds))
    assert len(histogram._counts) < 300


def test_a_step_costs_what_its_shapes_say() -> None:
    scheduler = Scheduler(BlockPool(20, 4), max_num_batched_tokens=10, max_num_seqs=4, expected_share=0)
    stats = RunStats(cost=ModelCost(1000, 10, 100, 3, 7))
    sequences = [Sequence(make_request(n, [n + 1] * size), 50) for n, size in enumerate((3, 12))]
    for seq in sequences:
        scheduler.add(seq)
    stats.count_step(step_record(first := scheduler.schedule(), scheduler))
    assert [chunk.num_tokens for chunk in first.chunks] == [3, 7]
    assert stats.bytes == 1000 + (3 + 7) * 7
    assert stats.flops == 10 * 10 + 1 * 100 + (6 + 28) * 3
    assert (stats.num_steps, stats.occupancy, stats.num_prefill_tokens, stats.num_decode_tokens) == (1, 2, 10, 0)
    for chunk in first.chunks:
        chunk.seq.num_computed_tokens += chunk.num_tokens
    sequences[0].token_ids.append(9)
    stats.count_step(step_record(second := scheduler.schedule(), scheduler))
    assert [chunk.num_tokens for chunk in second.chunks] == [1, 5]
    assert stats.bytes == 2 * 1000 + (10 + 4 + 12) * 7
    assert stats.flops == 16 * 10 + 3 * 100 + (34 + 4 + 5 * 7 + 15) * 3
    assert (stats.num_steps, stats.occupancy, stats.num_prefill_tokens, stats.num_decode_tokens) == (2, 4, 15, 1)
    assert (stats.num_running, stats.num_waiting, stats.max_num_seqs, stats.kv_cache_use) == (2, 0, 4, 4 / 20)


def test_padding_is_no_occupancy() -> None:
    scheduler = StaticScheduler(BlockPool(20, 4), max_num_batched_tokens=10, max_num_seqs=4)
    stats = RunStats()
    for number in range(2):
        scheduler.add(Sequence(make_request(number, [1, 2]), 9))
    stats.count_step(step_record(scheduler.schedule(), scheduler))
    assert (stats.num_steps, stats.occupancy) == (1, 2)
    for seq in scheduler.running:
        seq.num_computed_tokens += 2
        seq.token_ids.append(7)
    scheduler.finish(scheduler.running[0])
    stats.count_step(step_record(padded := scheduler.schedule(), scheduler))
    assert len(padded.chunks) == 2
    assert (stats.num_steps, stats.occupancy) == (2, 3)


def test_generation_is_from_the_first_step_to_the_last_completion() -> None:
    stats, scheduler = (
        RunStats(),
        Scheduler(BlockPool(20, 4), max_num_batched_tokens=10, max_num_seqs=4, expected_share=0),
    )
    assert stats.generation_seconds == 0
    stats.count_step(step_record(scheduler.schedule(), scheduler))
    assert stats.first_step_at is None  # nothing to compute yet
    scheduler.add(Sequence(make_request(0, [1, 2]), 9))
    stats.count_step(step_record(scheduler.schedule(), scheduler))
    stats.finished(completion(0, Output("a", (), "stop")))
    stats.finished(completion(1, Output("b", (), "stop")))
    assert stats.first_step_at
    assert stats.first_completion_at
    assert stats.last_completion_at
    assert stats.started_at < stats.first_step_at < stats.first_completion_at < stats.last_completion_at
    assert stats.generation_seconds == stats.last_completion_at - stats.first_step_at


def test_the_first_token_and_the_following_ones_are_timed_apart() -> None:
    stats = RunStats()
    stats.count_first_token(2.0, num_cached_tokens=1)
    for seconds in (0.5, 0.1):
        stats.count_next_token(seconds)
    assert stats.ttft.percentile(1.0) == pytest.approx(2.0, rel=0.026)
    assert stats.inter_token.percentile(1.0) == pytest.approx(0.5, rel=0.026)
    assert stats.inter_token.percentile(0.5) == pytest.approx(0.1, rel=0.026)
    assert (stats.num_cached_tokens, stats.num_generated_tokens) == (1, 3)


def test_finished_rows_are_counted_by_how_they_ended() -> None:
    stats = RunStats()
    stats.finished(completion(0, Output("a", (1, 2), "stop"), 5))
    stats.finished(completion(1, Output("b", (1,), "length"), 7))
    stats.finished(completion(2, Output(error=RowError("bad", "no")), 9))
    assert (stats.num_rows_ok, stats.num_rows_failed, stats.num_rows_length, stats.num_rows_done) == (2, 1, 1, 3)
    assert (stats.num_prompt_tokens, stats.num_completion_tokens) == (12, 3)
    assert dict(stats.errors) == {"bad": 1}


def test_two_threads_count_every_row() -> None:
    stats = RunStats()

    def many() -> None:
        for number in range(5000):
            stats.finished(completion(number, Output("", (), "stop"), 1))

    threads = [threading.Thread(target=many) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (stats.num_rows_ok, stats.num_prompt_tokens) == (10_000, 10_000)


def test_how_long_rows_run_is_told_from_how_many_run_and_how_many_end() -> None:
    stats = RunStats()
    assert stats.row_seconds() == 0
    for number in range(400):  # four at a time, ten steps of half a second each, so that one ends every 2.5 steps
        stats.num_steps, stats.occupancy, stats.num_running = stats.num_steps + 1, stats.occupancy + 4, 4
        stats.busy_seconds += 0.5
        if number % 5 in (2, 4):
            stats.finished(completion(number, Output("x", (), "stop")))
    assert stats.row_seconds() == pytest.approx(5, rel=0.02)


def test_a_run_counts_what_its_engines_did_together() -> None:
    engines = [
        EngineStats(
            ModelCost(7),
            first_step_at=3.0,
            num_steps=10,
            occupancy=40,
            num_running=4,
            kv_cache_use=0.5,
            kv_cache_use_most=0.6,
        ),
        EngineStats(
            ModelCost(7),
            first_step_at=2.0,
            num_steps=30,
            occupancy=60,
            num_running=2,
            kv_cache_use=0.1,
            kv_cache_use_most=0.9,
        ),
        EngineStats(num_steps=5, num_running=9, kv_cache_use=1.0, busy_seconds=8.0).at_rest(),
        EngineStats(),  # loads
    ]
    for engine, durations in zip(engines, ([1.0] * 3, [2.0], [], []), strict=True):
        for seconds in durations:
            engine.ttft.add(seconds)
    stats = RunStats(num_replicas=2, num_rows_ok=5, num_prompt_tokens=8)
    for _ in range(2):  # the counts are theirs, whatever they were before
        stats.gather(engines)
    assert (stats.cost, stats.first_step_at, stats.num_steps, stats.occupancy) == (ModelCost(7), 2.0, 45, 100)
    assert (stats.num_running, stats.kv_cache_use, stats.kv_cache_use_most) == (6, pytest.approx(0.3), 0.9)
    assert (stats.ttft.percentile(0.75), stats.ttft.percentile(1)) == (
        pytest.approx(1, rel=0.03),
        pytest.approx(2, rel=0.03),
    )
    assert (stats.model_seconds, stats.num_rows_ok, stats.num_prompt_tokens) == (4.0, 5, 8)
