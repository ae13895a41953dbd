"""Runs unmodified transformers decoders on a ragged batch.

"cbatch" is registered as an attention implementation: every attention layer passes it query, key and value, with the
`batch` and the `kv_cache` that the runner gave to `forward`. There is no mask implementation of that name, so
transformers makes no mask, and does not search the positions for packed sequences, which would make the host wait for the
device. The paged attention itself sees to causality and windows.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from cbatch.errors import Fatal
from cbatch.kernels.attention import AttentionSpec, HeadNorms, Rotary
from cbatch.model.batch import Batch

NAME = "cbatch"

_UNSUPPORTED = {"s_aux": "attention sinks", "position_bias": "position biases", "alibi": "ALiBi", "cache_position": ""}


class AttentionCache(Protocol):
    """Stores the keys and values of a step and attends to all there are: the KV cache, or `Probe`.

    query [T, H, D], key and value [T, H_kv, D] -> [T, H, D of the values].
    """

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: Batch, spec: AttentionSpec, /
    ) -> Tensor:
        """Attend with a query and keys that are rotated already."""

    def rope_attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: Batch,
        rotary: Rotary,
        norms: HeadNorms,
        spec: AttentionSpec,
        /,
    ) -> Tensor:
        """Normalise and rotate first; `query` is changed."""


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    kv_cache: AttentionCache | None = None,
    batch: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D]."""
    for name, meaning in _UNSUPPORTED.items():
        if meaning and kwargs.get(name) is not None:
            raise Fatal(f"this model uses {meaning}, which cbatch does not support")
    if attention_mask is not None or getattr(module, "is_causal", True) is False:
        raise Fatal("this model has attention that is not causal, which cbatch does not support")
    if kv_cache is None:
        raise Fatal(f"{type(module).__name__} does not take what cbatch passes to it, so it is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    spec = AttentionSpec(k.shape[1], k.shape[2], v.shape[2], scale, sliding_window or 0, softcap or 0.0)
    layer: Any = module.layer_idx
    out = kv_cache.attend(layer, q, k, v, batch, spec)
    return out[None], None


AttentionInterface.register(NAME, attention)


class Probe:
    """An `AttentionCache` that keeps nothing: it records how each layer attends, and answers with zeros."""

    def __init__(self) -> None:
        self.specs: dict[int, AttentionSpec] = {}

    def attend(
        self, layer: int, query: Tensor, _key: Tensor, value: Tensor, _batch: Batch | None, spec: AttentionSpec
    ) -> Tensor:
        if layer in self.specs:
            raise Fatal("this model attends more than once in a layer, which cbatch does not support")
        self.specs[layer] = spec
        return query.new_zeros(*query.shape[:2], value.shape[2])

    def rope_attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: Batch | None,
        _rotary: Rotary,
        _norms: HeadNorms,
        spec: AttentionSpec,
    ) -> Tensor:
        return self.attend(layer, query, key, value, batch, spec)


@torch.inference_mode()
def attention_specs(model: Any) -> dict[int, AttentionSpec]:
    """How each attention layer of `model` attends; Fatal if a layer does not go through `attention`."""
    probe, ids = Probe(), torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    settings = {"use_cache": False, "logits_to_keep": 1, "batch": None, "kv_cache": probe}
    try:
        model(input_ids=ids, position_ids=positions, **settings)
    except Fatal:
        raise
    except Exception as error:  # models fail in ways of their own
        raise Fatal(f"{type(model).__name__}: cbatch does not support this model: {error}") from error
    expected = model.config.get_text_config().num_hidden_layers
    if sorted(probe.specs) != list(range(expected)):
        raise Fatal(
            f"{type(model).__name__}: {len(probe.specs)} of {expected} layers use standard attention; "
            "cbatch does not support the others"
        )
    return probe.specs
