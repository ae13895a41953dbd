"""RMSNorm (arXiv:1910.07467), with the residual addition before it if there is one.

    h = x + residual        (rounded to the model's dtype, and kept as the new residual)
    y = h / sqrt(mean(h^2) + eps) * (weight + weight_offset)

One program handles one row, in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    """`reference.rms_norm`: x [..., N], weight [N] -> [..., N]; `residual` [..., N] becomes x + residual, in place."""
    rows = x.reshape(-1, x.shape[-1])
    kept = rows if residual is None else residual.view(-1, x.shape[-1])
    out = torch.empty_like(rows)
    size = rows.shape[1]
    _norm[(rows.shape[0],)](
        rows, kept, weight, out, rows.stride(0), kept.stride(0), out.stride(0), size, eps, weight_offset,
        BLOCK=triton.next_power_of_2(size), RESIDUAL=residual is not None, num_warps=min(16, max(4, size // 512)),
    )  # fmt: skip
    return out.view(x.shape)


@triton.jit
def _norm(
    x_ptr, residual_ptr, weight_ptr, y_ptr, x_row: tl.int64, residual_row: tl.int64, y_row: tl.int64, size, eps, offset,
    BLOCK: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    ok = i < size
    x = tl.load(x_ptr + row * x_row + i, mask=ok, other=0.0).to(tl.float32)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if RESIDUAL:
        x += tl.load(residual_ptr + row * residual_row + i, mask=ok, other=0.0).to(tl.float32)
        tl.store(residual_ptr + row * residual_row + i, x.to(dtype), mask=ok)
        x = x.to(dtype).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    weight = tl.load(weight_ptr + i, mask=ok, other=0.0).to(tl.float32) + offset
    tl.store(y_ptr + row * y_row + i, (normed * weight).to(dtype), mask=ok)
