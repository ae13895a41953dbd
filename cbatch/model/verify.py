"""Compares paged attention with a model's own attention, at load, for architectures that are not known to work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cbatch.errors import Fatal
from cbatch.kernels.attention import AttentionSpec
from cbatch.model.attention import NAME
from cbatch.model.batch import single
from cbatch.model.kv_cache import KVCache

PROVEN = frozenset(
    [
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_neox",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "olmoe",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
    ]
)  # tests/test_families.py compares these with transformers token by token

_BLOCK_SIZE, _LAST = 8, 8  # tokens in a block; tokens in the second of the two chunks
_LONGEST_WINDOW = 64 - _LAST  # a longer sliding window is not reached: the prompt would get expensive
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.06, torch.bfloat16: 0.3}  # of the spread of a token's
# logits; SmolLM2 at bfloat16 is off by 0.07, a wrong scale or window by 0.5 and more


@torch.inference_mode()
def verify(model: Any, specs: Mapping[int, AttentionSpec]) -> None:
    """Fatal if, on a short random prompt in two chunks, the logits differ from those of the model's eager attention."""
    name, text = type(model).__name__, model.config.get_text_config()
    windows = [spec.window for spec in specs.values() if spec.window]
    slides = "sliding_attention" in (getattr(text, "layer_types", None) or ["sliding_attention"])
    if getattr(text, "sliding_window", None) and slides and not windows:
        raise Fatal(f"{name}: its sliding window does not reach cbatch's attention; this model is not supported")
    num_tokens = max([_LAST, *(window for window in windows if window <= _LONGEST_WINDOW)]) + _LAST
    ids = torch.randint(text.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(0)).to(model.device)
    paged = _paged_logits(model, specs, ids)
    model.set_attn_implementation("eager")
    try:
        positions = torch.arange(num_tokens, device=model.device)
        own = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(NAME)
    errors = (paged - own).norm(dim=-1) / (own - own.mean(-1, keepdim=True)).norm(dim=-1).clamp(min=1e-6)
    error = max(
        part.median().item() for part in (errors[:-_LAST], errors[-_LAST:])
    )  # one MoE token may flip its expert
    if error > _TOLERANCE[model.dtype]:
        raise Fatal(
            f"{name}: with paged attention its logits are off by {error:.0%}; models of type "
            f"{model.config.model_type} are not supported"
        )


def _paged_logits(model: Any, specs: Mapping[int, AttentionSpec], ids: torch.Tensor) -> torch.Tensor:
    num_blocks = -(-len(ids) // _BLOCK_SIZE)
    cache = KVCache(specs, num_blocks, _BLOCK_SIZE, model.dtype, model.device)
    logits = []
    for first, stop in ((0, len(ids) - _LAST), (len(ids) - _LAST, len(ids))):
        batch = single(first, stop, num_blocks, _BLOCK_SIZE, ids.device)
        out = model(
            input_ids=ids[None, first:stop],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.logits_indices,
            batch=batch,
            kv_cache=cache,
        )
        logits.append(out.logits[0].float())
    return torch.cat(logits)
