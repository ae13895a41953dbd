"""The C kernels for CPUs in this folder, called through ctypes.

The contracts are those of `reference.py`, for bfloat16 and float32.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cbatch.kernels.attention import NO_NORMS, AttentionSpec, HeadNorms, Layout, Norm, Rotary
from cbatch.kernels.cpu import build
from cbatch.kernels.cpu.calls import (
    SIGNATURES,
    AttentionCall,
    LayerCall,
    Packed,
    StepCall,
    address,
    attention_call,
    linear_call,
    step_call,
)
from cbatch.kernels.cpu.huge_pages import HugePages

_PANEL, _LANES = 32, 16
MOST_INT8 = 1 << 16  # products of two bytes (255 * 127 at most) whose sum is sure to fit in 32 bits
_DTYPES = torch.bfloat16, torch.float32


def load(folder: Path, cpu: str = "native") -> Library:
    """The kernels, compiled into `folder` unless they are there already; `build.Unavailable` says why they can't be.

    `cpu`: as in `build.load`.
    """
    return Library(build.load(folder, cpu))


def _interleave(x: Tensor) -> Tensor:
    """Rows of gates and of the outputs that they scale, 16 of each in turn."""
    gate, up = x.chunk(2)
    return torch.stack([part.view(-1, _LANES, *x.shape[1:]) for part in (gate, up)], 1).flatten(0, 2)


class Library:
    """The compiled kernels. Inputs are on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, kinds in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = kinds, None
        self._c: Any = library
        self._huge_pages = HugePages()
        self._multiplies_bf16 = bool(library.multiplies_bf16())

    def can_pack(self, weight: Tensor, gate: str | None, int8: bool) -> bool:
        """Whether `pack` takes these weights [n, k], and `linear` is fast with them."""
        n, k = weight.shape
        fast = int8 or (weight.dtype == torch.bfloat16 and self._multiplies_bf16)
        summable = not int8 or k <= MOST_INT8
        return fast and summable and weight.dtype in _DTYPES and k % _LANES == 0 and (gate is None or n % _PANEL == 0)

    def pack(self, weight: Tensor, bias: Tensor | None, gate: str | None, int8: bool) -> Packed:
        """Weights [n, k] for `linear`. With a `gate` (silu or gelu) the first half of the outputs scales the rest.

        int8: each output has its own scale, and so has each row of the input.
        """
        n, k = weight.shape
        if gate:
            weight, bias = _interleave(weight), None if bias is None else _interleave(bias)
        padding, unit = -n % _PANEL, 4 if int8 else 2
        weight = functional.pad(weight, (0, 0, 0, padding))
        bias = None if bias is None else functional.pad(bias.float(), (0, padding)).contiguous()
        scales = offset = None
        if int8:
            wide = weight.float()
            scales = wide.abs().amax(1).clamp(min=1e-30) / 127
            weight = (wide / scales[:, None]).round().to(torch.int8)
            offset = 128 * weight.sum(1, dtype=torch.int32)
        panels = weight.view(-1, _PANEL, k // unit, unit).permute(0, 2, 1, 3)
        return Packed(self._huge_pages.take(panels.shape, panels.dtype).copy_(panels), n, k, bias, gate, scales, offset)

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        """x [..., k] -> [..., n] of the same dtype, or half as wide if gated."""
        rows = _matrix(x)
        assert rows.shape[1] == packed.k
        assert x.dtype in (_DTYPES if packed.is_int8 else [packed.panels.dtype])
        m, width = len(rows), packed.n // 2 if packed.gate else packed.n
        out = torch.empty(m, width, dtype=x.dtype)
        scratch = torch.empty(m * (packed.k + 4) if packed.is_int8 else 0, dtype=torch.uint8)
        call = linear_call(packed, x.dtype)
        call.x, call.x_stride, call.m = rows.data_ptr(), rows.stride(0), m
        call.y, call.y_stride, call.scratch = out.data_ptr(), width, scratch.data_ptr()
        self._c.linear(ctypes.addressof(call))
        return out.view(*x.shape[:-1], width)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, weight_offset: float) -> Tensor:
        """`reference.rms_norm`, for a row size that is a multiple of 16."""
        rows = _matrix(x)
        out = torch.empty(rows.shape, dtype=x.dtype)
        self._c.rms_norm(
            rows.data_ptr(), address(residual), weight.data_ptr(), out.data_ptr(), *rows.shape, rows.stride(0),
            eps, weight_offset, x.dtype == torch.bfloat16,
        )  # fmt: skip
        return out.view(x.shape)

    def argmax(self, logits: Tensor) -> Tensor:
        """[n, vocabulary] -> [n] int64: the lowest index of the largest, or -1 if it is not finite or one is NaN."""
        logits = _matrix(logits)
        tokens = torch.empty(len(logits), dtype=torch.int64)
        self._c.argmax(
            logits.data_ptr(), tokens.data_ptr(), *logits.shape, logits.stride(0), logits.dtype == torch.bfloat16
        )
        return tokens

    def sample(self, logits: Tensor, draws: Tensor) -> Tensor:
        """logits [rows, vocabulary] -> [n] int64: a token for each draw, -1 where `argmax` gives it.

        draws [n, 6] float64: row of the logits, temperature (0 for the argmax), top_k (at least 1), top_p, min_p, and a
        uniform number below 1: the token is where the cumulative distribution, in vocabulary order, passes it.
        """
        logits, draws = _matrix(logits), draws.contiguous()
        tokens = torch.empty(len(draws), dtype=torch.int64)
        self._c.sample(
            logits.data_ptr(), draws.data_ptr(), tokens.data_ptr(), len(draws), logits.shape[1], logits.stride(0),
            logits.dtype == torch.bfloat16,
        )  # fmt: skip
        return tokens

    def store_kv(self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """`reference.store_kv`, into a cache in the layout of attention.c."""
        self._store(key, value, attention_call(k_cache, v_cache, key.dtype), _stored(slot_mapping))

    def rope_store_kv(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        rotary: Rotary,
        norms: HeadNorms = NO_NORMS,
    ) -> None:
        """`reference.rope_store_kv`, into a cache in the layout of attention.c."""
        assert query is _rows(query)  # it is changed in place
        assert all(x is None or x.dtype == key.dtype for x in (query, norms.q_weight, norms.k_weight))
        call, step = attention_call(k_cache, v_cache, key.dtype), _stored(slot_mapping)
        rotary = _fitted(rotary, key.dtype)
        call.query, call.q_stride, call.heads = query.data_ptr(), query.stride(0), query.shape[1]
        call.q_weight, call.k_weight = address(norms.q_weight), address(norms.k_weight)
        call.eps, call.weight_offset = norms.eps, norms.weight_offset
        step.cos, step.sin, step.rotary = rotary.cos.data_ptr(), rotary.sin.data_ptr(), rotary.cos.shape[1]
        self._store(key, value, call, step)

    def _store(self, key: Tensor, value: Tensor, call: AttentionCall, step: StepCall) -> None:
        assert value.dtype == key.dtype
        key, value = _rows(key), _rows(value)
        call.step, call.key, call.k_stride = ctypes.addressof(step), key.data_ptr(), key.stride(0)
        call.value, call.v_stride = value.data_ptr(), value.stride(0)
        self._c.store_kv(ctypes.addressof(call))

    def paged_attention(
        self, query: Tensor, k_cache: Tensor, v_cache: Tensor, layout: Layout, spec: AttentionSpec
    ) -> Tensor:
        """`reference.paged_attention` in the dtype of `query`."""
        query = _rows(query)
        step, call = step_call(layout), attention_call(k_cache, v_cache, query.dtype)
        out = query.new_empty(*query.shape[:2], call.v_size)
        call.step, call.query, call.q_stride = ctypes.addressof(step), query.data_ptr(), query.stride(0)
        call.heads, call.out = query.shape[1], out.data_ptr()
        call.scale, call.window, call.softcap = spec.scale, spec.window, spec.softcap
        self._c.paged_attention(ctypes.addressof(call))
        return out

    def decoder_layer(self, layer: Layer, x: Tensor, k_cache: Tensor, v_cache: Tensor, step: Step) -> Tensor:
        """x [..., width] -> the output of the layer, of the same shape; its keys and values are stored."""
        rows = _matrix(x).contiguous()
        assert x.dtype == layer.dtype
        assert k_cache.dtype in (x.dtype, torch.int8)
        assert rows.shape == (step.num_tokens, layer.width)
        out = torch.empty(rows.shape, dtype=x.dtype)
        scratch = torch.empty(len(rows) * layer.scratch_bytes, dtype=torch.uint8)
        attention = layer.call.attention
        attention.k_cache, attention.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
        attention.block_size, attention.is_int8 = k_cache.shape[1], k_cache.dtype == torch.int8
        self._c.decoder_layer(layer.address, step.address, rows.data_ptr(), out.data_ptr(), scratch.data_ptr())
        return out.view(x.shape)


class Step:
    """Where the tokens of a step lie and how they are rotated, for all layers of a model in `dtype`."""

    def __init__(self, layout: Layout, rotary: Rotary, dtype: torch.dtype) -> None:
        rotary = _fitted(rotary, dtype)
        self._kept = layout, rotary
        self.num_tokens = len(layout.slot_mapping)
        self._call = step_call(layout)
        self._call.slots, self._call.num_tokens = layout.slot_mapping.data_ptr(), self.num_tokens
        self._call.cos, self._call.sin = rotary.cos.data_ptr(), rotary.sin.data_ptr()
        self._call.rotary = rotary.cos.shape[1]
        self.address = ctypes.addressof(self._call)


class Layer:
    """A decoder layer whose weights are packed.

    `products`: qkv, output, gate and up, down; `norms`: before the attention and before the MLP. All norms have one dtype,
    that of the activations and of a KV cache that is not of int8.
    """

    def __init__(
        self,
        products: tuple[Packed, Packed, Packed, Packed],
        norms: tuple[Norm, Norm],
        num_heads: int,
        head_norms: HeadNorms,
        spec: AttentionSpec,
    ) -> None:
        first, second = norms
        self.dtype, self.width = first.weight.dtype, len(first.weight)
        weights = second.weight, head_norms.q_weight, head_norms.k_weight
        assert all(weight is None or weight.dtype == self.dtype for weight in weights)
        attention = AttentionCall(
            heads=num_heads, kv_heads=spec.num_kv_heads, k_size=spec.key_size, v_size=spec.value_size,
            is_bf16=self.dtype == torch.bfloat16, q_weight=address(head_norms.q_weight),
            k_weight=address(head_norms.k_weight), eps=head_norms.eps, weight_offset=head_norms.weight_offset,
            scale=spec.scale, window=spec.window, softcap=spec.softcap,
        )  # fmt: skip
        self.call = LayerCall(
            *(linear_call(packed, self.dtype) for packed in products), attention,
            first.weight.data_ptr(), second.weight.data_ptr(), self.width,
            first.eps, first.weight_offset, second.eps, second.weight_offset,
        )  # fmt: skip
        self._kept = products, norms, head_norms
        self.address = ctypes.addressof(self.call)
        qkv, out, _, down = products
        widest = max(packed.k for packed in products) + 4
        self.scratch_bytes = (qkv.n + out.k + self.width + down.k) * self.dtype.itemsize + widest


def fits(dtype: torch.dtype, block_size: int, key_size: int, value_size: int) -> bool:
    """Whether the attention takes such a cache; of a cache of int8, `dtype` is that of the model."""
    return dtype in _DTYPES and block_size % _PANEL == 0 and key_size % _LANES == value_size % _LANES == 0


def can_norm(x: Tensor, weight: Tensor, residual: Tensor | None) -> bool:
    """Whether `Library.rms_norm` takes tensors of these shapes and dtypes."""
    fits_x = residual is None or (residual.dtype == x.dtype and residual.is_contiguous())
    return fits_x and x.dtype == weight.dtype and x.dtype in _DTYPES and x.shape[-1] % _LANES == 0


def _stored(slot_mapping: Tensor) -> StepCall:
    return StepCall(slots=slot_mapping.data_ptr(), num_tokens=len(slot_mapping))


def _fitted(rotary: Rotary, dtype: torch.dtype) -> Rotary:
    return Rotary(*(table.to(dtype).contiguous() for table in rotary))


def _matrix(x: Tensor) -> Tensor:
    """x [..., k] as [m, k], rows contiguous in themselves."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _rows(x: Tensor) -> Tensor:
    """[T, H, D] with the heads of a token back to back."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
