from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.engine.block_pool import BlockPool
from cbatch.engine.scheduler import Schedule, Scheduler, StaticScheduler, make_scheduler
from cbatch.engine.sequence import Sequence
from tests.drive import make_request

KINDS = ("continuous", "static", "dynamic")


@dataclass
class Trace:
    """What happened in a simulated job."""

    steps: list[Schedule] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    finished_at: dict[Sequence, int] = field(default_factory=dict)
    preemptions: Counter[Sequence] = field(default_factory=Counter)


def sequence(num_prompt: int, max_len: int, token: int = 0, number: int = 0) -> Sequence:
    return Sequence(make_request(number, [token] * num_prompt), max_len)


def simulate(
    scheduler: Scheduler,
    sequences: list[Sequence],
    most_steps: int,
    per_step: int = 10**9,
    ends: dict[Sequence, int] | None = None,
) -> Trace:
    """Run a fake model: every sequence that reaches its end gets one token, and ends at its `max_len`, or before."""
    coming, trace, rng = list(sequences), Trace(), random.Random(0)
    while coming or scheduler.waiting or scheduler.running:
        for _ in range(min(per_step, len(coming))):
            scheduler.add(coming.pop(0))
        before = {seq: seq.num_pending_tokens for seq in scheduler.running}
        schedule = scheduler.schedule(more_to_come=bool(coming))
        check_step(scheduler, schedule, before)
        trace.steps.append(schedule)
        trace.preemptions.update(schedule.preempted)
        for chunk in schedule.chunks:
            chunk.seq.num_computed_tokens += chunk.num_tokens
            scheduler.pool.remember(chunk.seq)
        for seq in schedule.sampled:
            assert seq not in trace.finished_at
            seq.token_ids.append(rng.randrange(3))
            if len(seq.token_ids) == (ends[seq] if ends else seq.max_len):
                scheduler.finish(seq)
                trace.finished.append(seq)
                trace.finished_at[seq] = len(trace.steps) - 1
        scheduler.check()
        assert len(trace.steps) <= most_steps, "no end in sight"
    assert scheduler.pool.num_used_blocks == 0
    return trace


def check_step(scheduler: Scheduler, schedule: Schedule, before: dict[Sequence, int]) -> None:
    seqs = [chunk.seq for chunk in schedule.chunks]
    assert len(set(map(id, seqs))) == len(seqs), "scheduled twice"
    assert schedule.num_tokens <= scheduler.max_num_batched_tokens
    assert len(scheduler.running) <= scheduler.max_num_seqs
    assert set(map(id, seqs)) <= set(map(id, scheduler.running))
    assert not {id(seq) for seq in schedule.preempted} & set(map(id, seqs))
    for chunk in schedule.chunks:
        seq = chunk.seq
        owed = seq.num_pending_tokens or 1  # a padding token of a locked batch
        assert 0 < chunk.num_tokens <= owed
        if chunk.reaches_end:
            assert chunk.num_tokens == seq.num_pending_tokens
        assert len(seq.block_table) * scheduler.pool.block_size >= seq.num_computed_tokens + chunk.num_tokens
    for seq, pending in before.items():  # decodes are paid first: none that still runs is left out
        if pending == 1 and seq in scheduler.running:
            assert seq in seqs
    scheduler.check()


@st.composite
def workloads(draw: st.DrawFn) -> tuple[BlockPool, int, int, list[Sequence], int]:
    block_size, num_blocks = draw(st.integers(1, 6)), draw(st.integers(1, 20))
    pool = BlockPool(num_blocks, block_size, draw(st.booleans()))
    capacity = num_blocks * block_size
    sequences = []
    for number in range(draw(st.integers(1, 12))):
        max_len = draw(st.integers(2, max(2, min(capacity, 40))))
        if max_len > capacity:
            continue
        num_prompt = draw(st.integers(1, max_len - 1))
        sequences.append(sequence(num_prompt, max_len, draw(st.integers(0, 1)), number))
    return pool, draw(st.integers(1, 30)), draw(st.integers(1, 8)), sequences, draw(st.integers(1, 5))


