from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.config import SamplingParams
from cbatch.engine.sequence import Sequence
from cbatch.model.ops import Backend, choose
from cbatch.model.sampler import INVALID_LOGITS, _quantile, filtered_probs, sample, uniform
from tests.drive import make_engine, make_request, run, sampling_of
from tests.tiny import VOCAB_SIZE, make_config, make_model

EXAMPLE = torch.tensor([0.5, 0.3, 0.1, 0.1]).log()


def sequence(prompt: list[int], completion: list[int] | None = None, random_key: int = 0, **params: Any) -> Sequence:
    seq = Sequence(make_request(0, prompt, random_key, **params), max_len=10_000)
    seq.token_ids += completion or []
    return seq


def draw(
    logits: torch.Tensor, sequences: SequenceOf[Sequence], eos: SequenceOf[int] = (), backend: Backend | None = None
) -> torch.Tensor:
    """The next token of each sequence."""
    sampling = sampling_of(sequences, eos, logits.shape[-1])
    return sample(logits, sampling, backend or choose(logits.device)).token_ids


def probs_of(logits: torch.Tensor, *params: dict[str, Any]) -> torch.Tensor:
    """The probabilities of rows with these settings; temperature 1 unless they say otherwise."""
    rows = [sequence([0], **{"temperature": 1.0, **settings}) for settings in params]
    return filtered_probs(logits, sampling_of(rows, (), logits.shape[-1]))


