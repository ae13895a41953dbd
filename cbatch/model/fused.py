"""Verified substitution: modules of a model are replaced by fused ones that compute the same.

A fused module is built for every module that looks like one it knows, and takes its place only if the two agree on
random input; otherwise the original stays. So a model with a twist of its own is slower, never wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from cbatch.model import ops
from cbatch.model.batch import Batch, single
from cbatch.model.kv_cache import KVCache, LayerShape

_TOKENS, _BLOCK_SIZE = 24, 8
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.03}  # norm of the difference, relative


class RMSNorm(nn.Module):
    """x [..., N] -> [..., N]; with a residual, that is added first and updated in place."""

    def __init__(self, weight: nn.Parameter, eps: float, weight_offset: float) -> None:
        super().__init__()
        self.weight, self.eps, self.weight_offset = weight, eps, weight_offset

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self.eps, residual, self.weight_offset)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)) with gate and up in one matrix."""

    def __init__(self, gate_up: nn.Parameter, down: nn.Module, gelu: bool) -> None:
        super().__init__()
        self.gate_up, self.down, self.gelu = gate_up, down, gelu

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(ops.gated(functional.linear(x, self.gate_up), self.gelu))


class Experts(nn.Module):
    """The experts of a mixture, as one grouped matrix product."""

    def __init__(self, original: Any, gelu: bool) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.gelu = original.gate_up_proj, original.down_proj, gelu

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return ops.experts(x, self.gate_up_proj, self.down_proj, chosen, weights, self.gelu)


class Attention(nn.Module):
    """Attention with q, k and v in one matrix; norm, rotary embedding and the write to the cache in one kernel."""

    def __init__(self, original: Any, scale: float, window: int, softcap: float, weight_offset: float) -> None:
        super().__init__()
        projections = original.q_proj, original.k_proj, original.v_proj
        self.sizes = [p.weight.shape[0] for p in projections]
        self.weight = nn.Parameter(torch.cat([p.weight for p in projections]), requires_grad=False)
        biases = [p.bias for p in projections]
        self.bias = None if biases[0] is None else nn.Parameter(torch.cat(biases), requires_grad=False)
        self.o_proj, self.layer_idx, self.head_dim = original.o_proj, original.layer_idx, original.head_dim
        self.scale, self.window, self.softcap, self.weight_offset = scale, window, softcap, weight_offset
        q_norm, k_norm = getattr(original, "q_norm", None), getattr(original, "k_norm", None)
        self.q_weight, self.k_weight = (None if norm is None else norm.weight for norm in (q_norm, k_norm))
        self.eps = 0.0 if q_norm is None else _eps(q_norm)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: None = None,  # noqa: ARG002 causality is the kernel's business
        batch: Batch | None = None,
        kv_cache: Any = None,
        **_kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        qkv = functional.linear(hidden_states[0], self.weight, self.bias)
        parts = torch.split(qkv, self.sizes, -1)
        query, key, value = (part.view(len(qkv), -1, self.head_dim) for part in parts)
        cos, sin = (table[0] for table in position_embeddings)
        norms = (self.q_weight, self.k_weight, self.eps, self.weight_offset)
        settings = (self.scale, self.window, self.softcap)
        out = kv_cache.rope_attend(self.layer_idx, query, key, value, batch, (cos, sin), norms, settings)
        return self.o_proj(out.flatten(1)[None]), None


@torch.inference_mode()
def substitute(model: Any, layers: Mapping[int, LayerShape]) -> dict[str, int]:
    """Replace what can be replaced, in place; how many modules of each kind were.

    The originals of one module at a time are kept beside the merged weights, never those of the whole model.
    """
    counts: Counter[str] = Counter()

    def replace(parent: nn.Module) -> None:
        for name in [name for name, _ in parent.named_children()]:
            module = getattr(parent, name)
            fused = next((one for one in _candidates(module, model) if _agree(module, one, model, layers)), None)
            if fused is None:
                replace(module)
            else:
                setattr(parent, name, fused)
                counts[type(fused).__name__] += 1

    replace(model)
    return dict(counts)