@settings(deadline=None, max_examples=200)
@given(workloads(), st.sampled_from(KINDS), st.sampled_from([0.0, 0.3, 1.0]))
def test_every_workload_completes_within_its_limits(
    workload: tuple[BlockPool, int, int, list[Sequence], int], kind: str, expected_share: float
) -> None:
    pool, budget, max_num_seqs, sequences, per_step = workload
    scheduler = make_scheduler(kind, pool, budget, max_num_seqs, expected_share)
    if isinstance(scheduler, StaticScheduler):
        scheduler._window = 0 if kind == "dynamic" else scheduler._window
    tokens = sum(seq.max_len for seq in sequences)
    trace = simulate(scheduler, sequences, most_steps=100 + 3 * len(sequences) * tokens, per_step=per_step)
    assert sorted(seq.request.row.index for seq in trace.finished) == sorted(seq.request.row.index for seq in sequences)
    if kind != "continuous":
        assert not trace.preemptions


@settings(deadline=None, max_examples=100)
@given(workloads())
def test_preemptions_are_bounded_by_what_finishes(
    workload: tuple[BlockPool, int, int, list[Sequence], int],
) -> None:
    """Between two finished sequences each sequence gives way at most once."""
    pool, budget, max_num_seqs, sequences, _ = workload
    trace = simulate(Scheduler(pool, budget, max_num_seqs, expected_share=0), sequences, most_steps=100_000)
    since: Counter[Sequence] = Counter()
    for number, schedule in enumerate(trace.steps):
        since.update(schedule.preempted)
        assert all(count == 1 for count in since.values())
        if number in trace.finished_at.values():
            since.clear()
    for step, later in zip(trace.steps, trace.steps[1:], strict=False):
        assert step.chunks or later.chunks


def test_two_sequences_of_60_percent_of_the_pool_run_one_after_the_other() -> None:
    pool = BlockPool(10, 4)
    first, second = sequence(8, 24, 0), sequence(8, 24, 1, 1)
    trace = simulate(Scheduler(pool, 64, 8), [first, second], most_steps=60)
    assert trace.finished == [first, second]
    assert trace.preemptions.total() <= 1


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    scheduler = Scheduler(BlockPool(6, 2, enable_prefix_caching=False), 64, 8, expected_share=0)
    old, young, late = sequence(3, 12, 0), sequence(3, 12, 1, 1), sequence(3, 12, 2, 2)
    trace = simulate(scheduler, [old, young, late], most_steps=100)
    assert trace.preemptions[old] == 0
    assert trace.preemptions[young] >= 1
    assert trace.finished == [old, young, late]


def test_blocks_that_hardly_suffice_cost_little_recomputation() -> None:
    """Rows end anywhere up to what they may generate; the pool holds a tenth of them."""
    rng = random.Random(3)
    pool = BlockPool(400, 16, enable_prefix_caching=False)
    scheduler = Scheduler(pool, 512, 256)
    sequences, stops = [], {}
    for number in range(300):
        num_prompt = rng.randint(20, 200)
        sequences.append(sequence(num_prompt, num_prompt + 400, number, number))
        stops[sequences[-1]] = num_prompt + min(400, int(rng.lognormvariate(4.5, 0.8)))
    trace = simulate(scheduler, sequences, most_steps=100_000, ends=stops)
    computed = sum(step.num_tokens for step in trace.steps)
    assert computed <= 1.05 * sum(stops.values())
    occupancy = sum(len(step.chunks) for step in trace.steps) / len(trace.steps)
    assert occupancy > 20  # of the 30 or so that the pool holds: it is not left empty out of caution


