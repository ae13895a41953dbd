"""Logits to tokens on the GPU: no sort of the vocabulary, no wait for the host.

Temperature, top-k, top-p and min-p each keep the tokens whose logit is at least some threshold, so a row needs one
number. Top-k and top-p find theirs by bisection over the ordered bit patterns of float32, which is exact after 32
rounds. A token is then drawn by the Gumbel-max trick (Maddison et al., arXiv:1411.0030): argmax of x / T + G with
G = -log(-log(u)), u from Philox (Salmon et al., SC 2011) keyed by (seed, position, token). Temperature 0 is the argmax.

`_threshold` uses one program a row, `_block_max` one for each BLOCK tokens of a row, `_row_max` one a row again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 8192
INVALID = -1  # in place of a token: the row's logits are NaN or infinite


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    block: int = _BLOCK,
) -> torch.Tensor:
    """logits [n, vocabulary] -> tokens [n] int64, INVALID where the logits are NaN or infinite.

    For each row: temperature, top_p and min_p float32 [n]; top_k int32 [n], 0 for all; seeds int64 [n]; positions int32
    [n]. Filters in that order, each on what the one before left. Tokens that tie at a threshold are all kept.
    """
    num_rows, vocabulary = logits.shape
    num_blocks = triton.cdiv(vocabulary, block)
    thresholds = logits.new_empty(num_rows, dtype=torch.float32)
    best = logits.new_empty(num_rows, num_blocks, dtype=torch.float32)
    where = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _threshold[(num_rows,)](
        logits, temperature, top_k, top_p, min_p, thresholds, logits.stride(0), vocabulary, BLOCK=block, num_warps=8
    )
    _block_max[(num_rows, num_blocks)](
        logits, temperature, thresholds, seeds, positions, best, where, logits.stride(0), vocabulary, BLOCK=block,
        num_warps=8,
    )  # fmt: skip
    _row_max[(num_rows,)](best, where, tokens, num_blocks, PAD=triton.next_power_of_2(num_blocks), num_warps=1)
    return tokens


def penalize(
    logits: torch.Tensor,
    history: torch.Tensor,
    lengths: torch.Tensor,
    prompt_lengths: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Apply penalties to logits [n, vocabulary] float32, in place.

    history [n, L] int64: prompt, then completion, of which the first `lengths` [n] count; the others float32 [n].
    """
    at = torch.arange(history.shape[1], device=history.device)
    seen = at < lengths[:, None]
    generated = seen & (at >= prompt_lengths[:, None])
    tokens = history.clamp(0, logits.shape[1] - 1)
    counts = torch.zeros_like(logits).scatter_add_(1, tokens, generated.float())
    known = torch.zeros_like(logits).scatter_reduce_(1, tokens, seen.float(), "amax") > 0
    scaled = torch.where(logits < 0, logits * repetition[:, None], logits / repetition[:, None])
    logits.copy_(torch.where(known, scaled, logits))
    logits.sub_(presence[:, None] * (counts > 0) + frequency[:, None] * counts)


