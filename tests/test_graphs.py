"""Padding a step to the size of a recorded graph changes no row. Recording itself needs a GPU."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from cbatch.model.batch import nothing
from cbatch.model.graphs import StepGraphs, buckets
from tests.drive import make_engine, make_request, run
from tests.interpreter import INTERPRETER
from tests.tiny import VOCAB_SIZE, make_config, make_model


class Repeated:
    """Stands in for a graph: computes the step anew from the static buffers."""

    def __init__(self, graphs: StepGraphs, size: int, decode: bool) -> None:
        self.graphs, self.size, self.decode = graphs, size, decode

    def replay(self) -> None:
        self.graphs._step(self.graphs._static_batch(self.size, self.decode))


class UnrecordedGraphs(StepGraphs):
    def _record(self, size: int, decode: bool) -> Repeated:
        return Repeated(self, size, decode)


@pytest.mark.parametrize("depth", [0, 1])
def test_padded_steps_give_the_same_rows(depth: int) -> None:
    model = make_model(make_config(), "cbatch")
    generator = torch.Generator().manual_seed(3)
    requests = [
        make_request(n, torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist(), max_tokens=4 + n)
        for n, length in enumerate([1, 9, 20, 3, 14])
    ]
    plain = run(make_engine(model), requests)
    engine = make_engine(model, num_blocks=24, budget=70, max_num_seqs=3, max_model_len=64, backend=INTERPRETER)
    engine.depth = depth
    graphs = UnrecordedGraphs(engine.runner.forward, 70, 3, 16, 64, engine.runner.device)
    engine.runner._run = graphs.run
    assert run(engine, requests) == plain
    assert {decode for _, decode in graphs._recorded} == {True, False}


def test_a_step_of_nothing_touches_no_block() -> None:
    engine = make_engine(make_model(make_config(), "cbatch"), fill=7.0, backend=INTERPRETER)
    graphs = UnrecordedGraphs(engine.runner.forward, 70, 3, 16, 64, engine.runner.device)
    with torch.inference_mode():
        graphs.run(nothing(engine.runner.device))
    assert all((cache == 7.0).all() for cache in engine.runner.kv_cache.k.values())


@pytest.mark.parametrize("largest", [1, 3, 64, 65, 100, 1024, 8192])
def test_buckets_reach_the_largest_in_small_steps(largest: int) -> None:
    sizes = buckets(largest)
    assert sizes[-1] == largest
    assert sizes == sorted(set(sizes))
    assert all(b <= max(2 * a, a + 16) and (a < 64 or b <= 1.26 * a) for a, b in pairwise(sizes))
