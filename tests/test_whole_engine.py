"""Scheduler, block pool, batches, run-ahead and stop texts together, on any workload."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from cbatch.engine.block_pool import BlockPool
from cbatch.engine.engine import Engine
from cbatch.engine.scheduler import make_scheduler
from cbatch.engine.sequence import Sequence
from cbatch.rows.request import Completion, Request
from tests.chain import ChainRunner, continuation
from tests.drive import Given, finished, make_request, spell

VOCABULARY, EOS, CONTEXT = 12, 11, 48


class Trickle(Given):
    """Requests of which there is now and then none."""

    def __init__(self, requests: list[Request], rng: random.Random) -> None:
        super().__init__(requests)
        self._rng = rng

    def take(self, wait: bool) -> Request | None:
        return super().take(wait) if self._rng.random() < 0.6 else None


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    shared = draw(st.lists(st.integers(0, 3), max_size=20))
    found = []
    for number in range(draw(st.integers(1, 12))):
        own = draw(st.lists(st.integers(0, 3), min_size=1, max_size=25))
        token_ids = shared[: draw(st.integers(0, len(shared)))] + own
        params: dict[str, Any] = {
            "max_tokens": draw(st.integers(1, 25)),
            "min_tokens": draw(st.integers(0, 3)),
            "ignore_eos": draw(st.booleans()),
            "stop": draw(st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=3).map(spell), max_size=2)),
            "stop_token_ids": draw(st.lists(st.integers(0, 11), max_size=1)),
        }
        found.append(make_request(number, token_ids, **params))
    return found


def expected(request: Request, capacity: int) -> tuple[str | None, str]:
    """Text and reason of the end, or None and the kind of error, for a row alone in the world."""
    params, num_prompt = request.params, len(request.token_ids)
    if num_prompt >= capacity:
        return None, "kv_cache_too_small"
    longest = min(num_prompt + params.max_tokens, CONTEXT) - num_prompt
    room = min(longest, capacity - num_prompt)
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})

    def stop_text(made: list[int]) -> int:
        return min(
            (p for p in (spell(made).find(text, params.min_tokens) for text in params.stop) if p >= 0), default=-1
        )

    said = continuation(request.token_ids, VOCABULARY, lambda made: len(made) == room)
    for count in range(1, room + 1):
        made = said[:count]
        if count > params.min_tokens and made[-1] in ends:
            return spell(made[:-1]), "stop"
        if stop_text(made) >= 0:
            return spell(made)[: stop_text(made)], "stop"
    return (spell(said), "length") if room == longest else (None, "kv_cache_too_small")


class ScoringEngine(Engine):
    """Asks for the logits of some rows' tokens from any place on, not only of the last."""

    def _sequence(self, request: Request) -> Sequence:
        seq = super()._sequence(request)
        seq.first_output = [None, 0, 3, len(request.token_ids)][request.row.index % 4]
        return seq


@settings(deadline=None, max_examples=300)
@given(
    make=st.sampled_from([Engine, ScoringEngine]),
    requests=requests(),
    kind=st.sampled_from(["continuous", "continuous", "static", "dynamic"]),
    num_blocks=st.integers(1, 20),
    block_size=st.integers(1, 5),
    budget=st.integers(1, 40),
    max_num_seqs=st.integers(1, 8),
    depth=st.integers(0, 1),
    caching=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_every_row_gets_what_it_would_get_alone(
    make: type[Engine],
    requests: list[Request],
    kind: str,
    num_blocks: int,
    block_size: int,
    budget: int,
    max_num_seqs: int,
    depth: int,
    caching: bool,
    seed: int,
) -> None:
    scheduler = make_scheduler(kind, BlockPool(num_blocks, block_size, caching), budget, max_num_seqs)
    runner: Any = ChainRunner(num_blocks * block_size, block_size, VOCABULARY)
    engine = make(runner, scheduler, spell, frozenset({EOS}), CONTEXT, depth=depth)
    completions: list[Completion] = []
    for completion in engine.generate(Trickle(requests, random.Random(seed))):
        completions.append(completion)
        scheduler.check()
    assert scheduler.pool.num_used_blocks == 0
    event(f"preempted: {engine.stats.num_preemptions > 0}")
    found = {
        done.row.index: (done.text, done.error.kind if done.error else done.finish_reason)
        for done in map(finished, completions)
    }
    assert len(completions) == len(requests)
    assert found == {request.row.index: expected(request, num_blocks * block_size) for request in requests}
