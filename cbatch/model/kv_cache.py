"""The keys and values of all running sequences, and how many of them fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from cbatch.errors import UsageError
from cbatch.kernels.attention import AttentionSpec, HeadNorms, Rotary, row_size
from cbatch.kernels.cpu.huge_pages import HugePages
from cbatch.kernels.cpu.native import Layer
from cbatch.model import ops
from cbatch.model.batch import Batch

_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


class KVCache:
    """One K and one V tensor [num_blocks, block_size, H_kv, D] for each layer; an `AttentionCache`.

    The C kernels keep a block in a layout of their own, see `kernels/cpu/attention.c`; in int8 it has room for scales.
    """

    def __init__(
        self,
        specs: Mapping[int, AttentionSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        huge_pages: HugePages | None = None,
        backend: ops.Backend | None = None,
    ) -> None:
        """`huge_pages`: where to take memory from on a CPU. `backend`: by default the one that the device has."""
        source = huge_pages or HugePages()

        def tensor(spec: AttentionSpec, size: int) -> Tensor:
            shape = num_blocks, block_size, spec.num_kv_heads, row_size(size, dtype)
            return source.take(shape, dtype) if device.type == "cpu" else torch.empty(shape, dtype=dtype, device=device)

        self.backend = backend or ops.choose(device)
        self.k = {layer: tensor(spec, spec.key_size) for layer, spec in specs.items()}
        self.v = {layer: tensor(spec, spec.value_size) for layer, spec in specs.items()}
        self._ops = {layer: self.backend.attention(spec, dtype, block_size) for layer, spec in specs.items()}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: Batch, spec: AttentionSpec
    ) -> Tensor:
        """Store this step's keys and values [T, H_kv, D], then attend with `query` [T, H, D] to all there are."""
        attention, k_cache, v_cache = self._ops[layer], self.k[layer], self.v[layer]
        attention.store_kv(key, value, k_cache, v_cache, batch.slot_mapping)
        return attention.paged_attention(query, k_cache, v_cache, batch, spec)

    def rope_attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: Batch,
        rotary: Rotary,
        norms: HeadNorms,
        spec: AttentionSpec,
    ) -> Tensor:
        """`attend`, with a query and keys that are to be normalised and rotated first; `query` is changed."""
        attention, k_cache, v_cache = self._ops[layer], self.k[layer], self.v[layer]
        attention.rope_store_kv(query, key, value, k_cache, v_cache, batch.slot_mapping, rotary, norms)
        return attention.paged_attention(query, k_cache, v_cache, batch, spec)

    def run_layer(self, layer: int, compiled: Layer, x: Tensor, batch: Batch, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """x [1, T, width] through a whole decoder layer in one call; cos and sin [1, T, ROT]."""
        return self.backend.decoder_layer(compiled, x, self.k[layer], self.v[layer], batch, rotary)


def cache_dtype(name: str, device: torch.device, dtype: torch.dtype, block_size: int) -> torch.dtype:
    """What `--kv-cache-dtype` means for a model in `dtype`; UsageError if there can be no such cache on this device."""
    if name == "auto":
        return dtype
    if (name == "int8") != (device.type == "cpu"):
        other = "on a CPU there is int8" if device.type == "cpu" else "on a GPU there is fp8"
        raise UsageError(f"--kv-cache-dtype {name} is not for this device ({device}); {other}")
    problem = ops.choose(device).why_not_quantized(dtype, block_size)
    if problem:
        raise UsageError(f"--kv-cache-dtype {name}: {problem}")
    return _DTYPES[name]


def check_heads(dtype: torch.dtype, specs: Iterable[AttentionSpec], backend: ops.Backend) -> None:
    """UsageError if a cache of 8 bits is asked for that can't hold the heads of these layers."""
    for name in (name for name, reduced in _DTYPES.items() if reduced == dtype):
        for spec in specs:
            if not backend.takes_heads(spec.key_size, spec.value_size):
                heads = f"heads of {spec.key_size} and {spec.value_size} values"
                raise UsageError(f"--kv-cache-dtype {name}: it does not take this model's {heads}")
