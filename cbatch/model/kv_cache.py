"""The keys and values of all running sequences, and how many of them fit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cbatch.kernels.sdpa import paged_attention, store_kv
from cbatch.model.batch import Batch

_GIB = 1024**3


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer keeps of a token."""

    num_kv_heads: int
    key_size: int
    value_size: int
    window: int  # 0: none

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.num_kv_heads * (self.key_size + self.value_size) * dtype.itemsize


class KVCache:
    """One K and one V tensor [num_blocks, block_size, H_kv, D] for each layer."""

    def __init__(
        self, layers: Sequence[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def tensor(layer: LayerShape, size: int) -> torch.Tensor:
            return torch.empty(num_blocks, block_size, layer.num_kv_heads, size, dtype=dtype, device=device)

        self.k = [tensor(layer, layer.key_size) for layer in layers]
        self.v = [tensor(layer, layer.value_size) for layer in layers]

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
        k_cache, v_cache = self.k[layer], self.v[layer]
        store_kv(key, value, k_cache, v_cache, batch.slot_mapping)
        return paged_attention(query, k_cache, v_cache, batch.block_tables, batch.spans, scale, window, softcap)


def count_blocks(
    bytes_per_block: int,
    memory_gib: float | None,
    most_useful: int,
    device: torch.device,
    gpu_memory_utilization: float,
) -> int:
    """How many blocks to allocate: as many as fit in the memory there is, and no more than can be used."""
    if memory_gib is not None:
        budget = int(memory_gib * _GIB)
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = free - int(total * (1 - gpu_memory_utilization))
    else:
        budget = available_memory() // 2
    return max(0, min(budget // bytes_per_block, most_useful))


def available_memory() -> int:
    """Bytes of memory this process may still take: what the machine has free, within the limits of its cgroups."""
    free = next(
        (int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemAvailable:")),
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2,
    )
    return min([free, *_cgroup_room()])


def _cgroup_room(root: Path = Path("/sys/fs/cgroup"), membership: str = "/proc/self/cgroup") -> list[int]:
    """Bytes left under each memory limit from this process's cgroup up to the root (v2, then v1)."""
    rooms = []
    for line in _lines(membership):
        _, controllers, path = line.rstrip("\n").split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base, limit, used = (
            (root, "memory.max", "memory.current")
            if controllers == ""
            else (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        folder = base / path.lstrip("/")
        for place in (folder, *folder.parents):
            if place == base.parent:
                break
            values = [*_lines(place / limit), *_lines(place / used)]
            if len(values) == 2 and values[0].strip() != "max":
                cached = sum(int(x.split()[1]) for x in _lines(place / "memory.stat") if x.startswith("inactive_file "))
                rooms.append(max(0, int(values[0]) - int(values[1]) + cached))
    return rooms


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:  # not on this system
        return []