def module_device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _candidates(module: Any, model: Any) -> Iterator[nn.Module]:
    """Fused modules that may compute what `module` computes, likeliest first."""
    kind = type(module).__name__
    if kind.endswith("RMSNorm") and _eps(module) is not None:
        for offset in (0.0, 1.0):
            yield RMSNorm(module.weight, _eps(module), offset)
    elif kind.endswith("MLP") and all(_is_plain(module, name) for name in ("gate_proj", "up_proj")):
        weight = torch.cat([module.gate_proj.weight, module.up_proj.weight])
        for gelu in _activations(module):
            yield MLP(nn.Parameter(weight, requires_grad=False), module.down_proj, gelu)
    elif kind.endswith("MLP") and _is_plain(module, "gate_up_proj") and hasattr(module, "down_proj"):
        for gelu in _activations(module):
            yield MLP(module.gate_up_proj.weight, module.down_proj, gelu)
    elif kind.endswith("Experts") and hasattr(module, "gate_up_proj") and hasattr(module, "down_proj"):
        for gelu in _activations(module):
            yield Experts(module, gelu)
    elif kind.endswith("Attention") and all(
        hasattr(module, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim")
    ):
        settings = _recorded(module, model)
        if settings is not None and _heads_are_normed_alone(module):
            for offset in (0.0, 1.0) if hasattr(module, "q_norm") else (0.0,):
                yield Attention(module, *settings, offset)


def _eps(module: Any) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _is_plain(module: Any, name: str) -> bool:
    part = getattr(module, name, None)
    return type(part) is nn.Linear and part.bias is None


def _activations(module: Any) -> list[bool]:
    """Whether to try GELU, SiLU or both first, by the name of the module's own."""
    act = type(getattr(module, "act_fn", getattr(module, "activation_fn", None))).__name__.lower()
    return [True, False] if "gelu" in act else [False, True]


def _heads_are_normed_alone(module: Any) -> bool:
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    alone = all(
        norm is None or getattr(norm, "weight", module.q_proj.weight).shape == (module.head_dim,) for norm in norms
    )
    return alone and (norms[0] is None) == (norms[1] is None)


class _Recorder:
    """Stands in for the KV cache, to learn with which settings a module calls the attention."""

    def __init__(self) -> None:
        self.settings: tuple[float, int, float] | None = None

    def attend(
        self, _layer: int, query: torch.Tensor, _key: Any, value: torch.Tensor, _batch: Any, *settings: Any
    ) -> torch.Tensor:
        self.settings = settings
        return query.new_zeros(*query.shape[:2], value.shape[2])


def _recorded(module: Any, model: Any) -> tuple[float, int, float] | None:
    recorder = _Recorder()
    x, angles, batch = _attention_input(module, model)
    try:
        module(hidden_states=x, position_embeddings=angles, attention_mask=None, batch=batch, kv_cache=recorder)
    except Exception:  # it takes other arguments: not one of ours
        return None
    return recorder.settings


def _attention_input(module: Any, model: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], Batch]:
    device, dtype = module_device(module), model.dtype
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _TOKENS, module.q_proj.weight.shape[1], generator=generator).to(device, dtype)
    batch = single(0, _TOKENS, -(-_TOKENS // _BLOCK_SIZE), _BLOCK_SIZE, device)
    rotary = next((m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")), None)
    if rotary is None:
        return x, (x, x), batch
    try:
        angles = rotary(x, batch.positions[None])
    except TypeError:  # one rotation for each type of layer
        kinds = getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"]
        angles = rotary(x, batch.positions[None], kinds[module.layer_idx])
    return x, angles, batch


def _agree(module: Any, fused: nn.Module, model: Any, layers: Mapping[int, LayerShape]) -> bool:
    """Whether the two give the same on random input."""
    try:
        own, ours = (out.float() for out in _outputs(module, fused, model, layers))
    except Exception:  # a kernel that does not fit this GPU, or a module that takes other arguments
        return False
    return bool((own - ours).norm() <= _TOLERANCE[next(module.parameters()).dtype] * own.norm())


def _outputs(module: Any, fused: nn.Module, model: Any, layers: Mapping[int, LayerShape]) -> list[torch.Tensor]:
    """What the two give on the same random input."""
    generator = torch.Generator().manual_seed(1)
    device, dtype = module_device(module), next(module.parameters()).dtype
    if isinstance(fused, Attention):
        x, angles, batch = _attention_input(module, model)
        outs = []
        for one in (module, fused):
            shapes = {fused.layer_idx: layers[fused.layer_idx]}
            cache = KVCache(shapes, -(-_TOKENS // _BLOCK_SIZE), _BLOCK_SIZE, dtype, device)
            outs.append(
                one(hidden_states=x, position_embeddings=angles, batch=batch, kv_cache=cache, attention_mask=None)[0]
            )
    elif isinstance(fused, Experts):
        count, _, depth = module.gate_up_proj.shape
        x = torch.randn(_TOKENS, depth, generator=generator).to(device, dtype)
        weights, chosen = torch.rand(_TOKENS, count, generator=generator).to(device).topk(min(2, count))
        outs = [one(x, chosen, weights.to(dtype)) for one in (module, fused)]
    else:
        weight: Any = fused.weight if isinstance(fused, RMSNorm) else fused.gate_up
        depth = weight.shape[-1]
        x = torch.randn(1, _TOKENS, depth, generator=generator).to(device, dtype)
        outs = [one(x) for one in (module, fused)]
    return outs
