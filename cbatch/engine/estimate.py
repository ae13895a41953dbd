"""The memory that an engine will take, estimated from a model's files without loading a weight."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from cbatch.engine.places import Place
from cbatch.engine.plan import EnginePlan
from cbatch.kernels.attention import AttentionSpec
from cbatch.model.weights import num_weights

if TYPE_CHECKING:
    from cbatch.model.loader import ModelFiles


class Estimate:
    """Sizes in bytes for one replica of a plan. `num_blocks` is for all of its replicas together."""

    def __init__(self, files: ModelFiles, plan: EnginePlan) -> None:
        self._text, self._plan = files.config.get_text_config(), plan
        self._itemsize: int = getattr(torch, plan.dtype).itemsize
        num, in_layers = num_weights(files.path), 1 if plan.quantization == "int8" else self._itemsize
        outside = min(num, self._text.vocab_size * self._text.hidden_size * (1 if self._is_tied else 2))
        self.weights = outside * self._itemsize + (num - outside) * in_layers  # only those of layers are quantized

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
