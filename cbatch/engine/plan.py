"""How the engines of a run work: every setting resolved for this machine and this model, before any weight is read.

`cbatch run`, `check` and `bench` and the manifest of a job all read the same plan, so each question has one answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cbatch.config import EngineConfig
from cbatch.engine.places import Place
from cbatch.errors import UsageError
from cbatch.machine import available_memory, cpu_has_bfloat16, gpu_memory

if TYPE_CHECKING:
    from cbatch.model.loader import ModelFiles

_GIB = 1024**3
# Defaults by type of device. Blocks are longer on a CPU: there a block is read by one core, one after another.
_BLOCK_SIZE = {"cpu": 128, "cuda": 32}
_MAX_NUM_SEQS = {"cpu": 128, "cuda": 256}
_MAX_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}


@dataclass(frozen=True)
class EnginePlan:
    """Plain values, without torch, so that a plan can go to other processes. Dtypes have torch's names: bfloat16."""

    places: tuple[Place, ...]  # one for each replica
    dtype: str  # of weights and activations
    kv_dtype: str  # of the KV cache: --kv-cache-dtype, as torch names it
    quantization: str | None
    load_format: str
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    scheduling: str
    order: str
    enable_prefix_caching: bool
    cuda_graphs: bool
    kv_cache_memory: int | None  # bytes; None: what is free
    gpu_memory_utilization: float

    def num_blocks_in_memory(self, bytes_per_token: int, free: Callable[[], int]) -> int:
        """How many blocks fit in the KV cache of a replica. `free`: bytes for it, asked only if none are set."""
        memory = free() if self.kv_cache_memory is None else self.kv_cache_memory
        return max(0, memory // (bytes_per_token * self.block_size))

    def num_blocks(self, bytes_per_token: int, free: Callable[[], int]) -> int:
        """How many blocks a replica allocates: as many as fit, but no more than it could ever fill."""
        most_useful = self.max_num_seqs * -(-self.max_model_len // self.block_size)
        return min(self.num_blocks_in_memory(bytes_per_token, free), most_useful)

    def free_memory(self, device: str, weights: int = 0, step: int = 0) -> int:
        """Bytes for the KV cache of a replica on this device.

        On a CPU half of what is free, for all replicas together. On a GPU, which each replica has for itself, what
        `step`, the bytes of the largest step's work space, leaves within --gpu-memory-utilization. `weights`: bytes of
        the weights of a replica if they are not loaded yet.
        """
        if not device.startswith("cuda"):
            num_replicas = len(self.places)
            return (available_memory() - num_replicas * weights) // 2 // num_replicas
        free, total = gpu_memory(device)
        return int(free - total * (1 - self.gpu_memory_utilization) - step - weights)


def resolve(
    config: EngineConfig, places: Sequence[Place], files: ModelFiles, max_model_len: int | None = None
) -> EnginePlan:
    """The plan of engines at these places. UsageError if the machine or the model can't do what is asked for."""
    import torch

    from cbatch.model.kv_cache import cache_dtype

    device = torch.device(places[0].device)
    dtype = resolve_dtype(config.dtype, device.type, files.config)
    block_size = config.block_size or _BLOCK_SIZE[device.type]
    _check_quantization(config, device)
    memory = config.kv_cache_memory
    return EnginePlan(
        places=tuple(places),
        dtype=_name(dtype),
        kv_dtype=_name(cache_dtype(config.kv_cache_dtype, device, dtype, block_size)),
        quantization=config.quantization,
        load_format=config.load_format,
        block_size=block_size,
        max_num_seqs=config.max_num_seqs or _MAX_NUM_SEQS[device.type],
        max_num_batched_tokens=config.max_num_batched_tokens or _MAX_NUM_BATCHED_TOKENS[device.type],
        max_model_len=_resolve_max_model_len(max_model_len, files.context),
        scheduling=config.scheduling,
        order=config.order,
        enable_prefix_caching=config.enable_prefix_caching,
        cuda_graphs=config.cuda_graphs == "on",
        kv_cache_memory=None if memory is None else int(memory * _GIB),
        gpu_memory_utilization=config.gpu_memory_utilization,
    )


def resolve_dtype(dtype: str, device_type: str, config: Any) -> Any:
    """auto -> the checkpoint's, where the device computes it fast; a CPU without bfloat16 gets float32."""
    import torch

    if dtype != "auto":
        return getattr(torch, dtype)
    stored = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None) or torch.float32
    if device_type != "cpu" or stored == torch.float32:
        return stored
    return torch.bfloat16 if cpu_has_bfloat16() else torch.float32


def _check_quantization(config: EngineConfig, device: Any) -> None:
    """UsageError if weights can't be quantized on this device."""
    from cbatch.model import ops

    if config.quantization and not (device.type == "cpu" and ops.choose(device).has_kernels):
        missing = ops.choose(device).missing if device.type == "cpu" else "runs on a CPU only"
        raise UsageError(f"--quantization {config.quantization}: {missing}")


def _resolve_max_model_len(asked: int | None, context: int) -> int:
    if asked is not None and asked > context:
        raise UsageError(f"--max-model-len {asked}: the model's context is {context} tokens")
    return asked or context


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
