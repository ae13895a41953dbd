"""Runs unmodified transformers decoders on a ragged batch.

"cbatch" is registered as an attention implementation; the model hands every attention layer's query, key and value to
it, together with the `batch` and the `kv_cache` that the runner passed to `forward`. There is no mask implementation of
that name, so transformers makes no mask, and does not look through the positions for packed sequences, which would have
the host wait for the device: causality and windows are the business of the paged attention.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from cbatch.errors import Fatal
from cbatch.model.kv_cache import LayerShape

NAME = "cbatch"

_UNSUPPORTED = {"s_aux": "attention sinks", "position_bias": "position biases", "alibi": "ALiBi", "cache_position": ""}


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    kv_cache: Any = None,
    batch: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D]."""
    for name, meaning in _UNSUPPORTED.items():
        if meaning and kwargs.get(name) is not None:
            raise Fatal(f"this model uses {meaning}, which cbatch does not support")
    if attention_mask is not None or getattr(module, "is_causal", True) is False:
        raise Fatal("this model has attention that is not causal, which cbatch does not support")
    if kv_cache is None:
        raise Fatal(f"{type(module).__name__} does not take what cbatch passes to it, so it is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    flat = (x[0].transpose(0, 1) for x in (query, key, value))
    out = kv_cache.attend(module.layer_idx, *flat, batch, scale, sliding_window or 0, softcap or 0.0)
    return out[None], None


AttentionInterface.register(NAME, attention)


class Probe:
    """Stands in for the KV cache once, to learn what each layer keeps."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _batch: None,
        _scale: float,
        window: int,
        _softcap: float,
    ) -> torch.Tensor:
        if layer in self.layers:
            raise Fatal("this model attends more than once in a layer, which cbatch does not support")
        self.layers[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2], window)
        return query.new_zeros(*query.shape[:2], value.shape[2])

    def rope_attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: None,
        _angles: Any,
        _norms: Any,
        settings: tuple[float, int, float],
    ) -> torch.Tensor:
        return self.attend(layer, query, key, value, batch, *settings)


@torch.inference_mode()
def layer_shapes(model: Any) -> dict[int, LayerShape]:
    """What each attention layer of `model` keeps of a token; Fatal if a layer does not go through `attention`."""
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
    if sorted(probe.layers) != list(range(expected)):
        raise Fatal(
            f"{type(model).__name__}: {len(probe.layers)} of {expected} layers use standard attention; "
            "cbatch does not support the others"
        )
    return probe.layers
