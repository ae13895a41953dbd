"""The Triton kernels, run by Triton's interpreter, against `kernels/reference.py` in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from cbatch.engine.sequence import Sequence
from cbatch.kernels import reference
from cbatch.kernels.attention import AttentionSpec, HeadNorms, Rotary
from cbatch.kernels.gpu import gated, moe, paged_attention, rms_norm, sample, store_kv
from cbatch.kernels.gpu.shapes import AttentionShape
from cbatch.model import ops, sampler
from cbatch.model.attention import attention_specs
from cbatch.model.batch import Batch, single
from cbatch.model.kv_cache import KVCache
from cbatch.model.runner import Runner
from tests.drive import make_request, sampling_of
from tests.interpreter import INTERPRETER
from tests.layouts import make_layout
from tests.tiny import make_config, make_model

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours.double() - reference.double()).norm() / reference.double().norm())


def paged(
    lengths: list[tuple[int, int]], kv_heads: int, head_size: int, block_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    """k_cache, v_cache and the layout, in int32, of sequences of (cached before, new) tokens.

    What no sequence has stored is NaN, and table entries behind a sequence's last block are wild.
    """
    generator = torch.Generator().manual_seed(0)
    totals = [before + new for before, new in lengths]
    blocks = [-(-total // block_size) for total in totals]
    shape = (sum(blocks) + 3, block_size, kv_heads, head_size)
    k_cache, v_cache = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    free = torch.randperm(shape[0], generator=generator).tolist()
    tables = torch.full((len(lengths), max(blocks) + 1), 10**6, dtype=torch.int32)
    stored = torch.zeros(shape[:2], dtype=torch.bool)
    for s, total in enumerate(totals):
        for index in range(blocks[s]):
            tables[s, index] = free.pop()
            stored[tables[s, index], : total - index * block_size] = True
    k_cache[~stored] = v_cache[~stored] = torch.nan
    stops = np.cumsum([new for _, new in lengths]).tolist()
    spans = [(stop - new, stop, before + new) for stop, (before, new) in zip(stops, lengths, strict=True)]
    return k_cache, v_cache, make_layout(tables, spans)


DECODE = [(0, 1), (1, 1), (14, 1), (15, 1), (16, 1), (70, 1)]
MIXED = [(70, 1), (0, 7), (40, 33), (9, 0), (31, 1), (15, 17)]
CASES: dict[str, dict[str, Any]] = {
    "decode": {"lengths": DECODE},
    "decode in parts": {"lengths": DECODE, "splits": 4},
    "decode in more parts than tiles": {"lengths": DECODE, "splits": 16, "dtype": torch.float16},
    "mixed": {"lengths": MIXED},
    "one head a group": {"lengths": MIXED, "heads": 2},
    "groups of three": {"lengths": MIXED, "heads": 9, "kv_heads": 3},
    "groups of seven": {"lengths": MIXED, "heads": 7, "kv_heads": 1},
    "window": {"lengths": MIXED, "window": 24},
    "window of one": {"lengths": DECODE, "window": 1, "splits": 2},
    "soft-cap": {"lengths": MIXED, "softcap": 5.0},
    "in parts, windowed": {"lengths": DECODE, "splits": 4, "window": 20},
    "head size 80": {"lengths": MIXED, "head_size": 80},
    "head size 96, windowed": {"lengths": MIXED, "head_size": 96, "window": 24},
    "head size 128": {"lengths": [(5, 3)], "head_size": 128},
    "head size 256": {"lengths": [(5, 3)], "head_size": 256},
    "bfloat16": {"lengths": MIXED, "dtype": torch.bfloat16},
    "bfloat16 in parts": {"lengths": DECODE, "dtype": torch.bfloat16, "splits": 4},
    "blocks larger than tiles": {"lengths": MIXED, "block_size": 64},
    "fp8 cache": {"lengths": MIXED, "fp8": True, "dtype": torch.bfloat16},
}


@pytest.mark.parametrize("name", CASES)
def test_paged_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case: dict[str, Any] = {
        "heads": 4,
        "kv_heads": 2,
        "head_size": 64,
        "block_size": 16,
        "window": 0,
        "softcap": 0.0,
        "splits": 1,
    }
    case = {**case, "dtype": torch.float32, "fp8": False, **CASES[name]}
    dtype, head_size = case["dtype"], case["head_size"]
    k, v, layout = paged(case["lengths"], case["kv_heads"], head_size, case["block_size"], dtype)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(int(layout.cu_seqlens_q[-1]), case["heads"], head_size, generator=generator).to(dtype)
    shape = AttentionShape(16 if layout.max_seqlen_q == 1 else 32, 16, 4, 2, case["splits"])
    monkeypatch.setattr(paged_attention, "attention_shape", lambda *_: shape)
    if case["fp8"]:
        k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))
    spec = AttentionSpec(case["kv_heads"], head_size, head_size, head_size**-0.5, case["window"], case["softcap"])
    out = paged_attention.paged_attention(query, k, v, layout, spec)
    want = reference.paged_attention(
        query, k.float() if case["fp8"] else k, v.float() if case["fp8"] else v, layout, spec
    )
    assert error(out, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("rotated", [16, 8, 0], ids=["whole", "half", "plain"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store_kv(rotated: int, normed: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    slots = torch.tensor([3, -1, 5, 6, 0, 15])
    query, key, value = randn(6, 3, 16), randn(6, 2, 16), randn(6, 2, 16)
    k_cache = torch.full((4, 4, 2, 16), torch.nan, dtype=dtype)
    ours, theirs = (k_cache.clone(), k_cache.clone()), (k_cache.clone(), k_cache.clone())
    if not rotated:
        store_kv.store_kv(key, value, *ours, slots)
        reference.store_kv(key, value, *theirs, slots)
    else:
        angles = torch.rand(6, rotated // 2, generator=generator)
        cos, sin = torch.cat([angles.cos()] * 2, -1).to(dtype), torch.cat([angles.sin()] * 2, -1).to(dtype)
        norms = HeadNorms(randn(16), randn(16), 1e-6, 1.0) if normed else HeadNorms()
        expected = query.clone()
        store_kv.rope_store_kv(query, key, value, *ours, slots, Rotary(cos, sin), norms)
        reference.rope_store_kv(expected, key, value, *theirs, slots, Rotary(cos, sin), norms)
        assert error(query, expected) < TOLERANCE[dtype]
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.isnan(), other.isnan())  # slots that were not named are untouched
        assert error(mine.nan_to_num(), other.nan_to_num()) < TOLERANCE[dtype]


def test_an_fp8_cache_holds_what_is_near() -> None:
    key, value = torch.randn(5, 2, 16), torch.randn(5, 2, 16)
    caches = [torch.zeros(2, 4, 2, 16, dtype=torch.float8_e4m3fn) for _ in range(2)]
    store_kv.store_kv(key, value, *caches, torch.arange(5))
    assert error(caches[0].flatten(0, 1)[:5].float(), key) < 0.05
    assert error(caches[1].flatten(0, 1)[:5].float(), value) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotated", [16, 8, 0], ids=["whole", "half", "plain"])
def test_an_fp8_cache_saturates_and_tells_what_is_not_finite(dtype: torch.dtype, rotated: int) -> None:
    key, value = (300 * torch.randn(6, 2, 16, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    key[0, 0, 3], key[1, 1, 15], value[2, 0, 0], value[3, 1, 7] = torch.nan, torch.inf, -torch.inf, torch.nan
    value[4, 0, :5] = torch.tensor([448.0, 464, 465, -1e30, 0.0001])
    key, value, slots = key.to(dtype), value.to(dtype), torch.tensor([3, -1, 5, 6, 0, 7])
    angles = torch.rand(6, rotated // 2, generator=torch.Generator().manual_seed(2)).repeat(1, 2)
    rotary = Rotary(angles.cos().to(dtype), angles.sin().to(dtype))
    ours, theirs = [[torch.ones(2, 4, 2, 16, dtype=torch.float8_e4m3fn) for _ in range(2)] for _ in range(2)]
    for kernels, caches in ((store_kv, ours), (reference, theirs)):
        if rotated:
            kernels.rope_store_kv(key.clone(), key, value, *caches, slots, rotary)
        else:
            kernels.store_kv(key, value, *caches, slots)
    for mine, other in zip(ours, theirs, strict=True):
        mine, other = mine.float(), other.float()
        assert torch.equal(mine.isnan(), other.isnan())
        assert mine.isnan().any()
        assert mine.nan_to_num().abs().max() == 448
        torch.testing.assert_close(mine.nan_to_num(), other.nan_to_num(), rtol=0.13, atol=0.01)  # one step of fp8


class Rounding(KVCache):
    """A cache in float32 of what one of fp8 would hold."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
    ) -> torch.Tensor:
        key, value = (x.clamp(-448, 448).to(torch.float8_e4m3fn).float() for x in (key, value))
        return super().attend(layer, query, key, value, *rest)


