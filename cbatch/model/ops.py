"""One function for each op: the Triton kernel on a GPU, torch's operators elsewhere."""

from __future__ import annotations

import torch
from torch.nn import functional

from cbatch.kernels import reference, sdpa
from cbatch.model.batch import Batch

interpreted = False  # set by tests: Triton kernels on any device, through Triton's interpreter


def uses_triton(x: torch.Tensor) -> bool:
    return x.is_cuda or interpreted


def fits_triton(key_size: int, value_size: int) -> bool:
    """Whether the Triton kernels take heads of these sizes; the interpreter takes smaller ones too."""
    return key_size == value_size <= 256 and (key_size >= 16 or interpreted)


def store_kv(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """`reference.store_kv`."""
    if uses_triton(key) and fits_triton(key.shape[-1], value.shape[-1]):
        from cbatch.kernels.store_kv import store_kv as kernel

        kernel(key, value, k_cache, v_cache, slot_mapping)
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
    if uses_triton(query) and fits_triton(k_cache.shape[-1], v_cache.shape[-1]):
        from cbatch.kernels.paged_attention import paged_attention as kernel

        where = batch.block_tables, batch.cu_seqlens_q, batch.seq_lens, batch.max_seqlen_q, batch.max_seq_len
        return kernel(query, k_cache, v_cache, *where, scale, window, softcap)
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
        from cbatch.kernels.store_kv import rope_store_kv as kernel

        kernel(*arguments)
    else:
        reference.rope_store_kv(*arguments)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    """`reference.rms_norm`: adds into `residual` in place."""
    if uses_triton(x):
        from cbatch.kernels.rms_norm import rms_norm as kernel

        return kernel(x, weight, eps, residual, weight_offset)
    return reference.rms_norm(x, weight, eps, residual, weight_offset)


def gated(gate_up: torch.Tensor, gelu: bool) -> torch.Tensor:
    """gate_up [..., 2N] -> act(gate) * up [..., N]; act is SiLU or tanh-approximated GELU."""
    if uses_triton(gate_up):
        from cbatch.kernels.gated import gelu_mul, silu_mul

        return gelu_mul(gate_up) if gelu else silu_mul(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return (functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)) * up


def experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gelu: bool
) -> torch.Tensor:
    """`reference.experts`."""
    if uses_triton(x):
        from cbatch.kernels.moe import experts as kernel

        return kernel(x, gate_up, down, chosen, weights, gelu)
    return reference.experts(x, gate_up, down, chosen, weights, gelu)
