"""Verified substitution: modules of a model are replaced by fused ones that compute the same.

A fused module is built for every module that looks like one it knows, and takes its place only if the two agree on
random input; otherwise the original stays. So a model with a twist of its own is slower, never wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from cbatch.kernels.cpu import native
from cbatch.model import ops
from cbatch.model.batch import Batch, single
from cbatch.model.kv_cache import KVCache, LayerShape

_TOKENS = 24
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.03}  # norm of the difference, relative
_INT8_TOLERANCE = 0.1


class RMSNorm(nn.Module):
    """x [..., N] -> [..., N]; with a residual, that is added first and updated in place."""

    def __init__(self, weight: nn.Parameter, eps: float, weight_offset: float) -> None:
        super().__init__()
        self.weight, self.eps, self.weight_offset = weight, eps, weight_offset

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self.eps, residual, self.weight_offset)


class Linear(nn.Module):
    """x [..., K] -> [..., N] with weights packed for this device; with a `gate` (silu or gelu) the first half of the
    outputs scales the rest."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, gate: str | None = None, int8: bool = False
    ) -> None:
        super().__init__()
        packed = ops.pack(weight, bias, gate, int8)
        self.is_packed, self.is_quantized = packed is not None, packed is not None and int8
        self.bias, self.gate = bias, gate
        self.weight = nn.Parameter(weight, requires_grad=False) if packed is None else packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, self.weight, self.bias, self.gate)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)) with gate and up in one matrix."""

    def __init__(self, gate_up: Linear, down: nn.Module) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(self.gate_up(x))


class Experts(nn.Module):
    """The experts of a mixture, as one grouped matrix product."""

    def __init__(self, original: Any, gate: str) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.gelu = original.gate_up_proj, original.down_proj, gate == "gelu"

    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return ops.experts(x, self.gate_up_proj, self.down_proj, topk_ids, weights, self.gelu)


class Attention(nn.Module):
    """Attention with q, k and v in one matrix; norm, rotary embedding and the write to the cache in one kernel."""

    def __init__(
        self, original: Any, scale: float, window: int, softcap: float, weight_offset: float, int8: bool
    ) -> None:
        super().__init__()
        projections = original.q_proj, original.k_proj, original.v_proj
        biases = [p.bias for p in projections]
        weight, bias = torch.cat([p.weight for p in projections]), None if biases[0] is None else torch.cat(biases)
        self.sizes, self.qkv = [p.weight.shape[0] for p in projections], Linear(weight, bias, int8=int8)
        self.o_proj = _packed(original.o_proj, int8)
        self.layer_idx, self.head_dim = original.layer_idx, original.head_dim
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
        qkv = self.qkv(hidden_states[0])
        parts = torch.split(qkv, self.sizes, -1)
        query, key, value = (part.view(len(qkv), -1, self.head_dim) for part in parts)
        cos, sin = (table[0] for table in position_embeddings)
        norms = (self.q_weight, self.k_weight, self.eps, self.weight_offset)
        settings = (self.scale, self.window, self.softcap)
        out = kv_cache.rope_attend(self.layer_idx, query, key, value, batch, (cos, sin), norms, settings)
        return self.o_proj(out.flatten(1)[None]), None


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with the first addition inside the second norm.

    In one call, where all its weights are packed and the C kernels take this KV cache.
    """

    def __init__(self, original: Any, fits_c_kernels: bool) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = original.input_layernorm, original.self_attn
        self.post_attention_layernorm, self.mlp = original.post_attention_layernorm, original.mlp
        self.compiled = self._compile() if fits_c_kernels else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        batch: Any = None,
        kv_cache: Any = None,
        **kwargs: Any,
    ) -> Any:
        if self.compiled is not None:
            return kv_cache.run_layer(
                self.self_attn.layer_idx, self.compiled, hidden_states, batch, position_embeddings
            )
        settings = {"position_embeddings": position_embeddings, "batch": batch, "kv_cache": kv_cache, **kwargs}
        total, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **settings)
        normed = self.post_attention_layernorm(hidden_states, total)  # total += hidden_states
        return total.add_(self.mlp(normed))

    def _compile(self) -> native.Layer | None:
        a: Any = self.self_attn
        norms, mlp = (self.input_layernorm, self.post_attention_layernorm), self.mlp
        if not (isinstance(mlp, MLP) and all(isinstance(norm, RMSNorm) for norm in norms)):
            return None
        products: list[Any] = [a.qkv, a.o_proj, mlp.gate_up, mlp.down]
        if not all(isinstance(one, Linear) and one.is_packed for one in products):
            return None
        weights = [*(norm.weight for norm in norms), a.q_weight, a.k_weight]
        if len({weight.dtype for weight in weights if weight is not None}) > 1:
            return None
        return native.Layer(
            products=[one.weight for one in products],
            norms=[(norm.weight, norm.eps, norm.weight_offset) for norm in norms],
            heads=(a.sizes[0] // a.head_dim, a.sizes[1] // a.head_dim, a.head_dim),
            head_norms=(a.q_weight, a.k_weight, a.eps, a.weight_offset),
            settings=(a.scale, a.window, a.softcap),
        )


@torch.inference_mode()
def substitute(model: Any, layers: Mapping[int, LayerShape], block_size: int, int8: bool = False) -> dict[str, int]:
    """Replace what can be replaced, in place; how many modules of each kind were.

    `block_size`: of the KV cache that the model will run with. `int8`: quantize the weights of all layers, but not the
    LM head, to int8, and what is multiplied by them as it comes.
    The originals of one module at a time are kept beside the merged weights, never those of the whole model.
    """
    fusion, counts = _Fusion(model, layers, block_size, int8), Counter[str]()

    def replace(parent: nn.Module) -> None:
        for name, module in list(parent.named_children()):
            fused = fusion.of(module)
            if fused is None:
                replace(module)
                fused = fusion.of_layer(module)
            if fused is not None:
                setattr(parent, name, fused)
                counts[type(fused).__name__] += 1

    replace(model)
    return dict(counts)


def is_quantized(model: nn.Module) -> bool:
    """Whether any weights are int8 now."""
    return any(isinstance(module, Linear) and module.is_quantized for module in model.modules())


def _packed(module: Any, int8: bool) -> Any:
    """A plain linear module with its weights packed; any other as it is."""
    return Linear(module.weight, module.bias, int8=int8) if type(module) is nn.Linear else module


@dataclass(frozen=True)
class _Fusion:
    """Finds fused modules, and tries them, for one model."""

    model: Any
    layers: Mapping[int, LayerShape]
    block_size: int
    int8: bool
    pages: native.HugePages = field(
        default_factory=native.HugePages
    )  # for the caches of all trials: fresh ones take long

    def of(self, module: nn.Module) -> nn.Module | None:
        """A fused module that computes what `module` does, or None."""
        return next((fused for fused in self._candidates(module) if self._agree(module, fused)), None)

    def of_layer(self, module: Any) -> nn.Module | None:
        """The same for a decoder layer whose parts have been fused."""
        if [name for name, _ in module.named_children()] != [
            "self_attn",
            "mlp",
            "input_layernorm",
            "post_attention_layernorm",
        ] or not isinstance(module.self_attn, Attention):
            return None
        shape = self.layers[module.self_attn.layer_idx]
        fits = native.fits(self.model.dtype, self.block_size, shape.key_size, shape.value_size)
        fused = DecoderLayer(module, fits and ops.c_kernels(module.input_layernorm.weight) is not None)
        return fused if self._agree(module, fused) else None

    def _candidates(self, module: Any) -> Iterator[nn.Module]:
        """Fused modules that may compute what `module` computes, likeliest first."""
        kind = type(module).__name__
        if kind.endswith("RMSNorm") and _eps(module) is not None:
            for offset in (0.0, 1.0):
                yield RMSNorm(module.weight, _eps(module), offset)
        elif kind.endswith("MLP") and all(_is_plain(module, name) for name in ("gate_proj", "up_proj")):
            weight = torch.cat([module.gate_proj.weight, module.up_proj.weight])
            for gate in _activations(module):
                yield MLP(Linear(weight, gate=gate, int8=self.int8), _packed(module.down_proj, self.int8))
        elif kind.endswith("MLP") and _is_plain(module, "gate_up_proj") and hasattr(module, "down_proj"):
            for gate in _activations(module):
                gate_up = Linear(module.gate_up_proj.weight, gate=gate, int8=self.int8)
                yield MLP(gate_up, _packed(module.down_proj, self.int8))
        elif kind.endswith("Experts") and hasattr(module, "gate_up_proj") and hasattr(module, "down_proj"):
            for gate in _activations(module) if ops.uses_triton(module.down_proj) else ():
                yield Experts(module, gate)
        elif kind.endswith("Attention") and all(
            hasattr(module, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim")
        ):
            settings = _recorded(module, self.model, self.block_size)
            if settings is not None and _heads_are_normed_alone(module):
                for offset in (0.0, 1.0) if hasattr(module, "q_norm") else (0.0,):
                    yield Attention(module, *settings, offset, self.int8)
        elif type(module) is nn.Linear:
            fused = _packed(module, self.int8 and module is not self.model.get_output_embeddings())
            if fused.is_packed:
                yield fused

    def _agree(self, module: Any, fused: nn.Module) -> bool:
        """Whether the two give the same on random input."""
        dtype = next(module.parameters()).dtype
        try:
            own, ours = (out.float() for out in self._outputs(module, fused, dtype))
        except Exception:  # a kernel that does not fit this GPU, or a module that takes other arguments
            return False
        tolerance = _INT8_TOLERANCE if self.int8 and not isinstance(fused, RMSNorm) else _TOLERANCE[dtype]
        return bool((own - ours).norm() <= tolerance * own.norm())

    def _outputs(self, module: Any, fused: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
        """What the two give on the same random input."""
        generator = torch.Generator().manual_seed(1)
        device = module_device(module)
        if isinstance(fused, (Attention, DecoderLayer)):
            return self._attended(module, fused)
        if isinstance(fused, Experts):
            count, _, depth = module.gate_up_proj.shape
            x = torch.randn(_TOKENS, depth, generator=generator).to(device, dtype)
            weights, topk_ids = torch.rand(_TOKENS, count, generator=generator).to(device).topk(min(2, count))
            return [one(x, topk_ids, weights.to(dtype)) for one in (module, fused)]
        x = torch.randn(1, _TOKENS, _depth(module), generator=generator).to(device, dtype)
        return [one(x) for one in (module, fused)]

    def _attended(self, module: Any, fused: Any) -> list[torch.Tensor]:
        attention = fused if isinstance(fused, Attention) else fused.self_attn
        x, angles, batch = _attention_input(attention.layer_idx, self.model, self.block_size, module_device(module))
        shapes = {attention.layer_idx: self.layers[attention.layer_idx]}
        outs = []
        for one in (module, fused):
            cache = KVCache(
                shapes, -(-_TOKENS // self.block_size), self.block_size, self.model.dtype, x.device, self.pages
            )
            out = one(hidden_states=x, position_embeddings=angles, batch=batch, kv_cache=cache, attention_mask=None)
            outs.append(out[0] if isinstance(out, tuple) else out)
        return outs


def module_device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _depth(module: Any) -> int:
    """The width of a module's input."""
    if type(module) is nn.Linear:
        return module.in_features
    inner = next((getattr(module, name) for name in ("gate_proj", "gate_up_proj") if hasattr(module, name)), module)
    return int(inner.weight.shape[-1])


def _eps(module: Any) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _is_plain(module: Any, name: str) -> bool:
    part = getattr(module, name, None)
    return type(part) is nn.Linear and part.bias is None


def _activations(module: Any) -> list[str]:
    """GELU and SiLU in the order to try them, by the name of the module's own."""
    act = type(getattr(module, "act_fn", getattr(module, "activation_fn", None))).__name__.lower()
    return ["gelu", "silu"] if "gelu" in act else ["silu", "gelu"]


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


def _recorded(module: Any, model: Any, block_size: int) -> tuple[float, int, float] | None:
    recorder = _Recorder()
    x, angles, batch = _attention_input(module.layer_idx, model, block_size, module_device(module))
    try:
        module(hidden_states=x, position_embeddings=angles, attention_mask=None, batch=batch, kv_cache=recorder)
    except Exception:  # it takes other arguments: not one of ours
        return None
    return recorder.settings


def _attention_input(
    layer: int, model: Any, block_size: int, device: torch.device
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], Batch]:
    text = model.config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _TOKENS, text.hidden_size, generator=generator).to(device, model.dtype)
    batch = single(0, _TOKENS, -(-_TOKENS // block_size), block_size, device)
    rotary = next((m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")), None)
    if rotary is None:
        return x, (x, x), batch
    try:
        angles = rotary(x, batch.positions[None])
    except TypeError:  # one rotation for each type of layer
        kinds = getattr(text, "layer_types", None) or ["full_attention"]
        angles = rotary(x, batch.positions[None], kinds[layer])
    return x, angles, batch
