"""A plan and model files -> a running engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from cbatch.engine.block_pool import BlockPool
from cbatch.engine.engine import Engine
from cbatch.engine.estimate import expert_share
from cbatch.engine.places import Place
from cbatch.engine.plan import EnginePlan
from cbatch.engine.scheduler import make_scheduler
from cbatch.errors import UsageError
from cbatch.kernels.attention import AttentionSpec
from cbatch.model import ops
from cbatch.model.attention import Probe, attention_specs
from cbatch.model.fused import Linear, is_quantized
from cbatch.model.kv_cache import KVCache, check_heads
from cbatch.model.ops import Backend
from cbatch.model.runner import Runner
from cbatch.model.substitute import substitute
from cbatch.model.verify import PROVEN, verify
from cbatch.watch.stats import EngineStats, ModelCost

if TYPE_CHECKING:
    from cbatch.model.loader import ModelFiles

Specs = Mapping[int, AttentionSpec]


def start_engine(plan: EnginePlan, place: Place, files: ModelFiles, stats: EngineStats) -> Engine:
    """Load the model at this place of the plan, allocate the KV cache and put the engine together."""
    torch.set_num_threads(place.num_threads)
    model, specs = _load_model(plan, place, files)
    backend = ops.choose(model.device)
    kv_dtype: torch.dtype = getattr(torch, plan.kv_dtype)
    bytes_per_token = sum(spec.bytes_per_token(kv_dtype) for spec in specs.values())
    stats.cost = model_cost(model, bytes_per_token)
    _substitute(plan, model, specs, backend)
    stats.cost = replace(stats.cost, weight_bytes=weight_bytes(model))
    num_blocks = _count_blocks(plan, place, model, bytes_per_token)
    pool = BlockPool(num_blocks, plan.block_size, plan.enable_prefix_caching)
    scheduler = make_scheduler(plan.scheduling, pool, plan.max_num_batched_tokens, plan.max_num_seqs)
    runner = Runner(model, KVCache(specs, num_blocks, plan.block_size, kv_dtype, model.device, backend=backend))
    _record_graphs(plan, runner, specs, num_blocks)
    if backend.missing:
        runner.notes.append(f"without C kernels, which makes it slower: {backend.missing}")
    depth = 1 if model.device.type == "cuda" else 0
    eos, decode = files.eos_token_ids, _decoder(files.tokenizer)
    return Engine(runner, scheduler, decode, eos, plan.max_model_len, stats, depth, plan.order)


def _load_model(plan: EnginePlan, place: Place, files: ModelFiles) -> tuple[Any, Specs]:
    """The model on its device, and how its layers attend; UsageError if cbatch can't run it."""
    model = files.load(plan.dtype, place.device, dummy=plan.load_format == "dummy")
    specs = attention_specs(model)
    if model.config.model_type not in PROVEN:
        verify(model, specs)
    check_heads(getattr(torch, plan.kv_dtype), specs.values(), ops.choose(model.device))
    return model, specs


def _substitute(plan: EnginePlan, model: Any, specs: Specs, backend: Backend) -> None:
    """Replace slow modules by fused ones, and weights by 8-bit integers if that is asked for."""
    if backend.has_kernels:
        substitute(model, specs, plan.block_size, plan.quantization == "int8", backend)
    if plan.quantization == "int8" and not is_quantized(model):
        raise UsageError(f"--quantization int8: no layer of this model can be quantized in {model.dtype}")


def _count_blocks(plan: EnginePlan, place: Place, model: Any, bytes_per_token: int) -> int:
    """How many blocks to allocate: as many as fit, and no more than can be used; UsageError if not even one fits."""

    def free() -> int:
        step = largest_step(model, plan) if model.device.type == "cuda" else 0
        return plan.free_memory(place.device, step=step)

    num_blocks = plan.num_blocks(bytes_per_token, free)
    if num_blocks == 0:
        raise UsageError(
            f"no memory for the KV cache: a block of {plan.block_size} tokens takes "
            f"{bytes_per_token * plan.block_size / 1024**2:.1f} MiB; see --kv-cache-memory and --block-size"
        )
    return num_blocks


def _record_graphs(plan: EnginePlan, runner: Runner, specs: Specs, num_blocks: int) -> None:
    """Let the runner record its steps as CUDA graphs, on a GPU whose kernels take this model's heads."""
    takes_heads = all(runner.kv_cache.backend.takes_heads(spec.key_size, spec.value_size) for spec in specs.values())
    if runner.device.type == "cuda" and plan.cuda_graphs and takes_heads:
        longest = min(plan.max_model_len, num_blocks * plan.block_size)
        max_blocks = -(-longest // plan.block_size)
        runner.record(plan.max_num_batched_tokens, plan.max_num_seqs, max_blocks, longest)


def _decoder(tokenizer: Any) -> Callable[[Any], str]:
    """Token ids -> text, with a tokenizer of its own: the reader's thread uses the other one."""
    tokenizer = copy.deepcopy(tokenizer)

    def decode(token_ids: Any) -> str:
        text: str = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    return decode


@torch.inference_mode()
def largest_step(model: Any, plan: EnginePlan) -> int:
    """Bytes of GPU memory that the largest step of the plan takes beside weights and KV cache: found by trying it."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    positions = torch.arange(plan.max_num_batched_tokens, device=model.device)[None]
    sampled = torch.arange(min(plan.max_num_seqs, plan.max_num_batched_tokens), device=model.device)
    logits = model(
        input_ids=torch.zeros_like(positions),
        position_ids=positions,
        use_cache=False,
        logits_to_keep=sampled,
        batch=None,
        kv_cache=Probe(),
    ).logits
    logits.float()
    peak = torch.cuda.max_memory_allocated(model.device) - before
    del logits
    torch.cuda.empty_cache()
    return peak


def weight_bytes(model: Any) -> int:
    """Bytes of all matrices that a step reads, as they lie in memory: packed or not, in 8 bits or not."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings().weight
    packed: int = sum(module.packed_bytes for module in model.modules() if isinstance(module, Linear))
    plain: dict[int, int] = {id(w): w.nbytes for w in model.parameters() if w.dim() > 1 and w is not embedding}
    if isinstance(head.weight, torch.Tensor):  # it may be the embedding, too
        plain[id(head.weight)] = head.weight.nbytes
    return packed + sum(plain.values())


def model_cost(model: Any, kv_bytes_per_token: int) -> ModelCost:
    """What a forward pass costs, counted from the weights. Of the experts of a layer only those a token uses count."""
    text = model.config.get_text_config()
    head = model.get_output_embeddings().weight
    share = expert_share(text)
    embedding = {id(head), id(model.get_input_embeddings().weight)}
    weights = [(name, w) for name, w in model.named_parameters() if w.dim() > 1 and id(w) not in embedding]
    active = sum(w.numel() * (share if ".experts." in name else 1) for name, w in weights)
    width = text.num_attention_heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    return ModelCost(
        weight_bytes=weight_bytes(model),
        flops_per_token=int(2 * active),
        flops_per_sampled=2 * head.numel(),
        flops_per_attended=4 * width * text.num_hidden_layers,
        kv_bytes_per_token=kv_bytes_per_token,
    )
