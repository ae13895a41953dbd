"""The C kernels against float64, compiled for this CPU and for older ones; unused slots of the cache are full of NaN."""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cbatch.kernels import reference, sdpa
from cbatch.kernels.attention import AttentionSpec, HeadNorms, Rotary
from cbatch.kernels.cpu import build, native
from cbatch.model.batch import Batch
from cbatch.model.ops import Backend, choose
from tests.conftest import Cbatch
from tests.drive import make_engine, make_request, run
from tests.layouts import make_layout
from tests.tiny import generate, make_config, make_model

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc"))), reason="no C compiler")

CPUS = {"AVX512": ["native", "x86-64-v3", "x86-64-v2"], "AVX2": ["native", "x86-64-v2"]}
DTYPES = [torch.float32, torch.bfloat16]
UNIT = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}
KEYS_AND_VALUES = "keys", "values"
NAN, INF = torch.nan, torch.inf
ROW = '{"prompt": "the rain"}\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


@pytest.fixture(scope="module", params=CPUS.get(torch.backends.cpu.get_cpu_capability(), ["native"]))
def c(request: pytest.FixtureRequest, folder: Path) -> native.Library:
    return native.load(folder, request.param)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


# Attention


@dataclass(frozen=True)
class Case:
    """Sequences given as (tokens in the cache before this step, tokens of this step)."""

    sequences: Sequence[tuple[int, int]]
    heads: tuple[int, int] = (4, 2)
    sizes: tuple[int, int] = (64, 64)
    block_size: int = 32
    window: int = 0
    softcap: float = 0.0
    dtype: torch.dtype = torch.float32
    loud: float = 1.0  # factor of all scores
    int8: bool = False  # the cache