def test_a_long_prompt_goes_in_slices_beside_decodes() -> None:
    scheduler = Scheduler(BlockPool(40, 4), max_num_batched_tokens=10, max_num_seqs=4)
    short, long = sequence(5, 25, 0), sequence(50, 52, 1, 1)
    trace = simulate(scheduler, [short, long], most_steps=100)
    sizes = [{chunk.seq: chunk.num_tokens for chunk in step.chunks} for step in trace.steps]
    assert sizes[0] == {short: 5, long: 5}
    assert sizes[1:6] == [{short: 1, long: 9}] * 5
    ends = [chunk.reaches_end for step in trace.steps for chunk in step.chunks if chunk.seq is long]
    assert ends == [False] * 5 + [True, True]


def test_a_finished_sequence_makes_room_in_the_very_next_step() -> None:
    scheduler = Scheduler(BlockPool(40, 4), 64, max_num_seqs=2)
    sequences = [sequence(4, 5, 0, 0), sequence(4, 12, 1, 1), sequence(4, 6, 2, 2)]
    trace = simulate(scheduler, sequences, most_steps=50)
    assert [chunk.seq for chunk in trace.steps[1].chunks] == sequences[1:]


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_locked_batch_keeps_its_places_until_its_slowest_has_ended(kind: str) -> None:
    scheduler = make_scheduler(kind, BlockPool(100, 4), 64, 3)
    sequences = [sequence(4, 4 + n, n, n) for n in (1, 9, 4, 2, 3)]
    trace = simulate(scheduler, sequences, most_steps=50)
    assert [len(step.chunks) for step in trace.steps] == [3] * 9 + [2] * 3
    assert {chunk.seq for step in trace.steps[:9] for chunk in step.chunks} == set(sequences[:3])
    sampled = [sum(chunk.reaches_end for chunk in step.chunks) for step in trace.steps]
    assert sampled == [3, 2, 2, 2, 1, 1, 1, 1, 1, 2, 2, 1]


def test_continuous_batching_needs_fewer_steps_than_a_locked_batch() -> None:
    steps = {}
    for kind in ("continuous", "static"):
        sequences = [sequence(4, 4 + (20 if n % 4 == 0 else 2), n % 3, n) for n in range(16)]
        steps[kind] = len(simulate(make_scheduler(kind, BlockPool(200, 4), 64, 4), sequences, 1000).steps)
    assert steps == {"continuous": steps["continuous"], "static": 80}
    assert steps["continuous"] < 40


def test_a_static_batch_waits_until_it_is_full_or_the_input_has_ended() -> None:
    scheduler = StaticScheduler(BlockPool(100, 4), 64, 2)
    scheduler.add(sequence(4, 6))
    assert not scheduler.schedule(more_to_come=True).chunks
    assert len(scheduler.schedule(more_to_come=False).chunks) == 1
    scheduler = StaticScheduler(BlockPool(100, 4), 64, 2)
    scheduler.add(sequence(4, 6))
    scheduler.add(sequence(4, 6))
    assert len(scheduler.schedule(more_to_come=True).chunks) == 2


def test_a_dynamic_batch_starts_when_its_window_is_over() -> None:
    pool = BlockPool(100, 4)
    patient, prompt = StaticScheduler(pool, 64, 2, window=1e9), StaticScheduler(pool, 64, 2, window=0.0)
    for scheduler in (patient, prompt):
        seq = sequence(4, 6)
        seq.added_at = 1.0
        scheduler.add(seq)
    assert not patient.schedule(more_to_come=True).chunks
    assert len(prompt.schedule(more_to_come=True).chunks) == 1


def test_admission_leaves_a_block_for_each_that_runs() -> None:
    scheduler = Scheduler(BlockPool(4, 4), 64, 8)
    first, second, third = sequence(4, 8, 0), sequence(4, 8, 1, 1), sequence(4, 8, 2, 2)
    for seq in (first, second, third):
        scheduler.add(seq)
    assert [chunk.seq for chunk in scheduler.schedule().chunks] == [first, second]  # a third would leave one for two
    assert list(scheduler.waiting) == [third]
    scheduler = Scheduler(BlockPool(4, 4), 64, 8)
    trace = simulate(scheduler, [sequence(4, 8, 0), sequence(4, 8, 1, 1), sequence(4, 8, 2, 2)], most_steps=30)
    assert not trace.preemptions
