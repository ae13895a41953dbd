"""Checks of the Triton kernels: real shapes against the float64 reference, and the speed of some."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from cbatch.kernels import reference
from cbatch.kernels.attention import AttentionSpec, HeadNorms, Rotary
from cbatch.kernels.gpu.paged_attention import paged_attention
from cbatch.kernels.gpu.sample import sample
from cbatch.kernels.gpu.store_kv import rope_store_kv
from cbatch.model.batch import Batch
from tests.gpu_results import Check
from tests.layouts import make_layout


def check_kernels(check: Check) -> None:
    """All checks of this file."""
    big = 1 if check.dry else 8
    check.run("ceilings", lambda: ceilings(check))
    decode = [(n * 37 * big, 1) for n in range(1, 2 + 2 * big)]
    mixed = [(33 * big, 1), (0, 17 * big), (40 * big, 31 * big), (9, 1)]
    for heads, kv_heads, size in (
        ((4, 2, 16), (6, 2, 80)) if check.dry else ((32, 8, 128), (9, 3, 64), (32, 32, 80), (8, 4, 256))
    ):
        label, spec = f"attention {heads}/{kv_heads} heads of {size}", AttentionSpec(kv_heads, size, size, size**-0.5)
        capped = spec._replace(window=40, softcap=30.0)
        check.run(f"{label}, decode", partial(attention, check, decode, heads, spec))
        check.run(f"{label}, mixed", partial(attention, check, mixed, heads, spec))
        check.run(f"{label}, window and soft-cap", partial(attention, check, mixed, heads, capped))
    check.run("decode attention, batch 64, context 4096", lambda: decode_bandwidth(check, check.dtype))
    check.run("rope and store", lambda: rope_and_store(check, check.dtype))
    fp8, small = torch.float8_e4m3fn, AttentionSpec(2, 64, 64, 0.125)
    if why := "" if check.dry else check.backend.why_not_quantized(check.dtype, 32):
        print(f"without fp8: {why}", flush=True)
    else:
        check.run("fp8 cache, decode", lambda: attention(check, decode, 8, small, fp8))
        check.run("fp8 cache, mixed", lambda: attention(check, mixed, 8, small, fp8))
        check.run("fp8 cache, batch 64, context 4096", lambda: decode_bandwidth(check, fp8))
        check.run("fp8 cache, rope and store", lambda: rope_and_store(check, fp8))
    check.run("norm, gate, experts", lambda: small_kernels(check))
    check.run("sampler", lambda: sampler(check))


def ceilings(check: Check) -> str:
    size = 1 << (16 if check.dry else 31)
    source = torch.ones(size // 4, device=check.device)
    target = torch.empty_like(source)
    check.bandwidth = 2 * size / check.seconds(lambda: target.copy_(source))
    side = 64 if check.dry else 8192
    a, b = (torch.randn(side, side, device=check.device).to(check.dtype) for _ in range(2))
    check.flops = 2 * side**3 / check.seconds(lambda: a @ b)
    return f"copy {check.bandwidth / 1e12:.3f} TB/s, matrices {check.flops / 1e12:.1f} TFLOP/s"


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def expect(value: float, limit: float) -> str:
    if not value <= limit:
        raise AssertionError(f"off by {value:.2e}, more than {limit:.0e}")
    return f"off by {value:.1e}"


def paged(
    check: Check, lengths: list[tuple[int, int]], kv_heads: int, size: int
) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    """Caches and the layout of sequences of (cached, new) tokens; NaN where nothing is stored."""
    totals = [before + new for before, new in lengths]
    blocks = [-(-total // 32) for total in totals]
    shape = (sum(blocks) + 1, 32, kv_heads, size)
    k, v = (torch.randn(shape, device=check.device).to(check.dtype) for _ in range(2))
    order = torch.randperm(sum(blocks)).tolist()
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int64)
    for s, total in enumerate(totals):
        for index in range(blocks[s]):
            tables[s, index] = order.pop()
        k[tables[s, blocks[s] - 1], total - (blocks[s] - 1) * 32 :] = torch.nan
        v[tables[s, blocks[s] - 1], total - (blocks[s] - 1) * 32 :] = torch.nan
    stops = torch.tensor([new for _, new in lengths]).cumsum(0).tolist()
    spans = [(stop - new, stop, total) for stop, (_, new), total in zip(stops, lengths, totals, strict=True)]
    return k, v, make_layout(tables.to(check.device), spans)


def attention(
    check: Check,
    lengths: list[tuple[int, int]],
    num_heads: int,
    spec: AttentionSpec,
    cache: torch.dtype | None = None,
) -> str:
    size = spec.key_size
    k, v, layout = paged(check, lengths, spec.num_kv_heads, size)
    k, v = k.to(cache or check.dtype), v.to(cache or check.dtype)
    query = torch.randn(layout.spans[-1][1], num_heads, size, device=check.device).to(check.dtype)
    out = paged_attention(query, k, v, layout, spec)
    k, v, worst = k.to(check.dtype), v.to(check.dtype), 0.0
    for number in range(len(lengths))[-4:]:
        first, stop, total = layout.spans[number]
        for end in {min(first + 2, stop), stop}:  # the first and the last rows; the reference is slow
            keep = slice(max(first, end - 2), end)
            span = (0, keep.stop - keep.start, total - (stop - end))
            want = reference.paged_attention(
                query[keep], k, v, make_layout(layout.block_tables[number : number + 1], [span]), spec
            )
            worst = max(worst, error(out[keep], want))
    return expect(worst, 1e-5 if check.dtype == torch.float32 else 1e-2)


def decode_bandwidth(check: Check, cache: torch.dtype) -> str:
    seqs, context = (2, 40) if check.dry else (64, 4096)
    k, v, layout = paged(check, [(context - 1, 1)] * seqs, 8, 128)
    k, v, spec = k.to(cache), v.to(cache), AttentionSpec(8, 128, 128, 128**-0.5)
    query = torch.randn(seqs, 32, 128, device=check.device).to(check.dtype)
    taken = check.seconds(lambda: paged_attention(query, k, v, layout, spec))
    rate = seqs * context * 2 * 8 * 128 * cache.itemsize / taken
    return f"{rate / 1e12:.3f} TB/s, {rate / check.bandwidth:.0%} of copy (bar: 85 %)"


def small_kernels(check: Check) -> str:
    rows, width = (3, 96) if check.dry else (256, 4096)
    x, weight, residual = (
        torch.randn(s, device=check.device).to(check.dtype) for s in ((rows, width), (width,), (rows, width))
    )
    mine, theirs = residual.clone(), residual.clone()
    limit = 1e-5 if check.dtype == torch.float32 else 1e-2
    expect(error(check.backend.rms_norm(x, weight, 1e-5, mine), reference.rms_norm(x, weight, 1e-5, theirs)), limit)
    gate, up = x.double().chunk(2, -1)
    expect(error(check.backend.gated(x, "silu"), functional.silu(gate) * up), limit)
    tokens, experts, inner = (7, 4, 24) if check.dry else (64, 8, 768)
    gate_up = torch.randn(experts, 2 * inner, width, device=check.device).to(check.dtype) / width**0.5
    down = torch.randn(experts, width, inner, device=check.device).to(check.dtype) / inner**0.5
    weights, topk_ids = torch.rand(tokens, experts, device=check.device).topk(2)
    some = torch.randn(tokens, width, device=check.device).to(check.dtype)
    picked = slice(0, 4)
    out = check.backend.experts(some, gate_up, down, topk_ids, weights, False)
    want = reference.experts(some[picked], gate_up, down, topk_ids[picked], weights[picked])
    expect(error(out[picked], want), limit)
    return "rms_norm, silu_mul and experts agree"


def rope_and_store(check: Check, cache: torch.dtype) -> str:
    heads, kv_heads, size, tokens = (4, 2, 16, 6) if check.dry else (32, 8, 128, 64)
    query, key, value = (
        torch.randn(tokens, h, size, device=check.device).to(check.dtype) for h in (heads, kv_heads, kv_heads)
    )
    angles = torch.rand(tokens, size // 2, device=check.device)
    cos, sin = (torch.cat([f(angles)] * 2, -1).to(check.dtype) for f in (torch.cos, torch.sin))
    slots = torch.randperm(4 * 32, device=check.device)[:tokens]
    slots[0] = -1
    q_weight, k_weight = (torch.randn(size, device=check.device).to(check.dtype) for _ in range(2))
    rotary, norms = Rotary(cos, sin), HeadNorms(q_weight, k_weight, 1e-6)
    ours, theirs = (torch.zeros(2, 4, 32, kv_heads, size, device=check.device, dtype=cache) for _ in range(2))
    expected = query.clone()
    rope_store_kv(query, key, value, ours[0], ours[1], slots, rotary, norms)
    reference.rope_store_kv(expected, key, value, theirs[0], theirs[1], slots, rotary, norms)
    limit = 1e-5 if check.dtype == torch.float32 else 1e-2
    expect(error(query, expected), limit)
    worst = max(error(a, b) for a, b in zip(ours, theirs, strict=True))
    return expect(worst, 2e-2 if cache == torch.float8_e4m3fn else limit)


def sampler(check: Check) -> str:
    rows, vocabulary = (20, 300) if check.dry else (256, 128256)
    logits = torch.randn(rows, vocabulary, device=check.device) * 3
    column = lambda value: torch.full((rows,), float(value), device=check.device)  # noqa: E731
    ints = torch.zeros(rows, dtype=torch.int32, device=check.device)
    seeds = torch.arange(rows, device=check.device)
    greedy = sample(logits, column(0), ints, column(1), column(0), seeds, ints)
    if not torch.equal(greedy, logits.argmax(-1)):
        raise AssertionError("greedy draws are not the largest logits")
    drawn = sample(logits, column(1), ints + 20, column(0.9), column(0), seeds, ints)
    rank = (logits > logits.gather(1, drawn[:, None])).sum(-1)
    if int(rank.max()) >= 20:
        raise AssertionError("a draw from outside of top-k")
    taken = check.seconds(lambda: sample(logits, column(1), ints + 20, column(0.9), column(0), seeds, ints))
    plain = check.seconds(lambda: sample(logits, column(0), ints, column(1), column(0), seeds, ints))
    return f"top-k and top-p of {rows} rows {taken * 1e6:.0f} us, greedy {plain * 1e6:.0f} us"
