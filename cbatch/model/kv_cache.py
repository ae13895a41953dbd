"""The keys and values of all running sequences, and how many of them fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from cbatch.errors import UsageError
from cbatch.kernels.cpu.native import HugePages, Layer, row_size
from cbatch.model import ops
from cbatch.model.batch import Batch

_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer keeps of a token."""

    num_kv_heads: int
    key_size: int
    value_size: int
    window: int  # 0: none

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """In a cache of this dtype."""
        values = row_size(self.key_size, dtype) + row_size(self.value_size, dtype)
        return self.num_kv_heads * values * dtype.itemsize


class KVCache:
    """One K and one V tensor [num_blocks, block_size, H_kv, D] for each layer.

    The C kernels keep a block in a layout of their own, see `kernels/cpu/attention.c`; in int8 it has room for scales.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        pages: HugePages | None = None,
    ) -> None:
        """`pages`: where to take memory from on a CPU; by default from pages of its own."""

        def tensor(layer: LayerShape, size: int) -> torch.Tensor:
            shape = num_blocks, block_size, layer.num_kv_heads, row_size(size, dtype)
            return source.take(shape, dtype) if device.type == "cpu" else torch.empty(shape, dtype=dtype, device=device)

        source = pages or HugePages()

        self.k = {index: tensor(layer, layer.key_size) for index, layer in layers.items()}
        self.v = {index: tensor(layer, layer.value_size) for index, layer in layers.items()}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: Batch,
        scale: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        """Store this step's keys and values [T, H_kv, D], then attend with `query` [T, H, D] to all there is."""
        ops.store_kv(key, value, self.k[layer], self.v[layer], batch.slot_mapping)
        return ops.paged_attention(query, self.k[layer], self.v[layer], batch, scale, window, softcap)

    def rope_attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: Batch,
        angles: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor | None, torch.Tensor | None, float, float],
        settings: tuple[float, int, float],
    ) -> torch.Tensor:
        """`attend` for a query and a key that are not yet rotated by `angles` (cos and sin), nor normed.

        `norms`: weights of q and k or None, epsilon, and what is added to the weights. `settings`: scale, window,
        softcap. `query` is changed.
        """
        k_cache, v_cache = self.k[layer], self.v[layer]
        (cos, sin), (q_weight, k_weight, eps, weight_offset) = angles, norms
        ops.rope_store_kv(
            query, key, value, k_cache, v_cache, batch.slot_mapping, cos, sin, q_weight, k_weight, eps, weight_offset
        )
        return ops.paged_attention(query, k_cache, v_cache, batch, *settings)

    def run_layer(
        self, layer: int, compiled: Layer, x: torch.Tensor, batch: Batch, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """x [1, T, width] through a whole decoder layer in one call."""
        return ops.decoder_layer(compiled, x, self.k[layer], self.v[layer], batch, angles)


def cache_dtype(name: str, device: torch.device, dtype: torch.dtype, block_size: int) -> torch.dtype:
    """What `--kv-cache-dtype` means for a model in `dtype`; UsageError if there can be no such cache on this device."""
    if name == "auto":
        return dtype
    if (name == "int8") != (device.type == "cpu"):
        other = "on a CPU there is int8" if device.type == "cpu" else "on a GPU there is fp8"
        raise UsageError(f"--kv-cache-dtype {name} is not for this device ({device}); {other}")
    problem = ops.why_not_int8(dtype, block_size) if name == "int8" else ops.why_not_fp8(device)
    if problem:
        raise UsageError(f"--kv-cache-dtype {name}: {problem}")
    return _DTYPES[name]


def check_heads(dtype: torch.dtype, layers: Iterable[LayerShape]) -> None:
    """UsageError if a cache of this dtype can't hold the heads of these layers."""
    for name in (name for name, reduced in _DTYPES.items() if reduced == dtype):
        for layer in layers:
            if not ops.fits_cache(dtype, layer.key_size, layer.value_size):
                heads = f"heads of {layer.key_size} and {layer.value_size} values"
                raise UsageError(f"--kv-cache-dtype {name}: it does not take this model's {heads}")
