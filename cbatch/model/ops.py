"""One function for each op: the Triton kernel on a GPU, the C kernel on a CPU, torch's operators where neither can."""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch.nn import functional

from cbatch.kernels import reference, sdpa
from cbatch.kernels.cpu import build, native
from cbatch.model.batch import Batch
from cbatch.model.fetch import cache_folder

interpreted = False  # set by tests: Triton kernels on any device, through Triton's interpreter
without_native = ""  # why there are no C kernels


@cache
def _library() -> native.Library | None:
    global without_native
    try:
        return native.load(cache_folder())
    except (build.Unavailable, RuntimeError) as error:  # or there is no home folder
        without_native = str(error)
        return None


def uses_triton(x: torch.Tensor) -> bool:
    return x.is_cuda or interpreted


def fits_triton(key_size: int, value_size: int) -> bool:
    """Whether the Triton kernels take heads of these sizes; the interpreter takes smaller ones too."""
    return key_size == value_size <= 256 and (key_size >= 16 or interpreted)


def c_kernels(x: torch.Tensor) -> native.Library | None:
    """The C kernels, compiled when first needed, if `x` is for them."""
    return _library() if x.device.type == "cpu" and not interpreted else None


def _c_attention(k_cache: torch.Tensor, v_cache: torch.Tensor) -> native.Library | None:
    """The C kernels, if this cache is kept in their layout, as one of int8 always is."""
    fits = native.fits(k_cache.dtype, k_cache.shape[1], k_cache.shape[3], v_cache.shape[3])
    return c_kernels(k_cache) if fits or k_cache.dtype == torch.int8 else None


def why_not_int8(dtype: torch.dtype, block_size: int) -> str:
    """Why there can be no cache of int8 for a model in `dtype` on a CPU; empty if there can."""
    if c_kernels(torch.empty(0)) is None:
        return f"there are no C kernels: {without_native}"
    if dtype == torch.float16:
        return "it does not go with --dtype float16"
    if not native.fits(dtype, block_size, 16, 16) or block_size > native.MOST_INT8:
        return f"--block-size must be a multiple of 32 up to {native.MOST_INT8}, not {block_size}"
    return ""


def why_not_fp8(device: torch.device) -> str:
    """Why there can be no cache of fp8 on a GPU; empty if there can."""
    if not torch.version.hip and torch.cuda.get_device_capability(device) < (8, 9):
        return f"{torch.cuda.get_device_name(device)} has no fp8, which needs compute capability 8.9"
    return ""


def fits_cache(cache: torch.dtype, key_size: int, value_size: int) -> bool:
    """Whether the kernels that take a cache of int8 or fp8 take heads of these sizes."""
    return (
        native.fits(torch.float32, 32, key_size, value_size)
        if cache == torch.int8
        else fits_triton(key_size, value_size)
    )


def has_kernels(device: torch.device) -> bool:
    """Whether modules are worth replacing on this device."""
    return interpreted or device.type == "cuda" or c_kernels(torch.empty(0, device=device)) is not None


