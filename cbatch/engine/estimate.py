"""The memory and the time that an engine will take, estimated from a model's files without loading a weight."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from cbatch.engine.places import Place
from cbatch.engine.plan import EnginePlan
from cbatch.kernels.attention import AttentionSpec
from cbatch.model.ceilings import ceilings
from cbatch.model.weights import num_weights

if TYPE_CHECKING:
    from cbatch.model.loader import ModelFiles


class Estimate:
    """Sizes in bytes for one replica of a plan. `num_blocks` is for all of its replicas together."""

    def __init__(self, files: ModelFiles, plan: EnginePlan) -> None:
        self._text, self._plan = files.config.get_text_config(), plan
        self._itemsize: int = getattr(torch, plan.dtype).itemsize
        num, bytes_in_layers = num_weights(files.path), 1 if plan.quantization == "int8" else self._itemsize
        self._head = min(num, self._text.vocab_size * self._text.hidden_size)
        outside = self._head if self._is_tied else min(num, 2 * self._head)
        self._in_layers = num - outside
        self._read = self._head * self._itemsize + self._in_layers * bytes_in_layers  # in a step, the head included
        self.weights = (
            outside * self._itemsize + self._in_layers * bytes_in_layers
        )  # only those of layers are quantized

    @property
    def _is_tied(self) -> bool:
        """Whether the LM head is the embedding."""
        return bool(getattr(self._text, "tie_word_embeddings", False))

    @property
    def bytes_per_token(self) -> int:
        """What the KV cache keeps of a token, if all layers are alike."""
        text = self._text
        num_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        layer = AttentionSpec(num_heads, size, size, size**-0.5)
        return int(text.num_hidden_layers * layer.bytes_per_token(getattr(torch, self._plan.kv_dtype)))

    @property
    def largest_step(self) -> int:
        """Work space of a step: logits, also as float32, and the widest activations of a layer."""
        text, plan = self._text, self._plan
        logits = plan.max_num_seqs * text.vocab_size * (self._itemsize + 4)
        inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        width = 2 * text.hidden_size + 3 * (max(inner) if isinstance(inner, list) else inner)  # a list has one a layer
        return int(logits + plan.max_num_batched_tokens * width * self._itemsize)

    @property
    def num_blocks(self) -> int:
        """Blocks that fit, by the rule of a run."""
        return sum(map(self._num_blocks_at, self._plan.places))

    def _num_blocks_at(self, place: Place) -> int:
        free = partial(self._plan.free_memory, place.device, self.weights, self.largest_step)
        return self._plan.num_blocks_in_memory(self.bytes_per_token, free)

    def seconds(self, num_rows: int, prompt: float, new: float, at_once: int) -> float | None:
        """Least time for rows with these mean lengths in tokens, at the ceilings of this machine, after loading.

        Nothing is shared between rows. None if the ceilings can't be measured, or the weights are not there.
        """
        plan, text = self._plan, self._text
        num_engines, device = len(plan.places), plan.places[0].device
        if device == "cpu":
            torch.set_num_threads(sum(place.num_threads for place in plan.places))
        known = ceilings(device, plan.dtype) if self.weights else None
        if known is None:
            return None
        num_devices = 1 if device == "cpu" else num_engines  # CPUs are measured all together, a GPU alone
        tokens = num_rows * (prompt + new)
        num_steps = max(num_rows * new / max(1, min(at_once, num_rows)), tokens / plan.max_num_batched_tokens)
        read = num_engines * num_steps * self._read + num_rows * new * (prompt + new / 2) * self.bytes_per_token
        share = expert_share(text)  # as if all weights of layers were experts
        flops = 2 * tokens * self._in_layers * share + 2 * num_rows * new * self._head
        return float(read / known.bytes_per_second + flops / known.flops) / num_devices


def expert_share(text: Any) -> float:
    """The share of the experts of a layer that a token uses; 1 in a model without experts. `text`: its configuration."""
    num_experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
    return float((getattr(text, "num_experts_per_tok", None) or 1) / num_experts)