def test_a_model_with_an_fp8_cache_computes_with_keys_and_values_in_fp8() -> None:
    model, device = make_model(make_config(head_dim=16), "cbatch"), torch.device("cpu")
    specs, ids = attention_specs(model), torch.arange(3, 40)
    batch = replace(single(0, 37, 3, 16, device), input_ids=ids)
    want = Runner(model, Rounding(specs, 3, 16, torch.float32, device)).forward(batch).detach()
    plain = Runner(model, KVCache(specs, 3, 16, torch.float32, device)).forward(batch).detach()
    cache = KVCache(specs, 3, 16, torch.float8_e4m3fn, device, backend=INTERPRETER)
    with torch.inference_mode():
        got = Runner(model, cache).forward(batch)
    assert error(got, want) < 1e-3 < error(plain, want)


@pytest.mark.parametrize("size", [1, 96, 576])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(size: int, offset: float, dtype: torch.dtype, with_residual: bool) -> None:
    x, weight, residual = (torch.randn(shape).to(dtype) for shape in ((2, 3, size), (size,), (2, 3, size)))
    ours, theirs = (residual.clone(), residual.clone()) if with_residual else (None, None)
    out = rms_norm.rms_norm(x, weight, 1e-5, ours, offset)
    want = reference.rms_norm(x, weight, 1e-5, theirs, offset)
    assert error(out, want) < TOLERANCE[dtype]
    assert ours is None or torch.equal(ours, theirs)


