"""Rotary embedding, optional q/k norm, and the write of keys and values to their slots, in one pass over a token.

    rotated = [a * cos - b * sin, b * cos + a * sin]   with x = [a, b, rest], a and b of ROT / 2 each (arXiv:2104.09864,
                                                       in the half-split layout of GPT-NeoX and Llama)

One program handles one token: all its query, key and value heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cbatch.kernels.attention import NO_NORMS, HeadNorms, Rotary


def store_kv(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """`reference.store_kv`."""
    _launch(None, key, value, k_cache, v_cache, slot_mapping, None, NO_NORMS)


def rope_store_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    rotary: Rotary,
    norms: HeadNorms = NO_NORMS,
) -> None:
    """`reference.rope_store_kv`."""
    _launch(query, key, value, k_cache, v_cache, slot_mapping, rotary, norms)


def _launch(
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    rotary: Rotary | None,
    norms: HeadNorms,
) -> None:
    num_tokens, num_kv_heads, head_size = key.shape
    q = key if query is None else query
    cos, sin = (key, key) if rotary is None else rotary  # a pointer must be given; without a rotation it is not read
    rotated = 0 if rotary is None else cos.shape[-1]
    _store[(num_tokens,)](
        q, key, value, k_cache, v_cache, slots, cos, sin,
        key if norms.q_weight is None else norms.q_weight, key if norms.k_weight is None else norms.k_weight,
        norms.eps, norms.weight_offset,
        *q.stride()[:2], *key.stride()[:2], *value.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
        cos.stride(0) if rotated else 0,
        BLOCK_SIZE=k_cache.shape[1], H=0 if query is None else q.shape[1], H_PAD=triton.next_power_of_2(q.shape[1]),
        KV=num_kv_heads, KV_PAD=triton.next_power_of_2(num_kv_heads), D=head_size, ROT=rotated,
        HALF_PAD=triton.next_power_of_2(max(1, rotated // 2)), REST_PAD=triton.next_power_of_2(max(1, head_size - rotated)),
        D_PAD=triton.next_power_of_2(head_size), NORM=norms.q_weight is not None, FP8=k_cache.dtype.itemsize == 1,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _inverse_rms(x_ptr, token, stride_token, stride_head, head, head_ok, eps, D: tl.constexpr, D_PAD: tl.constexpr):
    dim = tl.arange(0, D_PAD)
    at = x_ptr + token * stride_token + head[:, None] * stride_head + dim[None, :]
    x = tl.load(at, mask=head_ok[:, None] & (dim < D)[None, :], other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)


@triton.jit
def _normed(x, inverse, weight_ptr, dim, ok, offset, DTYPE: tl.constexpr):
    """x * inverse rounded to the model's dtype, then times the weight, as transformers rounds."""
    weight = tl.load(weight_ptr + dim, mask=ok, other=0.0).to(tl.float32) + offset
    return ((x * inverse[:, None]).to(DTYPE).to(tl.float32) * weight[None, :]).to(DTYPE).to(tl.float32)


@triton.jit
def _saturated(x):
    """x for a cache of e4m3, the same on any GPU: at most the largest value there is, and NaN where x is not finite."""
    x = x.to(tl.float32)
    return tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(x, -448.0), 448.0), float("nan"))