def attend(c: native.Library, case: Case, poison: float = NAN) -> tuple[Tensor, Tensor, Tensor]:
    """The kernels' output, the right output, and the largest there could be, if all values had one sign.

    With a cache of int8 the right output is that of `attend_to_bytes`.
    """
    dtype, block_size, (num_heads, num_kv_heads) = case.dtype, case.block_size, case.heads
    lengths = [before + now for before, now in case.sequences]
    needed = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(needed) + 2).tolist()
    tables = torch.full((len(lengths), max(needed) + 1), 1 << 40)
    shapes = [(len(order), block_size, num_kv_heads, size) for size in case.sizes]
    caches = [make_cache(shape, dtype, case.int8, poison) for shape in shapes]
    plain = [torch.full(shape, poison, dtype=torch.float64) for shape in shapes]
    spans, start = [], 0
    for s, (before, now) in enumerate(case.sequences):
        tables[s, : needed[s]] = torch.tensor([order.pop() for _ in range(needed[s])])
        key, value = (torch.randn(lengths[s], num_kv_heads, size).to(dtype) for size in case.sizes)
        positions = torch.arange(lengths[s])
        slots = tables[s, positions // block_size] * block_size + positions % block_size
        for first, last in ((0, before), (before, lengths[s])):
            c.store_kv(key[first:last], value[first:last], *caches, slots[first:last])
        sdpa.store_kv(key.double(), value.double(), *plain, slots)
        spans.append((start, start + now, lengths[s]))
        start += now
    query = (torch.randn(start, num_heads, case.sizes[0]) * case.loud).to(dtype)
    layout = make_layout(tables, spans)
    spec = AttentionSpec(num_kv_heads, *case.sizes, case.sizes[0] ** -0.5, case.window, case.softcap)
    got = c.paged_attention(query, *caches, layout, spec)
    want, most = (
        sdpa.paged_attention(query.double(), plain[0], values, layout, spec) for values in (plain[1], plain[1].abs())
    )
    assert got.dtype == dtype
    if case.int8:
        assert (got - want).norm() <= 0.05 * most.norm() or case.loud > 1
        want = attend_to_bytes(query, *map(read_back, caches, KEYS_AND_VALUES), layout, spec)
    return got.double(), want, most


def attend_to_bytes(query: Tensor, keys: Tensor, values: Tensor, layout: Batch, spec: AttentionSpec) -> Tensor:
    """Attention in float64 with the rows of the query in 127 steps, and with each block's weights, times the scales of
    its values, in 255. Caches [num_blocks, block_size, H_kv, D + 1], a scale behind the values."""
    (block_size, num_kv_heads), (scale, window, softcap) = keys.shape[1:3], spec[3:]
    out = torch.empty(*query.shape[:2], values.shape[3] - 1, dtype=torch.float64)
    for table, (start, stop, length) in zip(layout.block_tables, layout.spans, strict=True):
        first = max(0, length - (stop - start) - window + 1) // block_size if window else 0
        blocks = table[first : -(-length // block_size)]
        k, v = (x[blocks].flatten(0, 1).permute(1, 0, 2).double() for x in (keys, values))  # [H_kv, n, D + 1]
        positions = torch.arange(first * block_size, first * block_size + k.shape[1])
        own = torch.arange(length - (stop - start), length)[:, None]
        seen = (positions <= own) & (positions > (own - window if window else -1))
        q = in_steps(query[start:stop].float(), 127).transpose(0, 1).unflatten(0, (num_kv_heads, -1))  # [H_kv, G, t, D]
        scores = (q @ (k[..., :-1] * k[..., -1:]).nan_to_num().transpose(1, 2)[:, None]) * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        weights = scores.masked_fill(~seen, -INF).softmax(-1) * v[..., -1].nan_to_num()[:, None, None]
        steps = in_steps(weights.unflatten(-1, (-1, block_size)).float(), 255).flatten(-2)
        out[start:stop] = (steps @ v[..., :-1].nan_to_num()[:, None]).flatten(0, 1).transpose(0, 1)
    return out


def in_steps(x: Tensor, most: int) -> Tensor:
    """float32 rounded to whole parts, `most` at most, of the largest of each row."""
    scale = x.abs().amax(-1, keepdim=True) / most
    return (x.double() * torch.where(scale > 1e-30, 1 / scale, 0)).round() * scale


def check(c: native.Library, case: Case, poison: float = NAN) -> None:
    """Compare the kernels with float64. bfloat16 rounds each weight and each output, by 2^-8 of itself at most; a value
    halfway between two bytes may become either."""
    for dtype in DTYPES:
        tolerance = 1e-5 if dtype == torch.float32 else 2**-7 + 1e-4
        got, want, most = attend(c, replace(case, dtype=dtype), poison)
        assert ((got - want).abs() <= most * tolerance).all()
        got, want, most = attend(c, replace(case, dtype=dtype, int8=True), poison)
        off = (got - want).abs() - most * tolerance
        assert (off <= 1e-6).double().mean() > 0.9
        assert off.max() < 0.02


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_sequences_around_block_edges(c: native.Library, block_size: int) -> None:
    edges = [block_size + by for by in (-1, 0, 1)]
    fresh = [(0, 1), (0, 2), *((0, length) for length in edges)]
    later = [(length, now) for length in (1, *edges, 3 * block_size) for now in (1, 2)]
    check(c, Case([*fresh, *later], block_size=block_size))


@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (8, 2), (14, 2), (16, 1)])
@pytest.mark.parametrize("size", [16, 64, 80, 96, 128, 256])
def test_head_sizes_and_groups(c: native.Library, size: int, heads: tuple[int, int]) -> None:
    check(c, Case([(0, 1), (40, 1), (29, 13), (31, 1)], heads, (size, size)))


@pytest.mark.parametrize("sizes", [(48, 16), (16, 112)])
def test_keys_and_values_of_different_sizes(c: native.Library, sizes: tuple[int, int]) -> None:
    check(c, Case([(0, 5), (40, 1), (31, 3)], sizes=sizes))


@pytest.mark.parametrize("softcap", [0.0, 0.5, 30.0])
@pytest.mark.parametrize("window", [0, 1, 2, 31, 32, 33, 1000])
def test_windows_and_soft_caps(c: native.Library, window: int, softcap: float) -> None:
    check(c, Case([(0, 70), (95, 1), (96, 34), (31, 2), (200, 1)], window=window, softcap=softcap))


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_prompts_of_hundreds_of_tokens_beside_decodes(c: native.Library, poison: float) -> None:
    check(c, Case([(0, 331), (700, 1), (17, 45), (64, 33), (1, 1)], (6, 2), block_size=64), poison)


def test_a_batch_of_decodes_only(c: native.Library) -> None:
    check(c, Case([(length, 1) for length in range(75)], (3, 1)))


@pytest.mark.parametrize("seed", range(5))
def test_anything_else(c: native.Library, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(6):
        kv_heads, size = rng.randint(1, 3), 16 * rng.randint(1, 9)
        sequences = [(rng.choice([0, rng.randint(0, 150)]), rng.choice([1, rng.randint(1, 90)])) for _ in range(5)]
        windows, softcaps = [0, rng.randint(1, 120)], [0.0, rng.uniform(0.5, 50)]
        check(
            c,
            Case(
                sequences,
                (kv_heads * rng.randint(1, 16), kv_heads),
                (size, rng.choice([size, 16 * rng.randint(1, 9)])),
                32 * rng.randint(1, 4),
                rng.choice(windows),
                rng.choice(softcaps),
            ),
        )


def test_the_loops_of_the_reference_agree_too(c: native.Library) -> None:
    query, key, value = (torch.randn(40, heads, 32) for heads in (4, 2, 2))
    caches, plain = [[torch.full((2, 32, 2, 32), NAN) for _ in range(2)] for _ in range(2)]
    slots = torch.cat([torch.arange(32, 64), torch.arange(8)])
    c.store_kv(key, value, *caches, slots)
    reference.store_kv(key, value, *plain, slots)
    layout, spec = make_layout(torch.tensor([[1, 0]]), [(0, 40, 40)]), AttentionSpec(2, 32, 32, 0.2, 9, 5.0)
    assert sorted(layout.tasks.tolist()) == [[0, 0, 32], [0, 32, 40]]
    got = c.paged_attention(query, *caches, layout, spec)
    want = reference.paged_attention(query, *plain, layout, spec)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loud", [1e3, 1e30])
@pytest.mark.parametrize("int8", [False, True])
def test_huge_scores_do_not_overflow(c: native.Library, dtype: torch.dtype, loud: float, int8: bool) -> None:
    """One key has all the weight, wherever it is."""
    got, want, _ = attend(c, Case([(0, 1), (45, 1), (31, 34)], dtype=dtype, loud=loud, int8=int8))
    same = ((got - want).abs() < 0.02 * (1 + want.abs())).all(-1)
    assert same.double().mean() > 0.99  # of two keys that are as good the other may win


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [False, True])
def test_a_nan_stays_in_its_sequence(c: native.Library, dtype: torch.dtype, int8: bool) -> None:
    caches = [make_cache((3, 32, 1, 16), dtype, int8, NAN) for _ in range(2)]
    query, key, value = (torch.randn(9, heads, 16).to(dtype) for heads in (2, 1, 1))
    slots = torch.tensor([64, 65, 66, 0, 1, 2, 32, 33, 34])
    layout = make_layout(torch.tensor([[2], [0], [1]]), [(0, 3, 3), (3, 6, 3), (6, 9, 3)])
    for poisoned in (query, key, value):
        kept = poisoned[4].clone()
        poisoned[4, 0, 7] = NAN
        c.store_kv(key, value, *caches, slots)
        out = c.paged_attention(query, *caches, layout, AttentionSpec(1, 16, 16, 0.25))
        assert out[5 if poisoned is not query else 4].isnan().any()
        assert out[[0, 1, 2, 6, 7, 8]].isfinite().all()
        poisoned[4] = kept


@pytest.mark.parametrize("int8", [False, True])
def test_blocks_that_the_window_has_left_are_not_read(c: native.Library, int8: bool) -> None:
    caches = [make_cache((1, 32, 1, 16), torch.float32, int8, NAN) for _ in range(2)]
    c.store_kv(torch.ones(4, 1, 16), torch.full((4, 1, 16), 2.0), *caches, torch.arange(4))
    layout = make_layout(torch.tensor([[1 << 40, 1 << 40, 0]]), [(0, 1, 68)])
    out = c.paged_attention(torch.ones(1, 1, 16), *caches, layout, AttentionSpec(1, 16, 16, 1.0, window=4))
    assert torch.equal(out, torch.full((1, 1, 16), 2.0))


# The cache


def make_cache(shape: tuple[int, ...], dtype: torch.dtype, int8: bool, fill: float) -> Tensor:
    """[num_blocks, block_size, H_kv, D], or bytes with room for a scale."""
    if int8:
        return torch.full((*shape[:3], shape[3] // 4 + 1), fill, dtype=torch.float32).view(torch.int8)
    return torch.full(shape, fill, dtype=dtype)


def read_back(cache: Tensor, kind: str) -> Tensor:
    """A cache in the layout of the C kernels -> [num_blocks, block_size, H_kv, D]; of bytes as float32, D + 1 with the scale."""
    (num_blocks, block_size, heads, size), unit = cache.shape, UNIT[cache.dtype]
    blocks = cache.view(num_blocks, heads, -1)
    scales = blocks[..., block_size * (size - 4) :] if unit == 4 else blocks[..., :0]
    if unit == 4:
        size -= 4
        blocks = blocks[..., : block_size * size]
    if kind == "keys":
        places = blocks.unflatten(-1, (block_size // 32, size // unit, 32, unit)).permute(0, 2, 4, 1, 3, 5)
    else:
        places = blocks.unflatten(-1, (block_size // unit, size, unit)).permute(0, 2, 4, 1, 3)
    values = places.reshape(num_blocks, block_size, heads, size)
    if unit < 4:
        return values
    values = (values.view(torch.uint8).float() - 128) if kind == "keys" else values.float()
    return torch.cat([values, scales.contiguous().view(torch.float32).transpose(1, 2)[..., None]], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sizes", "block_size"), [((16, 16), 32), ((80, 48), 64), ((128, 128), 128)])
def test_a_token_is_stored_in_its_slot_and_nowhere_else(
    c: native.Library, dtype: torch.dtype, sizes: tuple[int, int], block_size: int
) -> None:
    merged = torch.randn(37, 5 * sum(sizes)).to(dtype)  # key and value are views of it
    key, value = (x.view(37, 5, -1) for x in merged.split([5 * size for size in sizes], -1))
    caches, plain = [[torch.full((3, block_size, 5, n), 7.0, dtype=dtype) for n in sizes] for _ in range(2)]
    slots = torch.randperm(3 * block_size)[:37]
    slots[[0, 9, 36]] = -1
    c.store_kv(key, value, *caches, slots)
    reference.store_kv(key, value, *plain, slots)
    assert all(map(torch.equal, map(read_back, caches, KEYS_AND_VALUES), plain))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sizes", "block_size"), [((16, 16), 32), ((80, 48), 64), ((128, 128), 128)])
def test_a_token_is_stored_as_bytes_and_a_scale(
    c: native.Library, dtype: torch.dtype, sizes: tuple[int, int], block_size: int
) -> None:
    key, value = (torch.randn(37, 5, size).to(dtype) for size in sizes)
    key[3, 1], value[4, 2], key[5, 0, 7], value[6, 0, 3], value[7, 4, 1] = 0, 0, 1e4, -1e-4, NAN
    caches = [make_cache((3, block_size, 5, size), dtype, True, 7.0) for size in sizes]
    slots = torch.randperm(3 * block_size)[:37]
    slots[[0, 9, 36]] = -1
    untouched = [cache.clone() for cache in caches]
    c.store_kv(key, value, *caches, slots)
    free = [slot for slot in range(3 * block_size) if slot not in slots]
    for x, now, before, kind in zip((key, value), caches, untouched, KEYS_AND_VALUES, strict=True):
        stored, other = (read_back(cache, kind).flatten(0, 1) for cache in (now, before))
        assert torch.equal(stored[free], other[free])
        rows, x = stored[slots[slots >= 0]], x[slots >= 0].float()
        bytes_, scales = rows[..., :-1], rows[..., -1:]
        torch.testing.assert_close(scales, x.abs().amax(-1, keepdim=True) / 127, rtol=1e-6, atol=0, equal_nan=True)
        assert ((bytes_ * scales - x).abs() <= scales * 0.50001)[~scales.isnan().expand_as(x)].all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("size", "rotary"), [(16, 16), (64, 64), (32, 12), (80, 32), (96, 24), (128, 128)])
def test_query_and_key_are_normed_and_rotated(
    c: native.Library, dtype: torch.dtype, norms: bool, size: int, rotary: int
) -> None:
    merged = torch.randn(37, 10 * size).to(dtype)
    query, key, value = (x.view(37, -1, size) for x in merged.split([6 * size, 2 * size, 2 * size], -1))
    angles = torch.randn(37, rotary // 2).repeat(1, 2)
    rotation = Rotary(angles.cos().to(dtype), angles.sin().to(dtype))
    weights = (torch.randn(size).to(dtype), torch.randn(size).to(dtype)) if norms else (None, None)
    head_norms = HeadNorms(*weights, 1e-6, 1.0)
    caches, plain = [[torch.full((2, 32, 2, size), 7.0, dtype=dtype) for _ in range(2)] for _ in range(2)]
    slots = torch.randperm(64)[:37]
    slots[11] = -1
    rotated = query.clone()
    reference.rope_store_kv(rotated, key, value, *plain, slots, rotation, head_norms)
    untouched = merged[:, 6 * size :].clone()
    c.rope_store_kv(query, key, value, *caches, slots, rotation, head_norms)
    assert torch.equal(merged[:, 6 * size :], untouched)
    keys, values = map(read_back, caches, KEYS_AND_VALUES)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(query, rotated, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(keys, plain[0], rtol=tolerance, atol=tolerance)
    assert torch.equal(values, plain[1])


# Rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (7, 48), (60, 576)])
def test_rms_norm(c: native.Library, dtype: torch.dtype, offset: float, rows: int, size: int) -> None:
    x = torch.randn(2, rows, 3 * size).to(dtype)[..., size : 2 * size]  # rows with a gap between them
    weight, residual = torch.randn(size).to(dtype), torch.randn(2, rows, size).to(dtype)
    x[0, 0], sum_ = 0, residual.clone()
    tolerance = 1e-5 if dtype == torch.float32 else 0.01
    for ours, own in ((None, None), (residual, sum_)):
        got = c.rms_norm(x, weight, 1e-5, ours, offset)
        torch.testing.assert_close(
            got, reference.rms_norm(x, weight, 1e-5, own, offset), rtol=tolerance, atol=tolerance
        )
    assert torch.equal(residual, sum_)


def gate_of(y: Tensor, gate: str | None) -> Tensor:
    return Backend().gated(y, gate) if gate else y


def slack(x: Tensor, weight: Tensor, bias: Tensor, gate: str | None, error: Tensor) -> Tensor:
    """How far rounding to bfloat16 may move a product that is off by `error` already. All in float64."""
    y = functional.linear(x, weight, bias)
    error = error + 2**-8 * y.abs() + 1e-5 * functional.linear(x.abs(), weight.abs())
    if not gate:
        return error
    (first, up), (off, up_off) = y.chunk(2, -1), error.chunk(2, -1)
    act = gate_of(torch.cat([first, torch.ones_like(first)], -1), gate)
    return 1.2 * off * (up.abs() + up_off) + (act.abs() + 1.2 * off) * up_off + 2**-7 * (act * up).abs() + 1e-6


@pytest.mark.parametrize(
    ("n", "k", "gate"),
    [(32, 16, None), (100, 576, None), (7, 48, None), (64, 16, "silu"), (160, 96, "silu"), (160, 96, "gelu")],
)
def test_products_in_bfloat16(c: native.Library, n: int, k: int, gate: str | None) -> None:
    weight, bias = torch.randn(n, k).bfloat16(), torch.randn(n).bfloat16()
    packed = c.pack(weight, bias, gate, int8=False)
    for rows in [*range(14), 24, 25, 50]:
        x = torch.randn(rows, 2 * k).bfloat16()[:, :k]
        exact = x.double(), weight.double(), bias.double()
        want, got = gate_of(functional.linear(*exact), gate), c.linear(x, packed)
        assert got.dtype == torch.bfloat16
        assert ((got.double() - want).abs() <= slack(*exact, gate, torch.zeros(()))).all()


def test_a_product_takes_any_shape_and_layout_of_its_input(c: native.Library) -> None:
    weight = torch.randn(40, 48).bfloat16()
    packed = c.pack(weight, None, None, int8=False)
    x = torch.randn(2, 3, 48).bfloat16()
    flat = c.linear(x.view(6, 48), packed)
    assert torch.equal(c.linear(x, packed), flat.view(2, 3, 40))
    assert torch.equal(c.linear(x.transpose(0, 1), packed), flat.view(2, 3, 40).transpose(0, 1))
    assert torch.equal(c.linear(x.view(6, 48).T.contiguous().T, packed), flat)
    assert torch.equal(c.linear(x[0, :1].expand(5, -1), packed), flat[:1].expand(5, -1))
    with pytest.raises(AssertionError):
        c.linear(x.float(), packed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(32, 16), (100, 576), (7, 64)])
def test_products_of_bytes_are_exact(c: native.Library, dtype: torch.dtype, n: int, k: int) -> None:
    """Whole numbers up to 127, times a power of two for each row, are quantized without an error."""
    x, weight = (torch.randint(-127, 128, (rows, k)) for rows in (30, n))
    x[:, 0], weight[:, 1] = 127, -127
    x[1], x[2, 1:], weight[3] = 0, 0, 0
    x[4], weight[4] = 127, 127  # the largest sum of bytes there is
    x_scale, w_scale = (2.0 ** torch.randint(-9, 9, (rows, 1)) for rows in (30, n))
    packed = c.pack((weight * w_scale).to(dtype), None, None, int8=True)
    got = c.linear((x * x_scale).to(dtype), packed)
    assert torch.equal(got, ((x.double() @ weight.double().T).float() * x_scale * w_scale.T).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", [None, "silu", "gelu"])
def test_quantization_errs_by_half_a_step_at_most(c: native.Library, dtype: torch.dtype, gate: str | None) -> None:
    weight, bias = torch.randn(96, 160).to(dtype), torch.randn(96).to(dtype)
    x = torch.randn(50, 160).to(dtype)
    x[3], x[4, 7], weight[5], weight[6, 3] = 0, 1e4, 0, -1e3
    got = c.linear(x, c.pack(weight, bias, gate, int8=True)).double()
    exact = x.double(), weight.double(), bias.double()
    x_step, w_step = (matrix.abs().amax(1, keepdim=True) / 127 for matrix in exact[:2])
    half_steps = x_step * exact[1].abs().sum(1) + w_step.T * exact[0].abs().sum(1, keepdim=True)
    error = half_steps / 2 + 160 * x_step * w_step.T / 4
    assert ((got - gate_of(functional.linear(*exact), gate)).abs() <= slack(*exact, gate, error)).all()
    if gate is None:
        assert torch.equal(got[3], exact[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_do_not_hide_what_is_not_finite(c: native.Library, dtype: torch.dtype) -> None:
    packed = c.pack(torch.randn(32, 64).to(dtype), None, None, int8=True)
    x = torch.randn(5, 64).to(dtype)
    clean = c.linear(x, packed)
    x[1, 3], x[2, 60], x[3, 17] = NAN, INF, -INF
    got = c.linear(x, packed)
    assert not got[1:4].isfinite().any()
    assert torch.equal(got[[0, 4]], clean[[0, 4]])


def test_only_what_fits_is_packed(c: native.Library) -> None:
    assert c.can_pack(torch.empty(7, 48), None, int8=True)
    assert not c.can_pack(torch.empty(7, 40), None, int8=True)
    assert not c.can_pack(torch.empty(40, 48), "silu", int8=True)
    assert not c.can_pack(torch.empty(7, 48, dtype=torch.float16), None, int8=True)
    assert not c.can_pack(torch.empty(7, 48), None, int8=False)
    assert not c.can_pack(torch.empty(1, 2**16 + 16), None, int8=True)  # the sum could leave 32 bits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 1003])
def test_argmax(c: native.Library, dtype: torch.dtype, size: int) -> None:
    logits = torch.randn(60, size).to(dtype).round(decimals=1)  # with many ties
    places = [(row, random.Random(row).randrange(size)) for row in range(60)]
    for row, place in places[10:50]:
        logits[row, place] = (NAN, INF, -INF, 99.0)[row % 4]
    logits[50], logits[51], logits[52] = -INF, 0.0, -0.0
    rows = logits.double().tolist()
    want = [-1 if any(x != x for x in row) or not abs(max(row)) < INF else row.index(max(row)) for row in rows]
    assert c.argmax(logits).tolist() == want
    assert c.argmax(logits.T.contiguous().T).tolist() == want


# Drawing a token


def shares(logits: Tensor, settings: Sequence[float], by: float) -> np.ndarray:
    """The probability of each token of a row, in float64, with filters that cut `by` less than asked for."""
    temperature, top_k, top_p, min_p = settings
    scores = logits.double().numpy() / temperature
    weights = np.exp(scores - scores.max())
    order = np.argsort(-weights, kind="stable")[: int(top_k)]
    ranked = weights[order] / weights[order].sum()
    nucleus = (np.cumsum(ranked) - ranked < top_p + by) | (top_p == 1)
    nucleus[0] = True
    kept = order[nucleus & (ranked >= min_p * (1 - by) * ranked[0])]
    share = np.zeros(len(weights))
    share[kept] = weights[kept] / weights[kept].sum()
    return share


def check_draws(c: native.Library, logits: Tensor, draws: Sequence[tuple[float, ...]]) -> None:
    """Each token is that of float64; sums and filters may be 3e-6 off."""
    tokens = c.sample(logits, torch.tensor(draws, dtype=torch.float64)).tolist()
    for token, (row, *settings, uniform) in zip(tokens, draws, strict=True):
        possible = []
        for by in (-3e-6, 0, 3e-6):
            share = shares(logits[int(row)], settings, by)
            above = share[: token + 1].sum()
            possible.append(share[token] > 0 and above - share[token] - 3e-6 <= uniform < above + 3e-6)
        assert any(possible), (token, row, settings, uniform)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 5, 16, 300, 1003, 49_152])
def test_tokens_are_drawn_as_in_float64(c: native.Library, dtype: torch.dtype, size: int) -> None:
    logits = (torch.randn(8, size) * 3).to(dtype)
    logits[1::2] = (logits[1::2] * 4).round() / 4  # many ties
    logits[2:4, 1 : size // 2] = -INF
    rng = random.Random(size)
    draws = [
        (
            rng.randrange(8), rng.choice((0.01, 0.3, 0.8, 1, 5)), rng.choice((1, 2, 50, 1000, size, size + 9)),
            rng.choice((0, 1e-4, 0.5, 0.95, 1, 1)), rng.choice((0, 0, 0.05, 1)), rng.random(),
        )
        for _ in range(25 if size > 2000 else 300)
    ]  # fmt: skip
    check_draws(c, logits, draws)


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_equal_tokens_the_lower_ids_are_kept(c: native.Library, dtype: torch.dtype) -> None:
    logits = torch.full((2, 1003), 2.5, dtype=dtype)
    logits[1, 100:] = 2.0
    uniforms = np.linspace(0, 1, 5000, endpoint=False)

    def drawn(row: int, top_k: int, top_p: float, min_p: float) -> set[int]:
        draws = [(row, 1.0, top_k, top_p, min_p, uniform) for uniform in uniforms]
        return set(c.sample(logits, torch.tensor(draws, dtype=torch.float64)).tolist())

    assert drawn(0, 10, 1, 0) == set(range(10))
    assert drawn(0, 1003, 0.5, 0) == set(range(502))
    assert drawn(0, 100, 0.5, 0) == set(range(50))
    assert drawn(0, 1003, 0, 0) == drawn(0, 1, 1, 0) == {0}
    assert drawn(0, 1003, 1, 1) == drawn(0, 2000, 1, 0) == set(range(1003))
    assert drawn(1, 130, 1, 0) == set(range(130))
    assert drawn(1, 1003, 1, 1) == set(range(100))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "settings", [(1, 300, 1, 0), (0.6, 300, 1, 0), (1, 40, 1, 0), (1, 300, 0.8, 0), (3, 100, 0.9, 0.2)]
)
def test_quantiles_add_up_to_the_distribution(c: native.Library, dtype: torch.dtype, settings: list[float]) -> None:
    logits = torch.randn(1, 300).to(dtype)
    draws = [(0, *settings, (n + 0.5) / 20_000) for n in range(20_000)]
    counts = np.bincount(c.sample(logits, torch.tensor(draws, dtype=torch.float64)), minlength=300)
    assert (abs(counts - 20_000 * shares(logits[0], settings, 0)) < 1.1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ends_of_the_unit_interval_fall_on_possible_tokens(c: native.Library, dtype: torch.dtype) -> None:
    logits = torch.full((1, 1003), -INF, dtype=dtype)
    logits[0, [700, 900]] = 1.0
    draws = [(0, temperature, 1003, 1, 0, u) for temperature in (1e-300, 1, 1e300) for u in (0, 0.49, 0.51, 1 - 2**-53)]
    assert c.sample(logits, torch.tensor(draws, dtype=torch.float64)).tolist() == [700, 700, 900, 900] * 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 20, 1002])
def test_no_token_is_drawn_where_logits_are_not_finite(c: native.Library, dtype: torch.dtype, place: int) -> None:
    logits = torch.randn(5, 1003).to(dtype)
    logits[1, place], logits[2, place], logits[3] = NAN, INF, -INF
    draws = torch.tensor([(row, t, 50, 0.9, 0.1, 0.5) for t in (0, 1) for row in range(5)], dtype=torch.float64)
    tokens = c.sample(logits, draws)
    assert tokens.view(2, 5)[:, 1:4].eq(-1).all()
    assert tokens.view(2, 5)[:, [0, 4]].ge(0).all()
    assert torch.equal(tokens[:5], c.argmax(logits))
    backwards = torch.arange(9, -1, -1)
    assert torch.equal(c.sample(logits.T.contiguous().T, draws[backwards]), tokens[backwards])


# Threads

_THREADS = """
import os, sys, torch
from pathlib import Path
from cbatch.kernels.attention import AttentionSpec
from cbatch.kernels.cpu import native
from tests.layouts import make_layout
torch.set_num_threads(1)
c = native.load(Path(sys.argv[1]))
x, w, weight = (torch.randn(*shape).bfloat16() for shape in ((70, 512), (640, 512), (512,)))
packed, bytes_ = (c.pack(w, None, None, int8) for int8 in (False, True))
query, key, value = (torch.randn(70, heads, 64).bfloat16() for heads in (8, 2, 2))
caches = [torch.zeros(3, 32, 2, 64).bfloat16() for _ in range(2)]
bytes_caches = [torch.zeros(3, 32, 2, 68, dtype=torch.int8) for _ in range(2)]
layout = make_layout(torch.tensor([[0, 2, 1]]), [(0, 70, 70)])
draws = torch.tensor([[row, 0.8, 100, 0.9, 0.01, row / 70] for row in range(70)], dtype=torch.float64)
def outs():
    attended = []
    for both in (caches, bytes_caches):
        c.store_kv(key, value, *both, torch.arange(70))
        attended.append(c.paged_attention(query, *both, layout, AttentionSpec(2, 64, 64, 0.1)))
    normed = c.rms_norm(x, weight, 1e-5, None, 0.0)
    products = c.linear(x, packed), c.linear(x, bytes_)
    return [*caches, *bytes_caches, *attended, normed, *products, c.argmax(x), c.sample(x, draws)]
def threads():
    return len(os.listdir("/proc/self/task"))
before, alone = threads(), outs()
print(threads() - before)
for count in (2, 3):
    torch.set_num_threads(count)
    assert all(map(torch.equal, alone, outs()))
    print(threads() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_threads_are_those_of_torch_and_change_no_result(folder: Path) -> None:
    command = [sys.executable, "-c", _THREADS, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "4"})
    assert (done.stdout.split(), done.stderr) == (["0", "1", "2"], "")


# Compiling


def compiled(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def test_compiled_once_and_again_only_if_damaged(tmp_path: Path) -> None:
    native.load(tmp_path)
    [path] = compiled(tmp_path)
    content, made = path.read_bytes(), path.stat().st_mtime_ns
    native.load(tmp_path)
    assert path.stat().st_mtime_ns == made
    path.unlink()  # in place it would change under the library that is loaded
    path.write_bytes(content[: len(content) // 2])
    native.load(tmp_path)
    assert compiled(tmp_path) == [path]
    assert path.read_bytes()[:4] == b"\x7fELF"
    assert path.stat().st_size == len(content)


def test_processes_that_compile_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from cbatch.kernels.cpu import build; build.load(Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path / "cache")]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [(process.communicate()[1], process.returncode) for process in running] == [("", 0)] * 2
    assert len(compiled(tmp_path / "cache")) == 1


def why_not(folder: Path) -> str:
    with pytest.raises(build.Unavailable) as caught:
        native.load(folder)
    return str(caught.value)


def test_without_a_compiler_the_text_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    assert why_not(tmp_path) == "no C compiler (gcc or cc)"


@pytest.mark.parametrize(
    ("ending", "said"), [("echo no licence >&2; exit 1", "no licence"), ("exit 3", "ended with 3")]
)
def test_a_compiler_that_fails_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, said: str
) -> None:
    script = tmp_path / "compiler"
    script.write_text(f"#!/bin/sh\n{ending}\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    assert why_not(tmp_path / "cache").startswith(f"{script} fails: ")
    assert said in why_not(tmp_path / "cache")
    assert compiled(tmp_path / "cache") == []


def test_a_cache_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "file" in why_not(tmp_path / "file" / "cache")


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        assert "fails" in why_not(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert compiled(tmp_path) == []
    native.load(tmp_path)


def test_without_the_sources_as_in_a_zip_archive_nothing_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_SOURCES", tmp_path / "nowhere")
    assert "nowhere" in why_not(tmp_path)
    assert compiled(tmp_path) == []


def test_a_run_without_a_compiler_says_so_and_goes_on(tmp_path: Path, tiny_model: Path, cbatch: Cbatch) -> None:
    environ = {"PATH": "", "CC": "", "CBATCH_CACHE": str(tmp_path)}
    done = cbatch("run", "-", "-o", "-", "-m", tiny_model, "--raw", "--max-tokens", "3", stdin=ROW, **environ)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 1)
    assert "without C kernels, which makes it slower: no C compiler (gcc or cc)" in done.stderr


def test_without_the_kernels_a_model_runs_on_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CBATCH_CACHE", str(tmp_path))
    backend = choose.__wrapped__(torch.device("cpu"))
    config = make_config(head_dim=16)
    model, own = make_model(config, "cbatch"), make_model(config, "eager")
    assert not backend.has_kernels
    assert "no C compiler" in backend.missing
    engine = make_engine(model, block_size=32, backend=backend)
    [done] = run(engine, [make_request(0, list(range(3, 43)), max_tokens=5)])
    assert list(done.token_ids) == generate(own, list(range(3, 43)), 5)