@pytest.mark.parametrize("size", [1, 100, 3000])
def test_gates(size: int) -> None:
    x = torch.randn(3, 2 * size)
    gate, up = x.double().chunk(2, -1)
    assert error(gated.silu_mul(x), functional.silu(gate) * up) < 1e-6
    assert error(gated.gelu_mul(x), functional.gelu(gate, approximate="tanh") * up) < 1e-6


@pytest.mark.parametrize("num_tokens", [1, 13, 100])
@pytest.mark.parametrize("gelu", [False, True])
def test_experts(num_tokens: int, gelu: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up, down = torch.randn(5, 48, 40, generator=generator), torch.randn(5, 40, 24, generator=generator)
    x = torch.randn(num_tokens, 40, generator=generator)
    weights, topk_ids = torch.rand(num_tokens, 5, generator=generator).topk(2)  # expert 4 may get no token at all
    out = moe.experts(x, gate_up, down, topk_ids, weights, gelu)
    assert error(out, reference.experts(x, gate_up, down, topk_ids, weights, gelu)) < 1e-6


# The sampler


def draw(logits: torch.Tensor, seeds: torch.Tensor | None = None, **settings: float) -> torch.Tensor:
    rows = len(logits)

    def column(name: str, default: float) -> torch.Tensor:
        return torch.full((rows,), float(settings.get(name, default)))

    return sample.sample(
        logits,
        column("temperature", 1),
        column("top_k", 0).int(),
        column("top_p", 1),
        column("min_p", 0),
        torch.arange(rows) if seeds is None else seeds,
        column("position", 0).int(),
        block=64,
    )


PROBS = torch.tensor([0.5, 0.3, 0.15, 0.05])


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.79}, {0, 1}),
        ({"top_p": 0.8}, {0, 1}),
        ({"top_p": 0.81}, {0, 1, 2}),
        ({"top_p": 1}, {0, 1, 2, 3}),
        ({"top_p": 0}, {0}),
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_k": 4}, {0, 1, 2, 3}),
        ({"min_p": 0.5}, {0, 1}),
        ({"min_p": 1}, {0}),
        ({"top_k": 2, "top_p": 0.6}, {0}),  # 0.5 of the 0.8 that top-k leaves is more than 0.6
        ({"top_k": 3, "min_p": 0.5}, {0, 1}),
        ({"temperature": 1e-6}, {0}),
    ],
)
def test_the_sampler_keeps_what_its_filters_say(settings: dict[str, Any], kept: set[int]) -> None:
    assert set(draw(PROBS.log().repeat(100, 1), **settings).tolist()) == kept


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, -30.0]])
    counts = torch.bincount(draw(logits.repeat(1000, 1)), minlength=5)
    expected = logits[0].double().softmax(-1) * 1000
    chi_square = ((counts - expected)[:4] ** 2 / expected[:4]).sum()
    assert counts[4] == 0
    assert chi_square < 16.3  # 0.1 % of draws from the right distribution exceed this at 3 degrees of freedom


