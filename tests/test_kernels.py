"""Paged attention against the loops of `reference.py`, in float64, on awkward shapes and a poisoned cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from cbatch.kernels import reference, sdpa
from cbatch.kernels.attention import AttentionSpec
from tests.layouts import make_layout


@dataclass(frozen=True)
class Case:
    """Sequences given as (tokens in the cache before this step, tokens of this step)."""

    sequences: Sequence[tuple[int, int]]
    num_kv_heads: int = 2
    group: int = 2
    key_size: int = 16
    value_size: int = 16
    block_size: int = 4
    window: int = 0
    softcap: float = 0.0


def both(case: Case, poison: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of sdpa and of the reference; the cache holds `poison` wherever no sequence has stored a token."""
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = [before + now for before, now in case.sequences]
    needed = [-(-length // case.block_size) for length in lengths]
    num_blocks = sum(needed) + 3
    free = rng.sample(range(num_blocks), num_blocks)
    tables = torch.tensor([[rng.randrange(num_blocks) for _ in range(max(needed) + 2)] for _ in lengths])
    k_cache = torch.full((num_blocks, case.block_size, case.num_kv_heads, case.key_size), poison, dtype=torch.float64)
    v_cache = torch.full((num_blocks, case.block_size, case.num_kv_heads, case.value_size), poison, dtype=torch.float64)
    spans, slots, start = [], [], 0
    for s, (before, now) in enumerate(case.sequences):
        for index in range(needed[s]):
            tables[s, index] = free.pop()
        for position in range(before + now):
            block, offset = int(tables[s, position // case.block_size]), position % case.block_size
            if position < before:
                k_cache[block, offset] = randn(case.num_kv_heads, case.key_size)
                v_cache[block, offset] = randn(case.num_kv_heads, case.value_size)
            else:
                slots.append(block * case.block_size + offset)
        spans.append((start, start + now, before + now))
        start += now
    key, value = randn(start, case.num_kv_heads, case.key_size), randn(start, case.num_kv_heads, case.value_size)
    query = randn(start, case.num_kv_heads * case.group, case.key_size)
    slot_mapping = torch.tensor(slots)
    other = k_cache.clone(), v_cache.clone()
    sdpa.store_kv(key, value, k_cache, v_cache, slot_mapping)
    reference.store_kv(key, value, *other, slot_mapping)
    assert torch.equal(k_cache.nan_to_num(7), other[0].nan_to_num(7))
    assert torch.equal(v_cache.nan_to_num(7), other[1].nan_to_num(7))
    layout = make_layout(tables, spans)
    sizes = case.num_kv_heads, case.key_size, case.value_size
    spec = AttentionSpec(*sizes, case.key_size**-0.5, case.window, case.softcap)
    got = sdpa.paged_attention(query, k_cache, v_cache, layout, spec)
    return got, reference.paged_attention(query, *other, layout, spec)


def check(case: Case) -> None:
    for poison in (torch.nan, torch.inf, -torch.inf, 1e4):
        got, want = both(case, poison)
        assert got.shape == want.shape
        tolerance = 1e-5 if case.softcap else 1e-9  # soft caps are computed in float32
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


EDGES = [(0, 1), (0, 3), (0, 4), (0, 5), (3, 1), (4, 1), (2, 2), (3, 2), (1, 8), (9, 2), (0, 11)]


@pytest.mark.parametrize("sequence", EDGES)
def test_one_sequence_around_block_edges(sequence: tuple[int, int]) -> None:
    check(Case([sequence]))


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_ragged_batches_of_prefills_and_decodes(block_size: int) -> None:
    check(Case(EDGES, block_size=block_size))


@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_query_heads_share_key_value_heads(group: int, num_kv_heads: int) -> None:
    check(Case([(5, 1), (0, 6), (3, 3)], num_kv_heads=num_kv_heads, group=group))


@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
def test_head_sizes(size: int) -> None:
    check(Case([(5, 1), (0, 6)], key_size=size, value_size=size))


@pytest.mark.parametrize(("key_size", "value_size"), [(24, 16), (16, 24), (8, 1)])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_key_and_value_heads_of_different_sizes(key_size: int, value_size: int, softcap: float) -> None:
    check(Case(EDGES, key_size=key_size, value_size=value_size, softcap=softcap))


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 100])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_sliding_windows(window: int, softcap: float) -> None:
    check(Case([*EDGES, (30, 1), (30, 7)], window=window, softcap=softcap))


@pytest.mark.parametrize("softcap", [0.1, 1.0, 50.0])
def test_soft_caps(softcap: float) -> None:
    check(Case(EDGES, group=3, softcap=softcap))


def test_keys_outside_the_window_are_not_even_read() -> None:
    query, layout = torch.ones(1, 1, 4), make_layout(torch.tensor([[1, 0, 2]]), [(0, 1, 10)])
    k_cache, v_cache = torch.full((3, 4, 1, 4), torch.nan), torch.full((3, 4, 1, 4), torch.nan)
    k_cache[2, :2], v_cache[2, :2] = 1.0, 2.0
    out = sdpa.paged_attention(query, k_cache, v_cache, layout, AttentionSpec(1, 4, 4, 1.0, window=2))
    assert torch.equal(out, torch.full((1, 1, 4), 2.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precisions_stay_near_float64(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(12, heads, 64, generator=generator).to(dtype) for heads in (6, 2, 2))
    caches = [torch.full((4, 4, 2, 64), torch.nan, dtype=dtype) for _ in range(2)]
    sdpa.store_kv(key, value, *caches, torch.arange(12) + 2)
    # One sequence of 10 tokens that begins at a block edge: slots 4 to 13, tokens 2 to 11.
    layout = make_layout(torch.tensor([[1, 2, 3]]), [(0, 10, 10)])
    for window, softcap in ((0, 0.0), (3, 0.0), (0, 5.0)):
        spec = AttentionSpec(2, 64, 64, 0.125, window, softcap)
        got = sdpa.paged_attention(query[2:], *caches, layout, spec)
        want = reference.paged_attention(query[2:], *caches, layout, spec)
        assert got.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 0.03
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def test_a_token_without_a_slot_is_not_stored_by_the_reference() -> None:
    caches = torch.zeros(1, 2, 1, 1), torch.zeros(1, 2, 1, 1)
    reference.store_kv(torch.ones(2, 1, 1), torch.ones(2, 1, 1), *caches, torch.tensor([-1, 1]))
    assert [cache.flatten().tolist() for cache in caches] == [[0.0, 1.0]] * 2
