"""The C kernels for CPUs in `cpu/`, called through ctypes.

Same contracts as `reference.py`. They take bfloat16 and float32.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cbatch.kernels.cpu import build

_PANEL, _LANES = 32, 16
MOST_INT8 = 1 << 16  # products of bytes, 255 * 127 at most, that 32 bits hold the sum of
_SCALE_BYTES = 4  # of a token's keys, or values, in a cache of int8
_DTYPES = torch.bfloat16, torch.float32
_GATES = {None: 0, "silu": 1, "gelu": 2}
_ADDRESS, _WORD, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def _fields(**kinds: tuple[Any, str]) -> list[tuple[str, Any]]:
    return [(name, kind) for kind, names in kinds.values() for name in names.split()]


class _Linear(ctypes.Structure):
    _fields_ = _fields(
        addresses=(_ADDRESS, "x w w_scale offset bias y scratch"),
        words=(_WORD, "m n k x_stride y_stride epilogue is_int8 is_bf16"),
    )


class _Step(ctypes.Structure):
    _fields_ = _fields(
        addresses=(_ADDRESS, "slots tables starts lengths tasks cos sin"),
        words=(_WORD, "num_tokens num_tasks table_stride rotary"),
    )


class _Attention(ctypes.Structure):
    _fields_ = _fields(
        addresses=(_ADDRESS, "step query key value k_cache v_cache out q_weight k_weight"),
        words=(_WORD, "heads kv_heads k_size v_size block_size q_stride k_stride v_stride window is_bf16 is_int8"),
        floats=(_FLOAT, "scale softcap eps weight_offset"),
    )


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _Linear) for name in ("qkv", "out", "gate_up", "down")),
        ("attention", _Attention),
        *_fields(
            addresses=(_ADDRESS, "norm1 norm2"), words=(_WORD, "width"), floats=(_FLOAT, "eps1 offset1 eps2 offset2")
        ),
    ]


_SIGNATURES = {
    "linear": [_ADDRESS],
    "store_kv": [_ADDRESS],
    "paged_attention": [_ADDRESS],
    "decoder_layer": [_ADDRESS] * 5,
    "rms_norm": [_ADDRESS] * 4 + [_WORD] * 3 + [_FLOAT] * 2 + [_WORD],
    "argmax": [_ADDRESS] * 2 + [_WORD] * 4,
    "sample": [_ADDRESS] * 3 + [_WORD] * 4,
}


def load(folder: Path, cpu: str = "native") -> Library:
    """The kernels as `build.load` compiles them; `build.Unavailable` says why it can't."""
    return Library(build.load(folder, cpu))


