"""Ops by device: Triton kernels on a GPU, C kernels on a CPU, torch's operators where there are none.

A backend is chosen once for a device, and held by whoever computes with it: the KV cache and the fused modules.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from cbatch.errors import UsageError
from cbatch.kernels import reference, sdpa
from cbatch.kernels.attention import AttentionOps, AttentionSpec, Rotary
from cbatch.kernels.cpu import build, native
from cbatch.kernels.cpu.calls import Packed
from cbatch.model.batch import Batch
from cbatch.model.cache import code_folder


class Backend:
    """Every op with torch's own operators, for any device. Subclasses replace the ops that they have kernels for."""

    has_kernels = False  # whether modules are worth replacing by those of `fused.py`
    has_experts = False  # whether a mixture of experts is worth replacing, too
    has_layers = False  # whether a decoder layer can be a single call
    draws_on_device = False  # whether tokens are drawn by `kernels/gpu/sample.py`, without a wait for the device

    def __init__(self, missing: str = "") -> None:
        """`missing`: why there are no C kernels."""
        self.missing = missing

    def takes_heads(self, key_size: int, value_size: int) -> bool:  # noqa: ARG002
        """Whether the attention kernels take heads of these sizes."""
        return False

    def why_not_quantized(self, dtype: torch.dtype, block_size: int) -> str:  # noqa: ARG002
        """Why a model in `dtype` can't have a KV cache of 8 bits; empty if it can."""
        return f"there are no C kernels: {self.missing}"

    def attention(self, spec: AttentionSpec, cache_dtype: torch.dtype, block_size: int) -> AttentionOps:  # noqa: ARG002
        """The attention ops for a layer with this KV cache: the kernels, or torch's operators if they don't take it."""
        return sdpa

    def decoder_layer(
        self,
        layer: native.Layer,
        x: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: Batch,
        rotary: tuple[Tensor, Tensor],
    ) -> Tensor:
        """x [1, T, width] through a decoder layer whose weights are packed; cos and sin [1, T, ROT]."""
        raise NotImplementedError

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, weight_offset: float = 0.0
    ) -> Tensor:
        """`reference.rms_norm`: adds into `residual` in place."""
        return reference.rms_norm(x, weight, eps, residual, weight_offset)

    def gated(self, gate_up: Tensor, gate: str) -> Tensor:
        """gate_up [..., 2N] -> act(gate) * up [..., N]; `gate` is silu or gelu (tanh-approximated)."""
        first, up = gate_up.chunk(2, -1)
        return (functional.gelu(first, approximate="tanh") if gate == "gelu" else functional.silu(first)) * up

    def can_pack(self, weight: Tensor, gate: str | None, int8: bool) -> bool:  # noqa: ARG002
        """Whether `pack` takes these weights [n, k], and makes `linear` faster."""
        return False

    def pack(self, weight: Tensor, bias: Tensor | None, gate: str | None, int8: bool) -> Packed:
        """Weights [n, k] in the layout of the kernels; with `int8` they are quantized."""
        raise NotImplementedError

    def linear(self, x: Tensor, weight: Tensor | Packed, bias: Tensor | None = None, gate: str | None = None) -> Tensor:
        """x [..., k] times weights [n, k], plus a bias [n], then `gated` if there is a gate. Packed weights hold both."""
        assert isinstance(weight, Tensor)
        y = functional.linear(x, weight, bias)
        return self.gated(y, gate) if gate else y

    def experts(
        self, x: Tensor, gate_up: Tensor, down: Tensor, topk_ids: Tensor, weights: Tensor, gelu: bool
    ) -> Tensor:
        """`reference.experts`."""
        return reference.experts(x, gate_up, down, topk_ids, weights, gelu)

    def argmax(self, logits: Tensor) -> Tensor:
        """[n, vocabulary] -> [n] int64: the lowest index of the largest, or -1 if it is not finite or one is NaN."""
        valid = logits.amax(-1).isfinite()
        return torch.where(valid, logits.argmax(-1), -1)

    def can_draw(self, logits: Tensor) -> bool:  # noqa: ARG002
        """Whether `draw` takes these logits."""
        return False

    def draw(self, logits: Tensor, draws: Tensor) -> Tensor:
        """A token for each draw; see `kernels.cpu.native.Library.sample`."""
        raise NotImplementedError


