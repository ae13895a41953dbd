"""Block shapes, warps and pipeline stages of the kernels: a small table for each kind of GPU, not run-time tuning."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

_SPLITS = 16  # at most; their partial results are read again


@dataclass(frozen=True)
class AttentionShape:
    block_m: int  # query rows: tokens times the heads of a group
    tile: int  # keys
    num_warps: int
    num_stages: int
    num_splits: int


# (block_m, tile, num_warps, num_stages) of prefill and of decode, for head sizes up to 64, 128 and 256. Shared memory:
# 2 bytes * head * (block_m + 2 * tile * stages); 99 KiB on sm_86, sm_89 and sm_120, 64 KiB on gfx942.
_A100 = {  # sm_80
    64: ((64, 64, 4, 3), (16, 64, 4, 4)),
    128: ((64, 32, 4, 3), (16, 64, 4, 3)),
    256: ((64, 32, 8, 2), (16, 32, 4, 3)),
}
_LARGE = {  # sm_90, sm_100
    64: ((128, 64, 4, 3), (16, 64, 4, 4)),
    128: ((128, 64, 8, 3), (16, 64, 4, 3)),
    256: ((64, 32, 8, 2), (16, 32, 4, 3)),
}
_SMALL = {  # sm_86, sm_89, sm_120
    64: ((64, 64, 4, 2), (16, 64, 4, 3)),
    128: ((64, 32, 4, 2), (16, 32, 4, 3)),
    256: ((32, 32, 4, 1), (16, 16, 4, 2)),
}
_AMD = {  # gfx942: 64 threads a warp
    64: ((64, 64, 4, 1), (16, 64, 2, 1)),
    128: ((64, 32, 4, 1), (16, 32, 2, 1)),
    256: ((32, 32, 4, 1), (16, 16, 2, 1)),
}


def attention_shape(
    device: torch.device,
    group: int,
    head_size: int,
    num_programs: int,
    max_seqlen_q: int,
    max_seq_len: int,
    itemsize: int = 2,
) -> AttentionShape:
    """The shape for `group` query heads a key/value head and `num_programs` programs before splitting.

    Keys are split when there are too few programs to fill the GPU, as far as the longest sequence has tiles for it.
    """
    kind, num_sms = gpu_kind(device)
    table = {"a100": _A100, "large": _LARGE, "small": _SMALL, "amd": _AMD}[kind]
    block_m, tile, num_warps, num_stages = table[max(64, triton.next_power_of_2(head_size))][max_seqlen_q == 1]
    if itemsize == 4:  # exact float32 products use no matrix units, but registers and twice the shared memory
        block_m, tile, num_warps, num_stages = (16, 32, 8, 1) if kind == "large" else (16, 16, 4, 1)
    block_m = max(block_m, triton.next_power_of_2(group))
    splits = 1
    if max_seqlen_q == 1:
        wanted = min(2 * num_sms // max(1, num_programs), max_seq_len // (2 * tile), _SPLITS)
        splits = 1 << max(0, wanted.bit_length() - 1)
    return AttentionShape(block_m, tile, num_warps, num_stages, splits)


@lru_cache(maxsize=8)
def gpu_kind(device: torch.device) -> tuple[str, int]:
    """The row of the tables above for a GPU, and the number of its multiprocessors."""
    if device.type != "cuda":  # the interpreter, or compiling ahead of time
        return "small", 4
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return "amd", properties.multi_processor_count
    kinds = {(8, 0): "a100", (9, 0): "large", (10, 0): "large", (10, 3): "large"}
    return kinds.get((properties.major, properties.minor), "small"), properties.multi_processor_count