def store_kv(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """`reference.store_kv`."""
    if uses_triton(key) and fits_triton(key.shape[-1], value.shape[-1]):
        from cbatch.kernels.gpu.store_kv import store_kv as kernel

        kernel(key, value, k_cache, v_cache, slot_mapping)
    elif (c := _c_attention(k_cache, v_cache)) is not None:
        c.store_kv(None, key, value, k_cache, v_cache, slot_mapping)
    else:
        sdpa.store_kv(key, value, k_cache, v_cache, slot_mapping)


def paged_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: Batch,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """`reference.paged_attention` in the dtype of `query`."""
    where = batch.block_tables, batch.cu_seqlens_q, batch.seq_lens
    if uses_triton(query) and fits_triton(k_cache.shape[-1], v_cache.shape[-1]):
        from cbatch.kernels.gpu.paged_attention import paged_attention as kernel

        longest = batch.max_seqlen_q, batch.max_seq_len
        return kernel(query, k_cache, v_cache, *where, *longest, scale, window, softcap)
    if (c := _c_attention(k_cache, v_cache)) is not None:
        return c.paged_attention(query, k_cache, v_cache, (*where, batch.tasks), scale, window, softcap)
    return sdpa.paged_attention(query, k_cache, v_cache, batch.block_tables, batch.spans, scale, window, softcap)


def rope_store_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
) -> None:
    """`reference.rope_store_kv`: rotates `query` in place."""
    arguments = (query, key, value, k_cache, v_cache, slot_mapping, cos, sin, q_weight, k_weight, eps, weight_offset)
    if uses_triton(key) and fits_triton(key.shape[-1], value.shape[-1]):
        from cbatch.kernels.gpu.store_kv import rope_store_kv as kernel

        kernel(*arguments)
    elif (c := _c_attention(k_cache, v_cache)) is not None:
        c.store_kv(*arguments[:6], (cos, sin), (q_weight, k_weight, eps, weight_offset))
    else:
        query.copy_(reference.rotate(query, cos, sin, q_weight, eps, weight_offset))
        sdpa.store_kv(
            reference.rotate(key, cos, sin, k_weight, eps, weight_offset), value, k_cache, v_cache, slot_mapping
        )


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    """`reference.rms_norm`: adds into `residual` in place."""
    if uses_triton(x):
        from cbatch.kernels.gpu.rms_norm import rms_norm as kernel

        return kernel(x, weight, eps, residual, weight_offset)
    if native.can_norm(x, weight, residual) and (c := c_kernels(x)) is not None:
        return c.rms_norm(x, weight, eps, residual, weight_offset)
    return reference.rms_norm(x, weight, eps, residual, weight_offset)


def gated(gate_up: torch.Tensor, gate: str) -> torch.Tensor:
    """gate_up [..., 2N] -> act(gate) * up [..., N]; `gate` is silu or gelu (tanh-approximated)."""
    if uses_triton(gate_up):
        from cbatch.kernels.gpu.gated import gelu_mul, silu_mul

        return gelu_mul(gate_up) if gate == "gelu" else silu_mul(gate_up)
    first, up = gate_up.chunk(2, -1)
    return (functional.gelu(first, approximate="tanh") if gate == "gelu" else functional.silu(first)) * up


def pack(
    weight: torch.Tensor, bias: torch.Tensor | None, gate: str | None = None, int8: bool = False
) -> native.Packed | None:
    """Weights [n, k] in the layout of the C kernels; None where torch's own product is used."""
    c = c_kernels(weight)
    return c.pack(weight, bias, gate, int8) if c and c.can_pack(weight, gate, int8) else None


def linear(
    x: torch.Tensor, weight: torch.Tensor | native.Packed, bias: torch.Tensor | None = None, gate: str | None = None
) -> torch.Tensor:
    """x [..., k] times weights [n, k], plus a bias [n], then `gated` if there is a gate."""
    if isinstance(weight, native.Packed):
        library = _library()
        assert library is not None
        return library.linear(x, weight)
    y = functional.linear(x, weight, bias)
    return gated(y, gate) if gate else y


def decoder_layer(
    layer: native.Layer,
    x: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: Batch,
    angles: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """x [1, T, width] through a decoder layer whose weights are packed; cos and sin [1, T, rotary]."""
    library = _library()
    assert library is not None
    return library.decoder_layer(layer, x, k_cache, v_cache, _step(batch, angles, x.dtype))


@lru_cache(maxsize=1)  # the layers of a step ask for the same, one after another
def _step(batch: Batch, angles: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> native.Step:
    where = batch.block_tables, batch.cu_seqlens_q, batch.seq_lens, batch.tasks
    return native.Step(batch.slot_mapping, where, [one[0] for one in angles], dtype)


def c_sampler(logits: torch.Tensor) -> native.Library | None:
    """The C kernels, if they take these logits."""
    return c_kernels(logits) if logits.dtype in (torch.bfloat16, torch.float32) else None


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """[n, vocabulary] -> [n] int64: the lowest index of the largest, or -1 if that is not finite or one is NaN."""
    if (c := c_sampler(logits)) is not None:
        return c.argmax(logits)
    valid = logits.amax(-1).isfinite()
    return torch.where(valid, logits.argmax(-1), -1)


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: torch.Tensor,
    gelu: bool,
) -> torch.Tensor:
    """`reference.experts`."""
    if uses_triton(x):
        from cbatch.kernels.gpu.moe import experts as kernel

        return kernel(x, gate_up, down, topk_ids, weights, gelu)
    return reference.experts(x, gate_up, down, topk_ids, weights, gelu)
