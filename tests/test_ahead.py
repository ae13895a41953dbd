"""Running one step ahead of the host changes no row."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from cbatch.engine.engine import Engine
from tests.drive import Finished, make_engine, make_request, run, spell
from tests.tiny import VOCAB_SIZE, make_config, make_model

STOPS = ((), (), (spell([17]), spell([40, 41])))


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(make_config(), "cbatch")


def rows_of(model: Any, seed: int, depth: int, kind: str) -> tuple[list[Finished], Engine]:
    """The completions of a random workload in a random, small engine; the same for the same seed."""
    rng = random.Random(seed)
    block_size = rng.choice([2, 4, 8])
    engine = make_engine(
        model,
        num_blocks=rng.randint(96, 160) // block_size,
        block_size=block_size,
        budget=rng.randint(3, 30),
        max_num_seqs=rng.randint(1, 8),
        max_model_len=64,
        kind=kind,
        prefix_caching=rng.random() < 0.7,
        eos=range(2, 60, 7),
    )
    engine.depth = depth
    beginning = [rng.randrange(VOCAB_SIZE) for _ in range(16)]
    requests = []
    for number in range(25):
        prompt = beginning[: rng.choice([0, 16])] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))]
        settings: dict[str, Any] = {
            "max_tokens": rng.randint(1, 30),
            "temperature": rng.choice([0, 0, 1.0]),
            "min_tokens": rng.choice([0, 0, 3]),
            "stop": rng.choice(STOPS),
            "ignore_eos": rng.random() < 0.3,
            "frequency_penalty": rng.choice([0, 0, 0.5]) if seed % 3 == 0 else 0,
        }
        requests.append(make_request(number, prompt, number * 77, **settings))
    return run(engine, requests), engine


@pytest.mark.parametrize("kind", ["continuous", "static", "dynamic"])
def test_rows_are_the_same_one_step_ahead(model: Any, kind: str) -> None:
    preemptions = discarded = 0
    for seed in range(12):
        behind, engine_behind = rows_of(model, seed, 0, kind)
        ahead, engine = rows_of(model, seed, 1, kind)
        assert [replace(row, num_cached_tokens=0) for row in ahead] == [
            replace(row, num_cached_tokens=0) for row in behind
        ]
        preemptions += engine.stats.num_preemptions
        discarded += engine.stats.num_decode_tokens - engine_behind.stats.num_decode_tokens
    assert discarded > 0
    assert preemptions > 0 or kind != "continuous"


def test_a_row_that_ends_in_a_launched_step_costs_one_token(model: Any) -> None:
    """Two steps for two tokens, and the step that was launched before the host knew of the end."""
    alone = run(make_engine(model), [make_request(0, [5, 6, 7], max_tokens=10)])[0]
    end = alone.token_ids[1]
    assert end != alone.token_ids[0]
    steps = {}
    for depth in (0, 1):
        engine = make_engine(model, eos=[end])
        engine.depth = depth
        (done,) = run(engine, [make_request(0, [5, 6, 7], max_tokens=10)])
        assert (done.token_ids, done.finish_reason) == (alone.token_ids[:1], "stop")
        steps[depth] = engine.stats.num_steps
    assert steps == {0: 2, 1: 3}


def test_a_row_that_ends_by_its_length_costs_no_token_more(model: Any) -> None:
    for depth in (0, 1):
        engine = make_engine(model)
        engine.depth = depth
        run(engine, [make_request(0, [5, 6, 7], max_tokens=4)])
        assert engine.stats.num_steps == 4
