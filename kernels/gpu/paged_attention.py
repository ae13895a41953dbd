"""Paged attention for GPUs: decode, chunked prefill and any mix of them in one kernel.

Per query row, with the scores in base 2 and an online softmax (Milakov and Gimelshein, arXiv:1805.02867) over tiles of
keys (FlashAttention-2, arXiv:2307.08691), keys and values read in place from their blocks (arXiv:2309.06180):

    s_j = scale * q . k_j          [softcap * tanh(s_j / softcap)]      j visible: j <= position, position - j < window
    out = sum_j exp(s_j - m) v_j / sum_j exp(s_j - m)

One program computes BLOCK_Q tokens times the query heads that share one key/value head (packed into the rows of one
matrix), against one of NUM_SPLITS parts of the keys. The grid

    (T // BLOCK_Q + S, H_kv, NUM_SPLITS)

is an upper bound on sum(ceil(q_len / BLOCK_Q)) that needs no look at the lengths; a program finds its sequence by
bisection in `cu_seqlens_q` and leaves at once if there is none. With NUM_SPLITS > 1 every part leaves its maximum, its
sum and its unnormalised output, and `_reduce_splits` joins them.

Strides are arguments one by one: in a tuple (Triton 3.4 to 3.9 take them) they could be neither declared int64 nor kept
out of specialisation, so that a kernel would be compiled anew for strides of another width, and for one of 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cbatch.kernels.attention import AttentionSpec, Layout
from cbatch.kernels.gpu.shapes import attention_shape

_LOG2E = tl.constexpr(1.4426950408889634)


def paged_attention(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: Layout, spec: AttentionSpec
) -> torch.Tensor:
    """`reference.paged_attention` on the GPU; returns [T, H, D] in the dtype of `query`.

    `max_seqlen_q` and `max_seq_len` only choose block shapes and splits; an upper bound will do. Rows of no sequence are
    left as they are.
    """
    num_tokens, num_heads, head_size = query.shape
    block_size, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
    num_seqs, group = layout.seq_lens.shape[0], num_heads // num_kv_heads
    longest = layout.max_seqlen_q, layout.max_seq_len
    shape = attention_shape(query.device, group, head_size, num_seqs * num_kv_heads, *longest, query.itemsize)
    splits, padded, softcap = shape.num_splits, triton.next_power_of_2(head_size), spec.softcap
    out = torch.empty_like(query)
    parts = query.new_empty((num_tokens, num_heads, splits, padded) if splits > 1 else (1,), dtype=torch.float32)
    sums = query.new_empty((num_tokens, num_heads, splits, 2) if splits > 1 else (1,), dtype=torch.float32)
    block_q = shape.block_m // triton.next_power_of_2(group)
    _attend[(num_tokens // block_q + num_seqs, num_kv_heads, splits)](
        out, query, k_cache, v_cache, layout.block_tables, layout.seq_lens, layout.cu_seqlens_q, parts, sums,
        spec.scale * _LOG2E.value, softcap * _LOG2E.value, spec.scale / softcap if softcap else 0.0, num_seqs,
        *query.stride()[:2], *out.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
        layout.block_tables.stride(0),
        NUM_HEADS=num_heads, GROUP=group, GROUP_PAD=triton.next_power_of_2(group), HEAD=head_size, HEAD_PAD=padded,
        BLOCK_SIZE=block_size, BLOCK_M=shape.block_m, BLOCK_Q=block_q, TILE=shape.tile, WINDOW=spec.window,
        SOFTCAP=softcap > 0, NUM_SPLITS=splits,
        num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    if splits > 1:
        _reduce_splits[(num_tokens, num_heads)](
            out, parts, sums, layout.cu_seqlens_q, num_seqs, *out.stride()[:2],
            NUM_HEADS=num_heads, HEAD=head_size, HEAD_PAD=padded, NUM_SPLITS=splits, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _find_sequence(cu_ptr, q_block, num_seqs, BLOCK_Q: tl.constexpr):
    """The sequence that a query block belongs to: the last whose first block, cu[s] // BLOCK_Q + s, is `q_block` or less."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        first = tl.load(cu_ptr + middle) // BLOCK_Q + middle
        if first <= q_block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _tile(
    acc, total, top, q, tile, k_ptr, v_ptr, table_ptr, kv_head, stop, position, row_ok, scale_log2, cap_log2, inv_cap,
    k_block: tl.int64, k_slot: tl.int64, k_head: tl.int64, v_block: tl.int64, v_slot: tl.int64, v_head: tl.int64,
    HEAD: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to one tile of keys and values. Not MASKED: every row sees every key of the tile."""
    key = tile * TILE + tl.arange(0, TILE)
    dim = tl.arange(0, HEAD_PAD)
    inside = key < stop
    block = tl.load(table_ptr + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    slot = (key % BLOCK_SIZE).to(tl.int64)
    k_at = k_ptr + block[None, :] * k_block + slot[None, :] * k_slot + kv_head * k_head + dim[:, None]
    v_at = v_ptr + block[:, None] * v_block + slot[:, None] * v_slot + kv_head * v_head + dim[None, :]
    if MASKED:  # a slot past the end may hold NaN, and 0 * NaN is NaN: values must not be loaded, not only not weighed
        k = tl.load(k_at, mask=inside[None, :] & (dim < HEAD)[:, None], other=0.0)
        v = tl.load(v_at, mask=inside[:, None] & (dim < HEAD)[None, :], other=0.0)
    elif HEAD == HEAD_PAD:
        k = tl.load(k_at)
        v = tl.load(v_at)
    else:
        k = tl.load(k_at, mask=(dim < HEAD)[:, None], other=0.0)
        v = tl.load(v_at, mask=(dim < HEAD)[None, :], other=0.0)
    score = tl.dot(q, k.to(q.dtype), input_precision="ieee")
    if SOFTCAP:
        score = cap_log2 * (2.0 * tl.sigmoid(2.0 * score * inv_cap) - 1.0)
    else:
        score = score * scale_log2
    if MASKED:
        visible = (key[None, :] <= position[:, None]) & row_ok[:, None]
        if WINDOW > 0:
            visible = visible & (position[:, None] - key[None, :] < WINDOW)
        score = tl.where(visible, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, axis=1))
    # A row that has seen nothing yet keeps -inf; subtracting 0 there makes its weights 0 instead of NaN.
    base = tl.where(new_top > float("-inf"), new_top, 0.0) if MASKED else new_top
    weight = tl.math.exp2(score - base[:, None])
    shrink = tl.math.exp2(top - base)
    total = total * shrink + tl.sum(weight, axis=1)
    acc = tl.dot(weight.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
    return acc, total, new_top


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def _attend(
    out_ptr, q_ptr, k_ptr, v_ptr, tables_ptr, seq_lens_ptr, cu_ptr, parts_ptr, sums_ptr,
    scale_log2, cap_log2, inv_cap, num_seqs,
    q_token: tl.int64, q_head: tl.int64, out_token: tl.int64, out_head: tl.int64,
    k_block: tl.int64, k_slot: tl.int64, k_head: tl.int64, v_block: tl.int64, v_slot: tl.int64, v_head: tl.int64,
    table_stride: tl.int64,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    q_block = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq = _find_sequence(cu_ptr, q_block, num_seqs, BLOCK_Q)
    start = tl.load(cu_ptr + seq).to(tl.int32)
    q_len = tl.load(cu_ptr + seq + 1).to(tl.int32) - start
    first_q = (q_block - (start // BLOCK_Q + seq)) * BLOCK_Q
    if first_q >= q_len:
        return
    before = tl.load(seq_lens_ptr + seq).to(tl.int32) - q_len  # tokens already cached before this step

    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, HEAD_PAD)
    q_index = first_q + row // GROUP_PAD
    in_group = row % GROUP_PAD
    head = kv_head * GROUP + in_group
    row_ok = (q_index < q_len) & (in_group < GROUP)
    position = before + q_index
    token = (start + q_index).to(tl.int64)
    q_mask = row_ok[:, None] & (dim < HEAD)[None, :]
    q = tl.load(q_ptr + token[:, None] * q_token + head[:, None] * q_head + dim[None, :], mask=q_mask, other=0.0)

    # Keys in [low, stop) are visible to some row; tiles in [clear_low, clear_high) to every row.
    last_q = tl.minimum(first_q + BLOCK_Q, q_len) - 1
    stop = before + last_q + 1
    low = 0
    if WINDOW > 0:
        low = tl.maximum(before + first_q - WINDOW + 1, 0)
    tile_low = low // TILE
    tile_high = tl.cdiv(stop, TILE)
    clear_high = (before + first_q + 1) // TILE
    clear_low = tile_low
    if WINDOW > 0:
        clear_low = tl.cdiv(tl.maximum(before + last_q - WINDOW + 1, 0), TILE)
    if NUM_SPLITS > 1:
        share = tl.cdiv(tile_high - tile_low, NUM_SPLITS)
        tile_high = tl.minimum(tile_low + (split + 1) * share, tile_high)
        tile_low = tl.minimum(tile_low + split * share, tile_high)
    clear_low = tl.minimum(tl.maximum(clear_low, tile_low), tile_high)
    clear_high = tl.maximum(tl.minimum(clear_high, tile_high), clear_low)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    table_ptr = tables_ptr + seq * table_stride
    if WINDOW > 0:
        for tile in range(tile_low, clear_low):
            acc, total, top = _tile(
                acc, total, top, q, tile, k_ptr, v_ptr, table_ptr, kv_head, stop, position, row_ok, scale_log2,
                cap_log2, inv_cap, k_block, k_slot, k_head, v_block, v_slot, v_head,
                HEAD, HEAD_PAD, BLOCK_SIZE, TILE, WINDOW, SOFTCAP, True,
            )  # fmt: skip
    for tile in range(clear_low, clear_high):
        acc, total, top = _tile(
            acc, total, top, q, tile, k_ptr, v_ptr, table_ptr, kv_head, stop, position, row_ok, scale_log2,
            cap_log2, inv_cap, k_block, k_slot, k_head, v_block, v_slot, v_head,
            HEAD, HEAD_PAD, BLOCK_SIZE, TILE, WINDOW, SOFTCAP, False,
        )  # fmt: skip
    for tile in range(clear_high, tile_high):
        acc, total, top = _tile(
            acc, total, top, q, tile, k_ptr, v_ptr, table_ptr, kv_head, stop, position, row_ok, scale_log2,
            cap_log2, inv_cap, k_block, k_slot, k_head, v_block, v_slot, v_head,
            HEAD, HEAD_PAD, BLOCK_SIZE, TILE, WINDOW, SOFTCAP, True,
        )  # fmt: skip

    if NUM_SPLITS > 1:
        part = (token * NUM_HEADS + head) * NUM_SPLITS + split
        tl.store(sums_ptr + part * 2, top, mask=row_ok)
        tl.store(sums_ptr + part * 2 + 1, total, mask=row_ok)
        tl.store(parts_ptr + part[:, None] * HEAD_PAD + dim[None, :], acc, mask=q_mask)
    else:
        result = acc * (1.0 / tl.where(row_ok, total, 1.0))[:, None]
        out_at = out_ptr + token[:, None] * out_token + head[:, None] * out_head + dim[None, :]
        tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=q_mask)


@triton.jit(do_not_specialize=["num_seqs"])
def _reduce_splits(
    out_ptr, parts_ptr, sums_ptr, cu_ptr, num_seqs, out_token: tl.int64, out_head: tl.int64,
    NUM_HEADS: tl.constexpr, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Join the parts of one head of one token: each weighs exp2(its maximum - the maximum of all)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if token >= tl.load(cu_ptr + num_seqs):
        return
    split = tl.arange(0, NUM_SPLITS)
    dim = tl.arange(0, HEAD_PAD)
    part = (token * NUM_HEADS + head) * NUM_SPLITS + split
    top = tl.load(sums_ptr + part * 2)
    weight = tl.math.exp2(top - tl.max(top, axis=0))
    total = tl.sum(tl.load(sums_ptr + part * 2 + 1) * weight, axis=0)
    values = tl.load(parts_ptr + part[:, None] * HEAD_PAD + dim[None, :], mask=(dim < HEAD)[None, :], other=0.0)
    result = tl.sum(values * weight[:, None], axis=0) * (1.0 / total)
    tl.store(out_ptr + token * out_token + head * out_head + dim, result.to(out_ptr.dtype.element_ty), mask=dim < HEAD)