class CBackend(Backend):
    """The C kernels, and torch's operators for what they don't take."""

    has_kernels = has_layers = True

    def __init__(self, library: native.Library) -> None:
        super().__init__()
        self._library = library
        self._step: tuple[Batch, Tensor, native.Step] | None = None  # the latest, which all layers share

    def takes_heads(self, key_size: int, value_size: int) -> bool:
        return native.fits(torch.float32, 32, key_size, value_size)

    def why_not_quantized(self, dtype: torch.dtype, block_size: int) -> str:
        if dtype == torch.float16:
            return "it does not go with --dtype float16"
        if not native.fits(dtype, block_size, 16, 16) or block_size > native.MOST_INT8:
            return f"--block-size must be a multiple of 32 up to {native.MOST_INT8}, not {block_size}"
        return ""

    def attention(self, spec: AttentionSpec, cache_dtype: torch.dtype, block_size: int) -> AttentionOps:
        fits = native.fits(cache_dtype, block_size, spec.key_size, spec.value_size) or cache_dtype == torch.int8
        return self._library if fits else sdpa

    def decoder_layer(
        self,
        layer: native.Layer,
        x: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: Batch,
        rotary: tuple[Tensor, Tensor],
    ) -> Tensor:
        cos, sin = rotary
        if self._step is None or self._step[0] is not batch or self._step[1] is not cos:
            self._step = batch, cos, native.Step(batch, Rotary(cos[0], sin[0]), x.dtype)
        return self._library.decoder_layer(layer, x, k_cache, v_cache, self._step[2])

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, weight_offset: float = 0.0
    ) -> Tensor:
        if native.can_norm(x, weight, residual):
            return self._library.rms_norm(x, weight, eps, residual, weight_offset)
        return super().rms_norm(x, weight, eps, residual, weight_offset)

    def can_pack(self, weight: Tensor, gate: str | None, int8: bool) -> bool:
        return self._library.can_pack(weight, gate, int8)

    def pack(self, weight: Tensor, bias: Tensor | None, gate: str | None, int8: bool) -> Packed:
        return self._library.pack(weight, bias, gate, int8)

    def linear(self, x: Tensor, weight: Tensor | Packed, bias: Tensor | None = None, gate: str | None = None) -> Tensor:
        return self._library.linear(x, weight) if isinstance(weight, Packed) else super().linear(x, weight, bias, gate)

    def argmax(self, logits: Tensor) -> Tensor:
        return self._library.argmax(logits) if self.can_draw(logits) else super().argmax(logits)

    def can_draw(self, logits: Tensor) -> bool:
        return logits.dtype in (torch.bfloat16, torch.float32)

    def draw(self, logits: Tensor, draws: Tensor) -> Tensor:
        return self._library.sample(logits, draws)


class TritonBackend(Backend):
    """The Triton kernels, on a GPU or in Triton's interpreter."""

    has_kernels = has_experts = draws_on_device = True

    def __init__(self, device: torch.device, min_head_size: int = 16) -> None:
        """`min_head_size`: 16 on a GPU; the interpreter takes any."""
        super().__init__()
        from cbatch.kernels.gpu import attention, gated, moe, rms_norm

        self._device, self._min_head_size = device, min_head_size
        self._attention, self._gated, self._moe, self._norm = attention, gated, moe, rms_norm

    def takes_heads(self, key_size: int, value_size: int) -> bool:
        return self._min_head_size <= key_size == value_size <= 256

    def why_not_quantized(self, dtype: torch.dtype, block_size: int) -> str:  # noqa: ARG002
        if not torch.version.hip and torch.cuda.get_device_capability(self._device) < (8, 9):
            return f"{torch.cuda.get_device_name(self._device)} has no fp8, which needs compute capability 8.9"
        return ""

    def attention(self, spec: AttentionSpec, cache_dtype: torch.dtype, block_size: int) -> AttentionOps:  # noqa: ARG002
        return self._attention if self.takes_heads(spec.key_size, spec.value_size) else sdpa

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, weight_offset: float = 0.0
    ) -> Tensor:
        return self._norm.rms_norm(x, weight, eps, residual, weight_offset)

    def gated(self, gate_up: Tensor, gate: str) -> Tensor:
        return self._gated.gelu_mul(gate_up) if gate == "gelu" else self._gated.silu_mul(gate_up)

    def experts(
        self, x: Tensor, gate_up: Tensor, down: Tensor, topk_ids: Tensor, weights: Tensor, gelu: bool
    ) -> Tensor:
        return self._moe.experts(x, gate_up, down, topk_ids, weights, gelu)


@cache
def choose(device: torch.device) -> Backend:
    """The backend for a device. On a CPU the C kernels are compiled first, unless they have been before."""
    if device.type == "cuda":
        return TritonBackend(device)
    if device.type != "cpu":
        return Backend()
    try:
        return CBackend(native.load(code_folder()))
    except (build.Unavailable, UsageError) as error:  # or there is no place to compile them in
        return Backend(str(error))