@triton.jit
def _rope(
    x_ptr, y_ptr, token, x_token, x_head, y_base, y_head, cos_ptr, sin_ptr, weight_ptr, table, eps, offset,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, ROT: tl.constexpr,
    HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate all heads of one token, from x to y."""
    half: tl.constexpr = ROT // 2
    head = tl.arange(0, HEADS_PAD)
    head_ok = head < HEADS
    i = tl.arange(0, HALF_PAD)
    ok = head_ok[:, None] & (i < half)[None, :]
    at = x_ptr + token * x_token + head[:, None] * x_head + i[None, :]
    a = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(at + half, mask=ok, other=0.0).to(tl.float32)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if NORM:
        inverse = _inverse_rms(x_ptr, token, x_token, x_head, head, head_ok, eps, D, D_PAD)
        a = _normed(a, inverse, weight_ptr, i, i < half, offset, dtype)
        b = _normed(b, inverse, weight_ptr, i + half, i < half, offset, dtype)
    cos = tl.load(cos_ptr + token * table + i, mask=i < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * table + i, mask=i < half, other=0.0).to(tl.float32)[None, :]
    first = a * cos - b * sin
    second = b * cos + a * sin
    if FP8:
        first = _saturated(first)
        second = _saturated(second)
    out = y_ptr + y_base + head[:, None] * y_head + i[None, :]
    if ROT < D:
        j = ROT + tl.arange(0, REST_PAD)
        rest_ok = head_ok[:, None] & (j < D)[None, :]
        rest = tl.load(x_ptr + token * x_token + head[:, None] * x_head + j[None, :], mask=rest_ok, other=0.0)
        rest = rest.to(tl.float32)
        if NORM:
            rest = _normed(rest, inverse, weight_ptr, j, j < D, offset, dtype)
        if FP8:
            rest = _saturated(rest)
        tl.store(y_ptr + y_base + head[:, None] * y_head + j[None, :], rest.to(y_ptr.dtype.element_ty), mask=rest_ok)
    tl.store(out, first.to(y_ptr.dtype.element_ty), mask=ok)
    tl.store(out + half, second.to(y_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _copy(
    x_ptr, y_ptr, token, x_token, x_head, y_base, y_head, KV: tl.constexpr, KV_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, KV_PAD)
    dim = tl.arange(0, D_PAD)
    ok = (head < KV)[:, None] & (dim < D)[None, :]
    x = tl.load(x_ptr + token * x_token + head[:, None] * x_head + dim[None, :], mask=ok, other=0.0)
    if FP8:
        x = _saturated(x)
    tl.store(y_ptr + y_base + head[:, None] * y_head + dim[None, :], x.to(y_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _store(
    q_ptr, k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr,
    eps, offset,
    q_token: tl.int64, q_head: tl.int64, k_token: tl.int64, k_head: tl.int64, v_token: tl.int64, v_head: tl.int64,
    kc_block: tl.int64, kc_slot: tl.int64, kc_head: tl.int64, vc_block: tl.int64, vc_slot: tl.int64, vc_head: tl.int64,
    table: tl.int64,
    BLOCK_SIZE: tl.constexpr, H: tl.constexpr, H_PAD: tl.constexpr, KV: tl.constexpr, KV_PAD: tl.constexpr,
    D: tl.constexpr, ROT: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, D_PAD: tl.constexpr,
    NORM: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    if H > 0:
        _rope(q_ptr, q_ptr, token, q_token, q_head, token * q_token, q_head, cos_ptr, sin_ptr, q_weight_ptr, table, eps,
              offset, H, H_PAD, D, D_PAD, ROT, HALF_PAD, REST_PAD, NORM, False)  # fmt: skip
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot >= 0:  # -1: a padding token, which belongs to no sequence
        k_base = slot // BLOCK_SIZE * kc_block + slot % BLOCK_SIZE * kc_slot
        v_base = slot // BLOCK_SIZE * vc_block + slot % BLOCK_SIZE * vc_slot
        if ROT > 0:
            _rope(k_ptr, k_cache_ptr, token, k_token, k_head, k_base, kc_head, cos_ptr, sin_ptr, k_weight_ptr, table,
                  eps, offset, KV, KV_PAD, D, D_PAD, ROT, HALF_PAD, REST_PAD, NORM, FP8)  # fmt: skip
        else:
            _copy(k_ptr, k_cache_ptr, token, k_token, k_head, k_base, kc_head, KV, KV_PAD, D, D_PAD, FP8)
        _copy(v_ptr, v_cache_ptr, token, v_token, v_head, v_base, vc_head, KV, KV_PAD, D, D_PAD, FP8)
