"""The structures of kernels.h, as ctypes has them, filled in from tensors.

A structure holds addresses only: whoever makes one keeps its tensors alive for as long as it is used.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cbatch.kernels.attention import Layout, row_size

_GATES = {None: 0, "silu": 1, "gelu": 2}
_ADDRESS, _WORD, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

SIGNATURES: dict[str, list[Any]] = {
    "linear": [_ADDRESS],
    "store_kv": [_ADDRESS],
    "paged_attention": [_ADDRESS],
    "decoder_layer": [_ADDRESS] * 5,
    "rms_norm": [_ADDRESS] * 4 + [_WORD] * 3 + [_FLOAT] * 2 + [_WORD],
    "argmax": [_ADDRESS] * 2 + [_WORD] * 4,
    "sample": [_ADDRESS] * 3 + [_WORD] * 4,
}


def _fields(**kinds: tuple[Any, str]) -> list[tuple[str, Any]]:
    return [(name, kind) for kind, names in kinds.values() for name in names.split()]


class LinearCall(ctypes.Structure):
    """`Linear` of kernels.h."""

    _fields_ = _fields(
        addresses=(_ADDRESS, "x w w_scale offset bias y scratch"),
        words=(_WORD, "m n k x_stride y_stride epilogue is_int8 is_bf16"),
    )


class StepCall(ctypes.Structure):
    """`Step` of kernels.h."""

    _fields_ = _fields(
        addresses=(_ADDRESS, "slots tables starts lengths tasks cos sin"),
        words=(_WORD, "num_tokens num_tasks table_stride rotary"),
    )


class AttentionCall(ctypes.Structure):
    """`Attention` of kernels.h."""

    _fields_ = _fields(
        addresses=(_ADDRESS, "step query key value k_cache v_cache out q_weight k_weight"),
        words=(_WORD, "heads kv_heads k_size v_size block_size q_stride k_stride v_stride window is_bf16 is_int8"),
        floats=(_FLOAT, "scale softcap eps weight_offset"),
    )


class LayerCall(ctypes.Structure):
    """`Layer` of layer.c."""

    _fields_ = [
        *((name, LinearCall) for name in ("qkv", "out", "gate_up", "down")),
        ("attention", AttentionCall),
        *_fields(
            addresses=(_ADDRESS, "norm1 norm2"), words=(_WORD, "width"), floats=(_FLOAT, "eps1 offset1 eps2 offset2")
        ),
    ]


@dataclass(frozen=True)
class Packed:
    """Weights [n, k] in panels; all else is [n padded]: `bias` and `scales` float32, `offset` int32."""

    panels: Tensor
    n: int
    k: int
    bias: Tensor | None
    gate: str | None
    scales: Tensor | None = None
    offset: Tensor | None = None

    @property
    def is_int8(self) -> bool:
        return self.scales is not None


def linear_call(packed: Packed, dtype: torch.dtype) -> LinearCall:
    """A product with inputs of this dtype; without the input, the output and the scratch memory."""
    return LinearCall(
        w=packed.panels.data_ptr(), w_scale=address(packed.scales), offset=address(packed.offset),
        bias=address(packed.bias), n=packed.n, k=packed.k, epilogue=_GATES[packed.gate],
        is_int8=packed.is_int8, is_bf16=dtype == torch.bfloat16,
    )  # fmt: skip


def step_call(layout: Layout) -> StepCall:
    """Where the tokens of a step attend; without the slots that they are stored in, and without a rotation."""
    return StepCall(
        tables=layout.block_tables.data_ptr(), table_stride=layout.block_tables.stride(0),
        starts=layout.cu_seqlens_q.data_ptr(), lengths=layout.seq_lens.data_ptr(),
        tasks=layout.tasks.data_ptr(), num_tasks=len(layout.tasks),
    )  # fmt: skip


def attention_call(k_cache: Tensor, v_cache: Tensor, dtype: torch.dtype) -> AttentionCall:
    """Attention with queries, keys and values in `dtype`; without these, and without the step."""
    is_int8 = k_cache.dtype == torch.int8
    assert is_int8 or k_cache.dtype == dtype
    _, block_size, kv_heads, k_row = k_cache.shape
    scale = row_size(0, k_cache.dtype)
    return AttentionCall(
        k_cache=k_cache.data_ptr(), v_cache=v_cache.data_ptr(), kv_heads=kv_heads, k_size=k_row - scale,
        v_size=v_cache.shape[3] - scale, block_size=block_size, is_bf16=dtype == torch.bfloat16, is_int8=is_int8,
    )  # fmt: skip


def address(x: Tensor | None) -> int | None:
    """Where the values of a tensor lie."""
    return None if x is None else x.data_ptr()