class HugePages:
    """Hands out memory that is in pages of 2 MiB where the system has them, and that is taken when first written.

    With pages of 4 KiB, finding them is a good part of the time that reading them takes.
    """

    _CHUNK = 64 * 1024**2  # bytes mapped at a time

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, or rather one of zeros."""
        size = math.prod(shape) * dtype.itemsize
        if size > len(self._rest):
            memory = mmap.mmap(-1, max(size, self._CHUNK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel without them
                    memory.madvise(mmap.MADV_HUGEPAGE)
            self._rest = torch.frombuffer(memory, dtype=torch.uint8)
        taken, self._rest = self._rest[:size], self._rest[-(-size // 64) * 64 :]
        return taken.view(dtype).view(shape)


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


def _interleave(x: Tensor) -> Tensor:
    """Gates and what they scale, in turns of 16."""
    gate, up = x.chunk(2)
    return torch.stack([gate.unflatten(0, (-1, _LANES)), up.unflatten(0, (-1, _LANES))], 1).flatten(0, 2)


class Library:
    """The compiled kernels. Inputs are on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, kinds in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = kinds, None
        self._c: Any = library
        self._pages = HugePages()
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
        return Packed(self._pages.take(panels.shape, panels.dtype).copy_(panels), n, k, bias, gate, scales, offset)

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        """x [..., k] -> [..., n] of the same dtype, or half as wide if gated."""
        rows = _matrix(x)
        assert rows.shape[1] == packed.k
        assert x.dtype in (_DTYPES if packed.is_int8 else [packed.panels.dtype])
        m, width = len(rows), packed.n // 2 if packed.gate else packed.n
        out = torch.empty(m, width, dtype=x.dtype)
        scratch = torch.empty(m * (packed.k + 4) if packed.is_int8 else 0, dtype=torch.uint8)
        call = _linear(packed, x.dtype)
        call.x, call.x_stride, call.m = rows.data_ptr(), rows.stride(0), m
        call.y, call.y_stride, call.scratch = out.data_ptr(), width, scratch.data_ptr()
        self._c.linear(ctypes.addressof(call))
        return out.view(*x.shape[:-1], width)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, weight_offset: float) -> Tensor:
        """`reference.rms_norm`, for a row size that is a multiple of 16."""
        rows = _matrix(x)
        out = torch.empty(rows.shape, dtype=x.dtype)
        self._c.rms_norm(
            rows.data_ptr(), _address(residual), weight.data_ptr(), out.data_ptr(), *rows.shape, rows.stride(0),
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

        draws [n, 6] float64: row of the logits, temperature (0 for the argmax), top_k (at least 1), top_p, min_p, and the
        uniform number below 1 of which the token is the quantile, in the order of the vocabulary.
        """
        logits, draws = _matrix(logits), draws.contiguous()
        tokens = torch.empty(len(draws), dtype=torch.int64)
        self._c.sample(
            logits.data_ptr(), draws.data_ptr(), tokens.data_ptr(), len(draws), logits.shape[1], logits.stride(0),
            logits.dtype == torch.bfloat16,
        )  # fmt: skip
        return tokens

    def store_kv(
        self,
        query: Tensor | None,
        key: Tensor,
        value: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        angles: tuple[Tensor, Tensor] | None = None,
        norms: tuple[Tensor | None, Tensor | None, float, float] = (None, None, 0.0, 0.0),
    ) -> None:
        """`reference.rope_store_kv` with `angles`, else `reference.store_kv`; the cache is in the layout of `cpu/`."""
        key, value = _rows(key), _rows(value)
        assert all(x is None or x.dtype == key.dtype for x in (query, value, *norms[:2]))
        step, call = _Step(slots=slot_mapping.data_ptr(), num_tokens=len(key)), _attention(k_cache, v_cache, key.dtype)
        call.step, call.key, call.k_stride = ctypes.addressof(step), key.data_ptr(), key.stride(0)
        call.value, call.v_stride = value.data_ptr(), value.stride(0)
        if query is not None:
            assert query is _rows(query)  # it is changed in place
            call.query, call.q_stride, call.heads = query.data_ptr(), query.stride(0), query.shape[1]
        if angles is not None:
            cos, sin = (one.to(key.dtype).contiguous() for one in angles)
            step.cos, step.sin, step.rotary = cos.data_ptr(), sin.data_ptr(), cos.shape[1]
        call.q_weight, call.k_weight = _address(norms[0]), _address(norms[1])
        call.eps, call.weight_offset = norms[2:]
        self._c.store_kv(ctypes.addressof(call))

    def paged_attention(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        where: Sequence[Tensor],
        scale: float,
        window: int,
        softcap: float,
    ) -> Tensor:
        """`reference.paged_attention` in the dtype of `query`.

        `where`: block_tables, cu_seqlens_q, seq_lens, and tasks [n, 3]: sequence, first and last + 1 of its tokens of
        this step. Together they are all the tokens, the longest task first.
        """
        query = _rows(query)
        step, call = _step(where), _attention(k_cache, v_cache, query.dtype)
        out = query.new_empty(*query.shape[:2], call.v_size)
        call.step, call.query, call.q_stride = ctypes.addressof(step), query.data_ptr(), query.stride(0)
        call.heads, call.out = query.shape[1], out.data_ptr()
        call.scale, call.window, call.softcap = scale, window, softcap
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
    """Where the tokens of a step belong, for all layers: `slot_mapping`, `where` as `paged_attention` takes it, and the
    cos and sin of their positions."""

    def __init__(
        self, slot_mapping: Tensor, where: Sequence[Tensor], angles: Sequence[Tensor], dtype: torch.dtype
    ) -> None:
        cos, sin = (one.to(dtype).contiguous() for one in angles)
        self._kept = slot_mapping, *where, cos, sin
        self._call = _step(where)
        self.num_tokens = len(slot_mapping)
        self._call.slots, self._call.num_tokens = slot_mapping.data_ptr(), self.num_tokens
        self._call.cos, self._call.sin, self._call.rotary = cos.data_ptr(), sin.data_ptr(), cos.shape[1]
        self.address = ctypes.addressof(self._call)


class Layer:
    """A decoder layer whose weights are packed. `products`: qkv, output, gate and up, down; `norms`: (weight, epsilon,
    offset) before the attention and before the MLP; `head_norms` as in `store_kv`; `settings`: scale, window, softcap.
    All norms have one dtype, that of the activations and of a KV cache that is not of bytes."""

    def __init__(
        self,
        products: Sequence[Packed],
        norms: Sequence[tuple[Tensor, float, float]],
        heads: tuple[int, int, int],
        head_norms: tuple[Tensor | None, Tensor | None, float, float],
        settings: tuple[float, int, float],
    ) -> None:
        (weight1, eps1, offset1), (weight2, eps2, offset2) = norms
        dtype, width, (num_heads, kv_heads, size) = weight1.dtype, len(weight1), heads
        q_weight, k_weight, eps, offset = head_norms
        assert all(one is None or one.dtype == dtype for one in (weight2, q_weight, k_weight))
        self.dtype, self.width = dtype, width
        scale, window, softcap = settings
        attention = _Attention(
            heads=num_heads, kv_heads=kv_heads, k_size=size, v_size=size, is_bf16=dtype == torch.bfloat16,
            q_weight=_address(q_weight), k_weight=_address(k_weight), eps=eps, weight_offset=offset,
            scale=scale, window=window, softcap=softcap,
        )  # fmt: skip
        self.call = _Layer(
            *(_linear(one, dtype) for one in products), attention,
            weight1.data_ptr(), weight2.data_ptr(), width, eps1, offset1, eps2, offset2,
        )  # fmt: skip
        self._kept = products, norms, head_norms
        self.address = ctypes.addressof(self.call)
        qkv, out, _, down = products
        widest = max(one.k for one in products) + 4
        self.scratch_bytes = (qkv.n + out.k + width + down.k) * dtype.itemsize + widest


def fits(dtype: torch.dtype, block_size: int, key_size: int, value_size: int) -> bool:
    """Whether the kernels take a cache like that, of the values that are in `dtype` or of bytes."""
    return dtype in _DTYPES and block_size % _PANEL == 0 and key_size % _LANES == value_size % _LANES == 0


def row_size(size: int, dtype: torch.dtype) -> int:
    """What a cache holds for the keys, or values, of a head of a token: `size` of them, and in int8 their scale."""
    return size + _SCALE_BYTES if dtype == torch.int8 else size


def can_norm(x: Tensor, weight: Tensor, residual: Tensor | None) -> bool:
    """Whether `Library.rms_norm` takes tensors of these shapes and dtypes."""
    fits_x = residual is None or (residual.dtype == x.dtype and residual.is_contiguous())
    return fits_x and x.dtype == weight.dtype and x.dtype in _DTYPES and x.shape[-1] % _LANES == 0


def _linear(packed: Packed, dtype: torch.dtype) -> _Linear:
    return _Linear(
        w=packed.panels.data_ptr(), w_scale=_address(packed.scales), offset=_address(packed.offset),
        bias=_address(packed.bias), n=packed.n, k=packed.k, epilogue=_GATES[packed.gate],
        is_int8=packed.is_int8, is_bf16=dtype == torch.bfloat16,
    )  # fmt: skip


def _step(where: Sequence[Tensor]) -> _Step:
    tables, starts, lengths, tasks = where
    return _Step(
        tables=tables.data_ptr(), table_stride=tables.stride(0), starts=starts.data_ptr(), lengths=lengths.data_ptr(),
        tasks=tasks.data_ptr(), num_tasks=len(tasks),
    )  # fmt: skip


def _attention(k_cache: Tensor, v_cache: Tensor, dtype: torch.dtype) -> _Attention:
    """Of queries, keys and values in `dtype`."""
    is_int8 = k_cache.dtype == torch.int8
    assert is_int8 or k_cache.dtype == dtype
    _, block_size, kv_heads, k_row = k_cache.shape
    scale = row_size(0, k_cache.dtype)
    return _Attention(
        k_cache=k_cache.data_ptr(), v_cache=v_cache.data_ptr(), kv_heads=kv_heads, k_size=k_row - scale,
        v_size=v_cache.shape[3] - scale, block_size=block_size, is_bf16=dtype == torch.bfloat16, is_int8=is_int8,
    )  # fmt: skip


def _matrix(x: Tensor) -> Tensor:
    """x [..., k] as [m, k], rows contiguous in themselves."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _rows(x: Tensor) -> Tensor:
    """[T, H, D] with the heads of a token back to back."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