def kept(logits: torch.Tensor = EXAMPLE, **params: Any) -> list[int]:
    return probs_of(logits[None].float(), params)[0].nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("top_p", "tokens"),
    [
        (0.0, [0]),
        (1e-9, [0]),
        (0.49, [0]),
        (0.5, [0]),
        (0.51, [0, 1]),
        (0.79, [0, 1]),
        (0.8, [0, 1]),
        (0.81, [0, 1, 2]),
        (0.9, [0, 1, 2]),
        (0.91, [0, 1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, tokens: list[int]) -> None:
    assert kept(top_p=top_p) == tokens


@pytest.mark.parametrize(
    ("top_k", "tokens"),
    [(0, [0, 1, 2, 3]), (-1, [0, 1, 2, 3]), (1, [0]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (10**9, [0, 1, 2, 3])],
)
def test_top_k_keeps_the_k_likeliest(top_k: int, tokens: list[int]) -> None:
    assert kept(top_k=top_k) == tokens


def test_a_top_k_too_large_for_a_machine_word_keeps_all() -> None:
    assert kept(top_k=10**30) == [0, 1, 2, 3]


@pytest.mark.parametrize(("min_p", "tokens"), [(0.0, [0, 1, 2, 3]), (0.5, [0, 1]), (0.61, [0]), (1.0, [0])])
def test_min_p_is_relative_to_the_likeliest(min_p: float, tokens: list[int]) -> None:
    assert kept(min_p=min_p) == tokens


def test_top_p_counts_what_top_k_left() -> None:
    assert kept(top_k=2, top_p=0.6) == [0]  # 0.5 of 0.8 is 0.625
    assert kept(top_k=3, top_p=0.6) == [0, 1]


def test_min_p_of_one_keeps_ties_and_top_k_of_one_the_lower_id() -> None:
    tied = torch.tensor([0.0, 2.0, 2.0, 1.0])
    assert kept(tied, min_p=1.0) == [1, 2]
    assert kept(tied, top_k=1) == kept(tied, top_p=0.1) == [1]


def reference_set(probs: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    ranked = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    ranked = ranked[:top_k] if top_k > 0 else ranked
    total, before, nucleus = sum(probs[token] for token in ranked), 0.0, list[int]()
    for token in ranked:
        if nucleus and before >= top_p * total:
            break
        nucleus.append(token)
        before += probs[token]
    return {token for token in nucleus if probs[token] >= min_p * probs[ranked[0]]}


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    top_k=st.integers(-1, 30),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    temperature=st.floats(0.05, 5),
)
def test_filters_in_a_mixed_batch_against_plain_python(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    logits = torch.randn(3, 25, generator=torch.Generator().manual_seed(seed)) * 3
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    got = probs_of(logits, {}, params, {"temperature": 0.7, "top_k": 2})[1].double().numpy()
    scaled = logits[1].double().numpy() / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    slightly = 3e-6
    smallest = reference_set(probs, top_k, max(0.0, top_p - slightly), min(1.0, min_p * (1 + slightly)))
    largest = reference_set(probs, top_k, 2.0 if top_p == 1 else top_p + slightly, min_p * (1 - slightly))
    tokens = set(got.nonzero()[0].tolist())
    assert smallest <= tokens <= largest
    share = np.array([probs[token] if token in tokens else 0 for token in range(25)])
    np.testing.assert_allclose(got / got.sum(), share / share.sum(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("extra", [{}, {"top_k": 5}, {"top_p": 0.1}, {"top_p": 0.0}, {"min_p": 1.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_temperature_zero_is_the_lowest_id_of_the_maxima(extra: dict[str, Any], dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 7.0, 3.0, 7.0]], dtype=dtype)
    assert draw(logits, [sequence([0], temperature=0, **extra)], ()).tolist() == [1]


@pytest.mark.parametrize("temperature", [1e-300, 1e-12, 1e-6, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_tiny_temperature_takes_the_likeliest(temperature: float, dtype: torch.dtype) -> None:
    logits = torch.tensor([[60_000.0, -60_000.0, 60_032.0, 0.0]], dtype=dtype)
    filters: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 3, "min_p": 0.1}]
    for extra in filters:
        assert draw(logits, [sequence([0], temperature=temperature, **extra)], ()).tolist() == [2]


@pytest.mark.parametrize("temperature", [1e10, 1e300])
def test_a_huge_temperature_draws_from_all(temperature: float) -> None:
    logits = torch.tensor([[9.0, -9.0, 0.0, 1.0]]).repeat(200, 1)
    tokens = draw(logits, [sequence([0], random_key=n, temperature=temperature) for n in range(200)], ())
    assert set(tokens.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("wrong", [math.nan, -0.1, math.inf, "1", True, None])
def test_temperatures_that_make_no_sense_never_reach_the_batch(wrong: Any) -> None:
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature=wrong)


@pytest.mark.parametrize(
    "values", [{"top_p": 1.1}, {"top_p": -0.1}, {"top_k": -2}, {"top_k": 1.5}, {"min_p": 2.0}, {"min_p": math.nan}]
)
def test_filters_that_make_no_sense_never_reach_the_batch(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        SamplingParams(**values)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_reported_for_their_row_only(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 5)
    logits[1, 3] = bad
    logits[:, 2] = 9.0 if bad != bad else 50.0
    tokens = draw(logits, [sequence([0], temperature=temperature) for _ in range(3)], ()).tolist()
    assert tokens[1] == INVALID_LOGITS
    assert tokens[0] == tokens[2] == 2
    everything = torch.full((1, 5), -torch.inf)
    assert draw(everything, [sequence([0], temperature=temperature)], ()).tolist() == [INVALID_LOGITS]


def test_tokens_of_no_probability_are_never_drawn() -> None:
    logits = torch.full((500, 9), -torch.inf)
    logits[:, [3, 5]] = 0.0
    tokens = draw(logits, [sequence([0], random_key=n, temperature=1.3) for n in range(500)], ())
    assert set(tokens.tolist()) == {3, 5}


def penalized(logits: np.ndarray, seq: Sequence) -> np.ndarray:
    """The definitions written out: repetition over everything seen, presence and frequency over the completion."""
    p, out = seq.params, logits.astype(np.float64)
    for token in set(seq.token_ids):
        out[token] = out[token] * p.repetition_penalty if out[token] < 0 else out[token] / p.repetition_penalty
    for token, count in Counter(seq.completion_ids).items():
        out[token] -= p.presence_penalty + p.frequency_penalty * count
    return out


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    repetition=st.floats(0.5, 2),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    length=st.integers(0, 20),
)
def test_penalties_against_their_definitions(
    seed: int, repetition: float, presence: float, frequency: float, length: int
) -> None:
    rng = random.Random(seed)
    rows, wanted = [], []
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(seed)) * 2
    for row in range(3):
        on = row == 1
        seq = sequence(
            [rng.randrange(12) for _ in range(5)],
            [rng.randrange(12) for _ in range(length)],
            repetition_penalty=repetition if on else 1.0,
            presence_penalty=presence if on else 0.0,
            frequency_penalty=frequency if on else 0.0,
        )
        rows.append(seq)
        wanted.append(penalized(logits[row].numpy(), seq))
    tokens = draw(logits.clone(), rows, ()).tolist()
    for token, want in zip(tokens, wanted, strict=True):
        assert want[token] >= want.max() - 1e-5


def test_no_end_is_sampled_before_min_tokens() -> None:
    logits = torch.tensor([[1.0, 9.0, 8.0, 2.0]])

    def first(completion: list[int], **params: Any) -> int:
        return int(draw(logits.clone(), [sequence([0], completion, **params)], (1,))[0])

    assert first([], min_tokens=0) == 1
    assert first([], min_tokens=2) == 2
    assert first([3], min_tokens=2) == 2
    assert first([3, 3], min_tokens=2) == 1
    assert first([], min_tokens=2, stop_token_ids=[2, 10**30]) == 3
    assert first([], min_tokens=2, ignore_eos=True) == 1
    assert first([], min_tokens=2, ignore_eos=True, stop_token_ids=1) == 2


def test_uniforms_are_uniform_and_differ_between_streams_and_positions() -> None:
    for numbers in (
        np.array([uniform(stream, 0) for stream in range(10_000)]),
        np.array([uniform(7, position) for position in range(10_000)]),
        np.array([uniform(2**64 - 1 - stream, 3) for stream in range(10_000)]),
    ):
        assert len(set(numbers.tolist())) == 10_000
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert chi_square(np.histogram(numbers, 50, (0, 1))[0], np.full(50, 200.0)) < 85.4  # 99.9 % of 49 degrees


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("params", [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}])
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    logits = torch.randn(8, generator=torch.Generator().manual_seed(4)).repeat(6000, 1)
    params = {"temperature": 1.0, **params}
    tokens = draw(logits.clone(), [sequence([0], random_key=n, **params) for n in range(6000)], ())
    probs = probs_of(logits[:1], params)[0].double().numpy()
    expected = 6000 * probs / probs.sum()
    counts = np.bincount(tokens.numpy(), minlength=8)
    assert not counts[expected == 0].any()
    assert chi_square(counts[expected > 0], expected[expected > 0]) < 24.3  # 99.9 % of 7 degrees of freedom


MIXED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.7},
    {"temperature": 2.0, "min_p": 0.1, "min_tokens": 9},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_draws_the_same_whatever_else_is_in_its_batch(dtype: torch.dtype) -> None:
    logits = torch.randn(12, 50, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows = [sequence([0], [1] * n, random_key=n, **params) for n, params in enumerate(MIXED * 2)]
    together = draw(logits.clone(), rows, (2,)).tolist()
    alone = [int(draw(logits[n : n + 1].clone(), [rows[n]], (2,))[0]) for n in range(12)]
    backwards = draw(logits.flip(0), rows[::-1], (2,)).tolist()[::-1]
    assert together == alone == backwards


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_draws_what_the_c_kernels_do(dtype: torch.dtype) -> None:
    logits = (torch.randn(120, 700, generator=torch.Generator().manual_seed(1)) * 2).to(dtype)
    logits[7] = torch.nan
    rows = [sequence([5, 6], [1] * (n % 12), random_key=n, **params) for n, params in enumerate(MIXED * 20)]
    tokens = draw(logits.clone(), rows, (2,)).tolist()
    assert draw(logits.clone(), rows, (2,), Backend()).tolist() == tokens
    assert len(set(tokens)) > 60


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_penalties_are_not_rounded_to_the_dtype_of_the_logits(dtype: torch.dtype) -> None:
    logits = torch.tensor([[8.0, 8.0, 7.96875, 0.0]], dtype=dtype)  # no number of bfloat16 lies between
    assert draw(logits, [sequence([3], [0, 1], temperature=0, presence_penalty=0.01)], ()).tolist() == [0]
    assert draw(logits, [sequence([3], [0, 1], temperature=0, presence_penalty=0.04)], ()).tolist() == [2]


@pytest.mark.parametrize("kind", ["continuous", "static"])
def test_sampled_rows_do_not_depend_on_order_company_or_memory(kind: str) -> None:
    model = make_model(make_config(), "cbatch")
    requests = [make_request(n, [5, 6, 7, 8], random_key=n * 1009, temperature=1.0, max_tokens=12) for n in range(24)]
    runs = []
    for given_requests, blocks in ((requests, 200), (requests[::-1], 200), (requests[::2], 200), (requests, 10)):
        engine = make_engine(model, num_blocks=blocks, kind=kind)
        runs.append({c.row.index: c.token_ids for c in run(engine, given_requests)})
    assert len(set(runs[0].values())) == 24
    for outcome in runs[1:]:
        assert outcome.items() <= runs[0].items()
    assert all(0 <= token < VOCAB_SIZE for ids in runs[0].values() for token in ids)


def test_each_position_of_a_row_draws_anew() -> None:
    logits = torch.zeros(200, 20)
    rows = [sequence([0], [1] * n, random_key=5, temperature=1.0) for n in range(200)]
    counts = np.bincount(draw(logits, rows, ()).numpy(), minlength=20)
    assert chi_square(counts, np.full(20, 10.0)) < 43.8  # 99.9 % of 19 degrees of freedom


def test_the_ends_of_the_unit_interval_fall_on_tokens_that_are_possible() -> None:
    probs = torch.tensor([[0.0, 0.0, 0.7, 0.3, 0.0]]).repeat(3, 1)
    uniforms = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert _quantile(probs, uniforms).tolist() == [2, 2, 3]