@triton.jit
def _ordered(x):
    """float32 -> an integer of the same order, in int64 so that a middle never overflows."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits).to(tl.int64)


@triton.jit
def _unordered(key):
    """The inverse of `_ordered`."""
    low = key.to(tl.int32)
    return tl.where(low < 0, (-low) | -2147483648, low).to(tl.float32, bitcast=True)


@triton.jit
def _load(row_ptr, start, vocabulary, BLOCK: tl.constexpr):
    i = start + tl.arange(0, BLOCK)
    return tl.load(row_ptr + i, mask=i < vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit
def _threshold(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, out_ptr, stride: tl.int64, vocabulary,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr = logits_ptr + row * stride
    temperature = tl.load(temperature_ptr + row)
    threshold = float("-inf")
    if temperature > 0.0:
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        highest = tl.full([BLOCK], float("-inf"), tl.float32)
        lowest = tl.full([BLOCK], float("inf"), tl.float32)
        for start in range(0, vocabulary, BLOCK):
            x = _load(x_ptr, start, vocabulary, BLOCK)
            highest = tl.maximum(highest, x)
            lowest = tl.minimum(lowest, tl.where(x > float("-inf"), x, float("inf")))
        top = tl.max(highest, axis=0)
        bottom = tl.min(lowest, axis=0)
        inverse = 1.0 / tl.maximum(temperature, 1e-10)
        if (top_k > 0) & (top_k < vocabulary):
            low = _ordered(bottom)  # at least top_k tokens are not below `low`, fewer are not below `high`
            high = _ordered(top) + 1
            for _ in range(33):
                middle = (low + high) >> 1
                count = tl.zeros([BLOCK], tl.int32)
                for start in range(0, vocabulary, BLOCK):
                    count += (_ordered(_load(x_ptr, start, vocabulary, BLOCK)) >= middle).to(tl.int32)
                enough = tl.sum(count, axis=0) >= top_k
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle)
            threshold = _unordered(low)
        if top_p < 1.0:
            mass = tl.zeros([BLOCK], tl.float32)
            for start in range(0, vocabulary, BLOCK):
                x = _load(x_ptr, start, vocabulary, BLOCK)
                mass += tl.where(x >= threshold, tl.exp((x - top) * inverse), 0.0)
            needed = tl.sum(mass, axis=0) * top_p - 1e-6  # float32 sums are no better
            low = _ordered(tl.maximum(bottom, threshold))
            high = _ordered(top) + 1
            for _ in range(33):
                middle = (low + high) >> 1
                mass = tl.zeros([BLOCK], tl.float32)
                for start in range(0, vocabulary, BLOCK):
                    x = _load(x_ptr, start, vocabulary, BLOCK)
                    mass += tl.where(_ordered(x) >= middle, tl.exp((x - top) * inverse), 0.0)
                enough = tl.sum(mass, axis=0) >= needed
                low = tl.where(enough & (middle < _ordered(top) + 1), middle, low)
                high = tl.where(enough, high, middle)
            threshold = tl.minimum(_unordered(low), top)
        if min_p > 0.0:
            threshold = tl.maximum(threshold, tl.minimum(top + tl.log(min_p) * temperature, top))
    tl.store(out_ptr + row, threshold)


@triton.jit
def _gumbel(seed, position, token):
    """-log(-log(u)) for u in (0, 1): large values come from u near 1, so -log(u) is computed as -log1p(u - 1)."""
    zero = token * 0
    bits, _b, _c, _d = tl.philox(seed, token.to(tl.uint32), (zero + position).to(tl.uint32), zero.to(tl.uint32),
                                 zero.to(tl.uint32))  # fmt: skip
    high = (bits >> 16).to(tl.int32).to(tl.float32)
    low = (bits & 0xFFFF).to(tl.int32).to(tl.float32)
    v = high * 1.52587890625e-05 + (low + 0.5) * 2.3283064365386963e-10  # 1 - u
    u = tl.maximum(1.0 - v, 5.960464477539063e-08)
    # log1p(-v) = log(u) * v / (1 - u), exact where u is rounded (Kahan)
    exponential = tl.where(u == 1.0, v, -tl.log(u) * (v / tl.where(u == 1.0, 1.0, 1.0 - u)))
    return -tl.log(exponential)


@triton.jit
def _block_max(
    logits_ptr, temperature_ptr, threshold_ptr, seed_ptr, position_ptr, best_ptr, where_ptr, stride: tl.int64,
    vocabulary, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best token of a block, and +inf if the block holds a NaN or +inf."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = _load(logits_ptr + row * stride, block * BLOCK, vocabulary, BLOCK)
    bad = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), axis=0)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        threshold = tl.load(threshold_ptr + row)
        noise = _gumbel(tl.load(seed_ptr + row), tl.load(position_ptr + row), token)
        x = tl.where(x >= threshold, x / tl.maximum(temperature, 1e-10) + noise, float("-inf"))
    best, index = tl.max(tl.where(x == x, x, float("-inf")), axis=0, return_indices=True)
    at = row * tl.num_programs(1) + block
    tl.store(best_ptr + at, tl.where(bad > 0, float("inf"), best))
    tl.store(where_ptr + at, index + block * BLOCK)


@triton.jit
def _row_max(best_ptr, where_ptr, token_ptr, num_blocks, PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PAD)
    best = tl.load(best_ptr + row * num_blocks + i, mask=i < num_blocks, other=float("-inf"))
    top, block = tl.max(best, axis=0, return_indices=True)
    token = tl.load(where_ptr + row * num_blocks + block).to(tl.int64)
    finite = (top < float("inf")) & (top > float("-inf"))
    tl.store(token_ptr + row, tl.where(finite, token, -1))
