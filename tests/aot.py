"""Compiles what the launchers launch for a GPU that is not there, and reads what the binaries need.

    python -m tests.aot sm_90        one JSON object a kernel: name, spills (bytes), shared (bytes), wgmma

Run without TRITON_INTERPRET: a process either interprets or compiles.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from cbatch.kernels.attention import AttentionSpec, HeadNorms, Rotary

# Target -> (GPUTarget, kind in kernels/gpu/shapes.py, shared memory a program may use, in bytes)
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), "a100", 166912),
    "sm_86": (GPUTarget("cuda", 86, 32), "small", 101376),
    "sm_89": (GPUTarget("cuda", 89, 32), "small", 101376),
    "sm_90": (GPUTarget("cuda", 90, 32), "large", 232448),
    "sm_100": (GPUTarget("cuda", 100, 32), "large", 232448),
    "sm_120": (GPUTarget("cuda", 120, 32), "small", 101376),
    "gfx942": (GPUTarget("hip", "gfx942", 64), "amd", 65536),
}


class NoDriver:
    """As much of a driver as compiling needs."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


@contextmanager
def compiling(name: str) -> Iterator[list[tuple[str, Any]]]:
    """Every launch inside is compiled for a target instead; the list fills with (kernel's name, compiled kernel)."""
    target, kind, _ = TARGETS[name]
    compiled: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:  # noqa: ARG001
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((self.__name__, kernel))
        return kernel

    driver.set_active(NoDriver(target))
    shapes = patch("cbatch.kernels.gpu.shapes.gpu_kind", lambda _device: (kind, 132))
    with patch.object(JITFunction, "run", compile_only), shapes:
        yield compiled


def spills(kernel: Any) -> int:
    """Bytes of registers that live in memory."""
    if kernel.metadata.target.backend == "hip":
        return int(re.findall(r"\.vgpr_spill_count:\s+(\d+)", kernel.asm["amdgcn"])[0])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        done = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    [(stack, local), *_] = re.findall(r"STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", done.stdout)
    return int(stack) + int(local)


class Longest:
    """A layout of index tensors that nobody reads."""

    def __init__(self, num_seqs: int, max_blocks: int, max_seqlen_q: int, max_seq_len: int) -> None:
        self.block_tables = torch.zeros(num_seqs, max_blocks, dtype=torch.int64)
        self.cu_seqlens_q, self.seq_lens = (torch.zeros(size, dtype=torch.int64) for size in (num_seqs + 1, num_seqs))
        self.slot_mapping = self.tasks = torch.zeros(0, dtype=torch.int64)
        self.max_seqlen_q, self.max_seq_len, self.spans = max_seqlen_q, max_seq_len, ()


def launch_all() -> None:
    """One launch of each kernel in each form that the models at hand use."""
    from cbatch.kernels.gpu import attention, gated, moe, rms_norm, sample

    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn

    def empty(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    ints = torch.zeros(65, dtype=torch.int64)
    forms = [  # heads, kv heads, head size, cache dtype, window, softcap
        (32, 8, 128, bf16, 0, 0.0),
        (9, 3, 64, bf16, 0, 0.0),
        (8, 4, 256, bf16, 4096, 50.0),
        (32, 8, 128, fp8, 0, 0.0),
        (32, 32, 80, torch.float16, 0, 0.0),
        (32, 8, 128, torch.float32, 0, 0.0),
        (8, 4, 256, torch.float32, 0, 0.0),
        (4, 2, 16, torch.float32, 24, 0.0),
    ]
    for heads, kv_heads, size, cache, window, softcap in forms:
        if cache == fp8 and driver.active.target.arch in (80, 86):
            continue  # no fp8 in hardware
        dtype = bf16 if cache == fp8 else cache
        blocks = empty(64, 32, kv_heads, size, dtype=cache)
        spec = AttentionSpec(kv_heads, size, size, 0.1, window, softcap)
        for tokens, seqs, longest in ((64, 64, 1), (1, 1, 1), (1024, 64, 256)):
            query = empty(tokens, heads, size, dtype=dtype)
            attention.paged_attention(query, blocks, blocks, Longest(seqs, 8, longest, 8192), spec)
        key = empty(64, kv_heads, size, dtype=dtype)
        query, table = empty(64, heads, size, dtype=dtype), empty(64, size, dtype=dtype)
        stored, half = (query, key, key, blocks, blocks, ints[:64]), table[:, : size // 2]
        attention.store_kv(*stored[1:])
        attention.rope_store_kv(*stored, Rotary(table, table), HeadNorms(table[0], table[0], 1e-6))
        attention.rope_store_kv(*stored, Rotary(half, half))
    for width in (576, 4096, 8192):
        rms_norm.rms_norm(empty(64, width), empty(width), 1e-6, empty(64, width))
        rms_norm.rms_norm(empty(64, width), empty(width), 1e-6, weight_offset=1.0)
    gated.silu_mul(empty(64, 28672))
    gated.gelu_mul(empty(64, 28672))
    offsets = torch.full((8,), 64, dtype=torch.int32)
    for rows in (64, 4096):
        moe.grouped_matmul(empty(rows, 2048), empty(8, 1536, 2048), offsets, torch.zeros(rows, dtype=torch.int64))
        moe.grouped_matmul(empty(rows, 768), empty(8, 2048, 768), offsets, None)
    floats = torch.zeros(64)
    for dtype in (torch.float32, bf16):
        logits = empty(64, 128256, dtype=dtype)
        sample.sample(logits, floats, ints[:64].int(), floats, floats, ints[:64], ints[:64].int())


def sweep() -> None:
    """The same model at many sizes of a step."""
    from cbatch.kernels.gpu import attention, gated, rms_norm, sample

    cache, dtype = torch.empty(64, 32, 8, 128, dtype=torch.bfloat16), torch.bfloat16
    for tokens, seqs, longest in [
        (1, 1, 40),
        (3, 3, 500),
        (16, 16, 2000),
        (17, 17, 9000),
        (300, 9, 300),
        (512, 64, 8191),
    ]:
        ints = torch.zeros(max(tokens, seqs) + 1, dtype=torch.int64)
        query, key = torch.empty(tokens, 32, 128, dtype=dtype), torch.empty(tokens, 8, 128, dtype=dtype)
        table, layout = (
            torch.empty(tokens, 128, dtype=dtype),
            Longest(seqs, -(-longest // 32), 1 if tokens == seqs else tokens, longest),
        )
        attention.rope_store_kv(query, key, key, cache, cache, ints[:tokens], Rotary(table, table))
        attention.paged_attention(query, cache, cache, layout, AttentionSpec(8, 128, 128, 0.1))
        rms_norm.rms_norm(torch.empty(tokens, 4096, dtype=dtype), torch.empty(4096, dtype=dtype), 1e-6)
        gated.silu_mul(torch.empty(tokens, 28672, dtype=dtype))
        floats = torch.zeros(seqs)
        logits = torch.empty(seqs, 128256, dtype=dtype)
        sample.sample(logits, floats, ints[:seqs].int(), floats, floats, ints[:seqs], ints[:seqs].int())


def main(name: str, *options: str) -> None:
    with compiling(name) as compiled:
        sweep() if "--sweep" in options else launch_all()
    seen = set()
    for kernel_name, kernel in compiled:
        if id(kernel) not in seen:
            seen.add(id(kernel))
            uses_wgmma = "wgmma" in kernel.asm.get("ptx", "")
            row = {"name": kernel_name, "spills": spills(kernel), "shared": kernel.metadata.shared, "wgmma": uses_wgmma}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
