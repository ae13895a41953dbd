"""Mixture of experts: one matrix product over all tokens, sorted by the expert that each goes to.

The rows of expert e are `offsets[e - 1]:offsets[e]` of the sorted order. A program computes BLOCK_M of them times
BLOCK_N columns of that expert's weight; the grid

    (num_rows // BLOCK_M + num_experts, ceil(N / BLOCK_N))

bounds the number of row blocks without a look at the offsets, and a program finds its expert by bisection, as the
attention finds its sequence. No row is padded, nothing is copied: rows are gathered while they are loaded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cbatch.kernels.gpu.gated import gelu_mul, silu_mul

_BLOCK_N, _BLOCK_K = 64, 64


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: torch.Tensor,
    gelu: bool = False,
) -> torch.Tensor:
    """`reference.experts`: x [T, K], gate_up [E, 2I, K], down [E, K, I], topk_ids and weights [T, top] -> [T, K]."""
    num_tokens, top = topk_ids.shape
    order = topk_ids.flatten().sort(stable=True)
    ids = torch.arange(gate_up.shape[0], device=x.device)
    offsets = torch.searchsorted(order.values, ids, right=True).to(torch.int32)
    hidden = grouped_matmul(x, gate_up, offsets, order.indices // top)
    hidden = gelu_mul(hidden) if gelu else silu_mul(hidden)
    out = grouped_matmul(hidden, down, offsets, None)
    out = out.float() * weights.flatten()[order.indices, None]
    back = torch.empty_like(order.indices).scatter_(0, order.indices, torch.arange(num_tokens * top, device=x.device))
    return out[back].view(num_tokens, top, -1).sum(1).to(x.dtype)


def grouped_matmul(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor | None
) -> torch.Tensor:
    """out[i] = x[rows[i]] @ weight[e].T for sorted row i of expert e.

    x [M, K], weight [E, N, K], offsets [E] int32 (ends of the experts' rows), rows [R] or None for 0, 1, ... -> [R, N].
    """
    num_rows = x.shape[0] if rows is None else rows.shape[0]
    num_experts, columns, depth = weight.shape
    block_m = 16 if num_rows < 16 * num_experts else 64
    out = x.new_empty(num_rows, columns)
    _matmul[(num_rows // block_m + num_experts, triton.cdiv(columns, _BLOCK_N))](
        x, weight, out, offsets, offsets if rows is None else rows, num_experts, columns, depth,
        x.stride(0), weight.stride(0), weight.stride(1), out.stride(0),
        GATHER=rows is not None, BLOCK_M=block_m, BLOCK_N=_BLOCK_N, BLOCK_K=_BLOCK_K, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _matmul(
    x_ptr, w_ptr, y_ptr, offsets_ptr, rows_ptr, num_experts, columns, depth,
    x_row: tl.int64, w_expert: tl.int64, w_column: tl.int64, y_row: tl.int64,
    GATHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    low = 0
    high = num_experts
    while low < high:  # the last expert whose first block, start // BLOCK_M + e, is not behind this one
        middle = (low + high) // 2
        start = tl.load(offsets_ptr + middle - 1, mask=middle > 0, other=0)
        if start // BLOCK_M + middle <= block:
            low = middle + 1
        else:
            high = middle
    expert = low - 1
    start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    stop = tl.load(offsets_ptr + expert)
    first = start + (block - (start // BLOCK_M + expert)) * BLOCK_M
    if first >= stop:
        return
    row = first + tl.arange(0, BLOCK_M)
    row_ok = row < stop
    source = tl.load(rows_ptr + row, mask=row_ok, other=0).to(tl.int64) if GATHER else row.to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_ok = column < columns
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + source[:, None] * x_row + k[None, :]
    w_at = w_ptr + tl.cast(expert, tl.int64) * w_expert + column[None, :] * w_column + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for done in range(0, depth, BLOCK_K):
        k_ok = done + k < depth
        x = tl.load(x_at + done, mask=row_ok[:, None] & k_ok[None, :], other=0.0)
        w = tl.load(w_at + done, mask=k_ok[:, None] & column_ok[None, :], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    y_at = y_ptr + row.to(tl.int64)[:, None] * y_row + column[None, :]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=row_ok[:, None] & column_ok[None, :])
