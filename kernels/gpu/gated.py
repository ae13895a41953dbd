"""The gate of a gated MLP: y = act(gate) * up, with act SiLU (arXiv:2002.05202) or tanh-approximated GELU.

One program handles BLOCK columns of one row, in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [..., 2N], gate first -> silu(gate) * up [..., N]."""
    return _gated(gate_up, gelu=False)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [..., 2N], gate first -> gelu_tanh(gate) * up [..., N]."""
    return _gated(gate_up, gelu=True)


def _gated(gate_up: torch.Tensor, gelu: bool) -> torch.Tensor:
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    size = rows.shape[1] // 2
    out = rows.new_empty(rows.shape[0], size)
    block = min(2048, triton.next_power_of_2(size))
    _gate[(rows.shape[0], triton.cdiv(size, block))](
        rows, out, rows.stride(0), out.stride(0), size, BLOCK=block, GELU=gelu, num_warps=4
    )
    return out.view(*gate_up.shape[:-1], size)


@triton.jit
def _gate(x_ptr, y_ptr, x_row: tl.int64, y_row: tl.int64, size, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < size
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * x_row + i, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_row + size + i, mask=ok, other=0.0).to(tl.float32)
    if GELU:  # tanh(z) = 2 * sigmoid(2 z) - 1
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate * tl.sigmoid(2.0 * inner)
    else:
        gate = gate * tl.sigmoid(gate)
    tl.store(y_ptr + row * y_row + i, (gate.to(dtype).to(tl.float32) * up).to(dtype), mask=ok)
