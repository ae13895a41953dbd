"""Settings and model files -> a running engine."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from cbatch.config import EngineConfig
from cbatch.engine.block_pool import BlockPool
from cbatch.engine.engine import Engine
from cbatch.engine.scheduler import make_scheduler
from cbatch.errors import UsageError
from cbatch.machine import available_memory, gpu_memory, num_cpus, resolve_device
from cbatch.model import ops
from cbatch.model.attention import layer_shapes
from cbatch.model.fused import is_quantized, substitute
from cbatch.model.kv_cache import KVCache, cache_dtype, count_blocks
from cbatch.model.loader import resolve_block_size, resolve_dtype
from cbatch.model.runner import Runner
from cbatch.model.verify import PROVEN, verify
from cbatch.watch.stats import EngineStats, ModelCost

if TYPE_CHECKING:
    from cbatch.model.loader import ModelFiles

_MAX_NUM_SEQS = {"cpu": 128, "cuda": 256}
_MAX_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}


def start_engine(
    config: EngineConfig, files: ModelFiles, max_model_len: int, stats: EngineStats, engines: int = 1
) -> Engine:
    """Load the model, allocate the KV cache and put the engine together.

    `engines`: how many start at once and share the memory of a CPU.
    """
    torch.set_num_threads(config.threads or num_cpus())
    device = resolve_device(config.device)
    if config.quantization and (device != "cpu" or not ops.has_kernels(torch.device(device))):
        raise UsageError(f"--quantization {config.quantization}: {ops.without_native or 'runs on a CPU only'}")
    block_size = resolve_block_size(config.block_size, device.split(":")[0])
    dtype = resolve_dtype(config.dtype, device, files.config)
    cache_dtype(config, torch.device(device), dtype, block_size, [])  # is refused before the weights are read
    model = files.load(config.dtype, device, dummy=config.load_format == "dummy")
    max_num_seqs = config.max_num_seqs or _MAX_NUM_SEQS[model.device.type]
    budget = config.max_num_batched_tokens or _MAX_NUM_BATCHED_TOKENS[model.device.type]
    layers = layer_shapes(model)
    if model.config.model_type not in PROVEN:
        verify(model, layers)
    kv_dtype = cache_dtype(config, model.device, model.dtype, block_size, layers.values())
    bytes_per_token = sum(layer.bytes_per_token(kv_dtype) for layer in layers.values())
    stats.cost = model_cost(model, bytes_per_token)
    if ops.has_kernels(model.device):
        substitute(model, layers, block_size, int8=config.quantization == "int8")
    if config.quantization == "int8" and not is_quantized(model):
        raise UsageError(f"--quantization int8: no layer of this model can be quantized in {model.dtype}")
    num_blocks = count_blocks(
        bytes_per_token * block_size,
        config.kv_cache_memory,
        most_useful=max_num_seqs * -(-max_model_len // block_size),
        budget=lambda: spare_memory(model, budget, max_num_seqs, config.gpu_memory_utilization, engines),
    )
    if num_blocks == 0:
        raise UsageError(
            f"no memory for the KV cache: a block of {block_size} tokens takes "
            f"{bytes_per_token * block_size / 1024**2:.1f} MiB; see --kv-cache-memory and --block-size"
        )
    pool = BlockPool(num_blocks, block_size, config.enable_prefix_caching)
    scheduler = make_scheduler(config.scheduling, pool, budget, max_num_seqs)
    cache = KVCache(layers, num_blocks, block_size, kv_dtype, model.device)
    tokenizer = copy.deepcopy(files.tokenizer)  # the reader's thread uses the other

    def decode(token_ids: Any) -> str:
        text: str = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    eos, runner, depth = files.eos_token_ids, Runner(model, cache), 0
    if model.device.type == "cpu" and ops.without_native:
        runner.notes.append(f"without C kernels, which makes it slower: {ops.without_native}")
    if model.device.type == "cuda":
        depth = 1
        if config.cuda_graphs == "on" and all(
            ops.fits_triton(layer.key_size, layer.value_size) for layer in layers.values()
        ):
            longest = min(max_model_len, num_blocks * block_size)
            runner.record(budget, max_num_seqs, -(-longest // block_size), longest)
    return Engine(runner, scheduler, decode, eos, max_model_len, stats, depth, config.order)


class _NoCache:
    """Stands in for the KV cache where only the memory of everything else matters."""

    def attend(self, _layer: int, query: torch.Tensor, _key: Any, value: torch.Tensor, *_: Any) -> torch.Tensor:
        return query.new_zeros(*query.shape[:2], value.shape[2])

    rope_attend = attend


@torch.inference_mode()
def spare_memory(
    model: Any, max_num_tokens: int, max_num_seqs: int, gpu_memory_utilization: float, engines: int = 1
) -> int:
    """Bytes for the KV cache: half of what is free on a CPU, for all engines together; on a GPU, which each has for
    itself, what the largest step leaves, which is tried."""
    if model.device.type != "cuda":
        return available_memory() // 2 // engines
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    positions = torch.arange(max_num_tokens, device=model.device)[None]
    sampled = torch.arange(min(max_num_seqs, max_num_tokens), device=model.device)
    logits = model(
        input_ids=torch.zeros_like(positions),
        position_ids=positions,
        use_cache=False,
        logits_to_keep=sampled,
        batch=None,
        kv_cache=_NoCache(),
    ).logits
    logits.float()
    peak = torch.cuda.max_memory_allocated(model.device) - before
    del logits
    torch.cuda.empty_cache()
    free, total = gpu_memory(str(model.device))
    return int(free - total * (1 - gpu_memory_utilization) - peak)


def model_cost(model: Any, kv_bytes_per_token: int) -> ModelCost:
    """What a forward pass costs, counted from the weights. Of the experts of a layer only those a token uses count."""
    text = model.config.get_text_config()
    head = model.get_output_embeddings().weight
    share = (getattr(text, "num_experts_per_tok", None) or 1) / (
        getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
    )
    embedding = {id(head), id(model.get_input_embeddings().weight)}
    weights = [(name, w) for name, w in model.named_parameters() if w.dim() > 1 and id(w) not in embedding]
    active = sum(w.numel() * (share if ".experts." in name else 1) for name, w in weights)
    width = text.num_attention_heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    return ModelCost(
        weight_bytes=sum(w.nbytes for _, w in weights) + head.nbytes,
        flops_per_token=int(2 * active),
        flops_per_sampled=2 * head.numel(),
        flops_per_attended=4 * width * text.num_hidden_layers,
        kv_bytes_per_token=kv_bytes_per_token,
    )
