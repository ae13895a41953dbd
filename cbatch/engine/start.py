"""Settings and model files -> a running engine."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from cbatch.config import EngineConfig
from cbatch.engine.block_pool import BlockPool
from cbatch.engine.engine import Engine, make_scheduler
from cbatch.errors import UsageError
from cbatch.model.attention import layer_shapes
from cbatch.model.kv_cache import KVCache, count_blocks
from cbatch.model.loader import parallelism, resolve_device
from cbatch.model.runner import Runner
from cbatch.model.verify import PROVEN, verify
from cbatch.watch.stats import ModelCost, RunStats

if TYPE_CHECKING:
    from cbatch.model.loader import ModelFiles

_MAX_NUM_SEQS = {"cpu": 128, "cuda": 256}
_MAX_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}


def start_engine(config: EngineConfig, files: ModelFiles, max_model_len: int, stats: RunStats) -> Engine:
    """Load the model, allocate the KV cache and put the engine together."""
    torch.set_num_threads(parallelism(config.threads))
    device = resolve_device(config.device)
    model = files.load(config.dtype, device, dummy=config.load_format == "dummy")
    max_num_seqs = config.max_num_seqs or _MAX_NUM_SEQS[model.device.type]
    budget = config.max_num_batched_tokens or _MAX_NUM_BATCHED_TOKENS[model.device.type]
    layers = layer_shapes(model)
    if model.config.model_type not in PROVEN:
        verify(model, layers)
    bytes_per_token = sum(layer.bytes_per_token(model.dtype) for layer in layers)
    num_blocks = count_blocks(
        bytes_per_token * config.block_size,
        config.kv_cache_memory,
        most_useful=max_num_seqs * -(-max_model_len // config.block_size),
        device=model.device,
        gpu_memory_utilization=config.gpu_memory_utilization,
    )
    if num_blocks == 0:
        raise UsageError(
            f"no memory for the KV cache: a block of {config.block_size} tokens takes "
            f"{bytes_per_token * config.block_size / 1024**2:.1f} MiB; see --kv-cache-memory and --block-size"
        )
    pool = BlockPool(num_blocks, config.block_size, config.enable_prefix_caching)
    scheduler = make_scheduler(config.scheduling, pool, budget, max_num_seqs)
    cache = KVCache(layers, num_blocks, config.block_size, model.dtype, model.device)
    stats.cost = model_cost(model, bytes_per_token)
    tokenizer = copy.deepcopy(files.tokenizer)  # the reader's thread uses the other

    def decode(token_ids: Any) -> str:
        text: str = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    eos = files.eos_token_ids
    return Engine(Runner(model, cache, sorted(eos)), scheduler, decode, eos, max_model_len, stats)


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