def test_draws_depend_on_seed_and_position_only() -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(0))
    alone = [int(draw(logits, torch.tensor([seed]), position=3)) for seed in (5, -(2**62), 2**62)]
    together = draw(logits.repeat(3, 1), torch.tensor([2**62, 5, -(2**62)]), position=3).tolist()
    assert together == [alone[2], alone[0], alone[1]]
    positions = {int(draw(logits, torch.tensor([5]), position=position)) for position in range(20)}
    assert len(positions) > 5


def test_temperature_zero_is_the_lowest_of_the_largest_whatever_the_filters_say() -> None:
    logits = torch.zeros(3, 200)
    logits[0, [70, 150]] = 5.0
    logits[1] = -torch.inf
    logits[1, 199] = -1e30
    assert draw(logits, temperature=0, top_p=0.1, top_k=7).tolist() == [70, 199, 0]


@pytest.mark.parametrize("temperature", [0, 1])
def test_rows_that_are_no_numbers_are_told(temperature: float) -> None:
    logits = torch.randn(4, 200)
    logits[0, 150] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    tokens = draw(logits, temperature=temperature).tolist()
    assert tokens[:3] == [sample.INVALID] * 3
    assert tokens[3] >= 0


def test_penalties_and_least_tokens_on_the_device_are_those_of_the_host() -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 3.0},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"min_tokens": 9, "stop_token_ids": (4, 10**6)},
        {"repetition_penalty": 0.5, "frequency_penalty": -1.0, "min_tokens": 9},
    ]
    sequences = []
    for row, params in enumerate(settings):
        seq = Sequence(make_request(row, [3, 5, 5, 9 + row], **params), max_len=1000)
        seq.token_ids += [7, 7, 5][: row + 1]
        sequences.append(seq)
    logits = torch.randn(len(settings), 40, generator=torch.Generator().manual_seed(0))
    logits[:, [2, 4]] = 9.0  # an end token and a stop token that all rows would draw
    host = logits.clone()
    host[[3, 3, 4], [4, 2, 2]] = -torch.inf
    sampling = sampling_of(sequences, [2], logits.shape[-1])
    assert sampling.penalties is not None
    penalized = host[sampling.penalties.rows]
    sampler._penalize(penalized, sampling.penalties)
    host[sampling.penalties.rows] = penalized
    torch.testing.assert_close(sampler._adjusted_on_gpu(logits.clone(), sampling), host)
    expected = sampler.sample(logits.clone(), sampling, ops.choose(logits.device)).token_ids
    assert torch.equal(sampler.sample(logits.clone(), sampling, INTERPRETER).token_ids, expected)
