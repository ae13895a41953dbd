"""Verified substitution: modules of a model are replaced by fused ones that compute the same.

A fused module is built for every module that looks like a known kind, and takes its place only if the two agree on random
input; otherwise the original stays. So a model with a twist of its own is slower, never wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cbatch.kernels.attention import AttentionSpec
from cbatch.kernels.cpu import native
from cbatch.kernels.cpu.huge_pages import HugePages
from cbatch.model import ops
from cbatch.model.batch import Batch, single
from cbatch.model.fused import MLP, Attention, DecoderLayer, Experts, Linear, RMSNorm, eps_of, packed
from cbatch.model.kv_cache import KVCache

_TOKENS = 24
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.03}  # norm of the difference, relative
_INT8_TOLERANCE = 0.1


@torch.inference_mode()
def substitute(
    model: Any,
    specs: Mapping[int, AttentionSpec],
    block_size: int,
    int8: bool = False,
    backend: ops.Backend | None = None,
) -> dict[str, int]:
    """Replace in place all modules that can be replaced; returns how many of each kind were.

    `block_size`: of the KV cache that the model will run with. `int8`: quantize the weights of all layers, but not of the
    LM head, to int8, and their inputs as they come. `backend`: by default the one that the model's device has.
    The originals of one module at a time are kept beside the merged weights, never those of the whole model.
    """
    plan = _Plan(model, specs, block_size, int8, backend or ops.choose(model.device))
    counts = Counter[str]()

    def replace(parent: nn.Module) -> None:
        for name, module in list(parent.named_children()):
            fused = plan.fused(module)
            if fused is None:
                replace(module)
                fused = plan.fused_layer(module)
            if fused is not None:
                setattr(parent, name, fused)
                counts[type(fused).__name__] += 1

    replace(model)
    return dict(counts)


@dataclass(frozen=True)
class _Plan:
    """What one model is to be fused for; finds fused modules and tries them."""

    model: Any
    specs: Mapping[int, AttentionSpec]
    block_size: int
    int8: bool
    backend: ops.Backend
    huge_pages: HugePages = field(default_factory=HugePages)  # for the caches of all trials: new ones take long

    def fused(self, module: nn.Module) -> nn.Module | None:
        """A fused module that computes what `module` does, or None."""
        kind = type(module).__name__
        for ending, candidates in _CANDIDATES.items():
            for build in candidates(self, module) if kind.endswith(ending) else ():
                if (fused := self._tried(module, build)) is not None:
                    return fused
        return None

    def fused_layer(self, module: Any) -> nn.Module | None:
        """A fused decoder layer for one whose parts have been fused, or None."""
        names = [name for name, _ in module.named_children()]
        if names != ["self_attn", "mlp", "input_layernorm", "post_attention_layernorm"]:
            return None
        if not isinstance(module.self_attn, Attention):
            return None
        spec = self.specs[module.self_attn.layer_idx]
        fits = native.fits(self.model.dtype, self.block_size, spec.key_size, spec.value_size)
        return self._tried(module, partial(DecoderLayer, module, fits and self.backend.has_layers))

    def _tried(self, module: Any, build: Callable[[], nn.Module]) -> nn.Module | None:
        """The fused module if the two give the same on random input, else None."""
        dtype = next(module.parameters()).dtype
        try:
            fused = build()
            own, ours = (out.float() for out in self._outputs(module, fused, dtype))
        except Exception:  # a kernel that does not fit this GPU, or a module that takes other arguments
            return None
        tolerance = _INT8_TOLERANCE if self.int8 and not isinstance(fused, RMSNorm) else _TOLERANCE[dtype]
        return fused if (own - ours).norm() <= tolerance * own.norm() else None

    def _outputs(self, module: Any, fused: nn.Module, dtype: torch.dtype) -> list[Tensor]:
        """The outputs of the two on the same random input."""
        if isinstance(fused, Attention):
            return self._attended(module, fused, fused.layer_idx)
        if isinstance(fused, DecoderLayer):
            return self._attended(module, fused, fused.self_attn.layer_idx)
        generator, device = torch.Generator().manual_seed(1), _device(module)
        if isinstance(fused, Experts):
            count, _, depth = module.gate_up_proj.shape
            x = torch.randn(_TOKENS, depth, generator=generator).to(device, dtype)
            weights, topk_ids = torch.rand(_TOKENS, count, generator=generator).to(device).topk(min(2, count))
            return [experts(x, topk_ids, weights.to(dtype)) for experts in (module, fused)]
        x = torch.randn(1, _TOKENS, _depth(module), generator=generator).to(device, dtype)
        return [module(x), fused(x)]

    def _attended(self, module: Any, fused: Any, layer: int) -> list[Tensor]:
        x, rotary, batch = self._attention_input(layer, _device(module))
        num_blocks, outs = -(-_TOKENS // self.block_size), []
        for attention in (module, fused):
            cache = KVCache(
                {layer: self.specs[layer]}, num_blocks, self.block_size, self.model.dtype, x.device, self.huge_pages,
                self.backend,
            )  # fmt: skip
            out = attention(
                hidden_states=x, position_embeddings=rotary, batch=batch, kv_cache=cache, attention_mask=None
            )
            outs.append(out[0] if isinstance(out, tuple) else out)
        return outs

    def _attention_input(self, layer: int, device: torch.device) -> tuple[Tensor, tuple[Tensor, Tensor], Batch]:
        """Random hidden states [1, _TOKENS, width], their rotary embedding, and where they lie."""
        text = self.model.config.get_text_config()
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1, _TOKENS, text.hidden_size, generator=generator).to(device, self.model.dtype)
        batch = single(0, _TOKENS, -(-_TOKENS // self.block_size), self.block_size, device)
        rotary = next((m for m in self.model.modules() if type(m).__name__.endswith("RotaryEmbedding")), None)
        if rotary is None:
            return x, (x, x), batch
        try:
            return x, rotary(x, batch.positions[None]), batch
        except TypeError:  # one rotation for each type of layer
            types = getattr(text, "layer_types", None) or ["full_attention"]
            return x, rotary(x, batch.positions[None], types[layer]), batch


Builds = Iterator[Callable[[], nn.Module]]


def _norms(plan: _Plan, module: Any) -> Builds:
    eps = eps_of(module)
    for offset in (0.0, 1.0) if eps is not None else ():
        yield partial(RMSNorm, plan.backend, module.weight, eps, offset)


def _mlps(plan: _Plan, module: Any) -> Builds:
    names = ["gate_proj", "up_proj"] if hasattr(module, "gate_proj") else ["gate_up_proj"]
    if not all(_is_plain(module, name) for name in names) or not hasattr(module, "down_proj"):
        return

    def build(gate: str) -> MLP:
        weights = [getattr(module, name).weight for name in names]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        gate_up = Linear(plan.backend, weight, gate=gate, int8=plan.int8)
        return MLP(gate_up, packed(plan.backend, module.down_proj, plan.int8))

    for gate in _activations(module):
        yield partial(build, gate)


def _experts(plan: _Plan, module: Any) -> Builds:
    if plan.backend.has_experts and hasattr(module, "gate_up_proj") and hasattr(module, "down_proj"):
        for gate in _activations(module):
            yield partial(Experts, plan.backend, module, gate)


def _attentions(plan: _Plan, module: Any) -> Builds:
    names = "q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "layer_idx"
    if not all(hasattr(module, name) for name in names) or not _heads_are_normed_alone(module):
        return
    spec = plan.specs.get(module.layer_idx)
    for offset in (0.0, 1.0) if hasattr(module, "q_norm") else (0.0,):
        if spec is not None:
            yield partial(Attention, plan.backend, module, spec, offset, plan.int8)


def _linears(plan: _Plan, module: Any) -> Builds:
    int8 = plan.int8 and module is not plan.model.get_output_embeddings()
    if type(module) is nn.Linear and plan.backend.can_pack(module.weight, None, int8):
        yield partial(packed, plan.backend, module, int8)


# By the ending of a module's class name: how to build the fused modules that may compute the same, likeliest first.
_CANDIDATES: dict[str, Callable[[_Plan, Any], Builds]] = {
    "RMSNorm": _norms,
    "MLP": _mlps,
    "Experts": _experts,
    "Attention": _attentions,
    "Linear": _linears,
}


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _depth(module: Any) -> int:
    """The width of a module's input."""
    if type(module) is nn.Linear:
        return module.in_features
    inner = next((getattr(module, name) for name in ("gate_proj", "gate_up_proj") if hasattr(module, name)), module)
    return int(inner.weight.shape[-1])


def _is_plain(module: Any, name: str) -> bool:
    part = getattr(module, name, None)
    return type(part) is nn.Linear and part.bias is None


def _activations(module: Any) -> list[str]:
    """GELU and SiLU in the order to try them, by the name of the module's own."""
    act = type(getattr(module, "act_fn", getattr(module, "activation_fn", None))).__name__.lower()
    return ["gelu", "silu"] if "gelu" in act else ["silu", "gelu"]


def _heads_are_normed_alone(module: Any) -> bool:
    """Whether q and k have no norms, or both have one whose weights are those of a single head."""
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    alone = all(
        norm is None or getattr(norm, "weight", module.q_proj.weight).shape == (module.head_dim,) for norm in norms
    )
    return alone and (norms[0] is None) == (norms[1] is None)
