"""Fused modules: each computes what one or several modules of a transformers model do, with the ops of a backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cbatch.kernels.attention import AttentionSpec, HeadNorms, Norm, Rotary
from cbatch.kernels.cpu import native
from cbatch.model.attention import AttentionCache
from cbatch.model.batch import Batch
from cbatch.model.ops import Backend


class RMSNorm(nn.Module):
    """x [..., N] -> [..., N]; a residual is added first, and updated in place."""

    def __init__(self, backend: Backend, weight: nn.Parameter, eps: float, weight_offset: float) -> None:
        super().__init__()
        self.backend, self.weight, self.eps, self.weight_offset = backend, weight, eps, weight_offset

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.backend.rms_norm(x, self.weight, self.eps, residual, self.weight_offset)


class Linear(nn.Module):
    """x [..., K] -> [..., N] with weights packed for this device, if its kernels take them.

    With a `gate` (silu or gelu) the first half of the outputs scales the rest.
    """

    def __init__(
        self, backend: Backend, weight: Tensor, bias: Tensor | None = None, gate: str | None = None, int8: bool = False
    ) -> None:
        super().__init__()
        self.is_packed = backend.can_pack(weight, gate, int8)
        self.is_quantized = self.is_packed and int8
        self.backend, self.bias, self.gate = backend, bias, gate
        self.weight: Any = (
            backend.pack(weight, bias, gate, int8) if self.is_packed else nn.Parameter(weight, requires_grad=False)
        )

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weights with their scales; 0 if they are not packed."""
        parts = (self.weight.panels, self.weight.scales, self.weight.offset) if self.is_packed else ()
        return sum(part.nbytes for part in parts if part is not None)

    def forward(self, x: Tensor) -> Tensor:
        return self.backend.linear(x, self.weight, self.bias, self.gate)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)) with gate and up in one matrix."""

    def __init__(self, gate_up: Linear, down: nn.Module) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def forward(self, x: Tensor) -> Any:
        return self.down(self.gate_up(x))


class Experts(nn.Module):
    """The experts of a mixture, as one grouped matrix product."""

    def __init__(self, backend: Backend, original: Any, gate: str) -> None:
        super().__init__()
        self.backend, self.gelu = backend, gate == "gelu"
        self.gate_up_proj, self.down_proj = original.gate_up_proj, original.down_proj

    def forward(self, x: Tensor, topk_ids: Tensor, weights: Tensor) -> Tensor:
        return self.backend.experts(x, self.gate_up_proj, self.down_proj, topk_ids, weights, self.gelu)


class Attention(nn.Module):
    """Attention with q, k and v in one matrix; norm, rotary embedding and the write to the cache are one kernel."""

    def __init__(self, backend: Backend, original: Any, spec: AttentionSpec, weight_offset: float, int8: bool) -> None:
        super().__init__()
        projections = original.q_proj, original.k_proj, original.v_proj
        biases = [p.bias for p in projections]
        weight, bias = torch.cat([p.weight for p in projections]), None if biases[0] is None else torch.cat(biases)
        self.sizes = [p.weight.shape[0] for p in projections]
        self.qkv = Linear(backend, weight, bias, int8=int8)
        self.o_proj = packed(backend, original.o_proj, int8)
        self.layer_idx, self.head_dim, self.spec = original.layer_idx, original.head_dim, spec
        self.q_norm, self.k_norm = getattr(original, "q_norm", None), getattr(original, "k_norm", None)
        q_weight, k_weight = (None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm))
        eps = 0.0 if self.q_norm is None else eps_of(self.q_norm)
        self.norms = HeadNorms(q_weight, k_weight, eps, weight_offset)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: None = None,  # noqa: ARG002 causality is the kernel's business
        *,
        batch: Batch,
        kv_cache: AttentionCache,
        **_kwargs: Any,
    ) -> tuple[Tensor, None]:
        qkv = self.qkv(hidden_states[0])
        parts = torch.split(qkv, self.sizes, -1)
        query, key, value = (part.view(len(qkv), -1, self.head_dim) for part in parts)
        rotary = Rotary(position_embeddings[0][0], position_embeddings[1][0])
        out = kv_cache.rope_attend(self.layer_idx, query, key, value, batch, rotary, self.norms, self.spec)
        return self.o_proj(out.flatten(1)[None]), None


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with the first addition inside the second norm.

    It is one call of the C kernels if these take its KV cache and all its weights are packed.
    """

    def __init__(self, original: Any, fits_c_kernels: bool) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = original.input_layernorm, original.self_attn
        self.post_attention_layernorm, self.mlp = original.post_attention_layernorm, original.mlp
        self.compiled = self._compile() if fits_c_kernels else None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        batch: Any = None,
        kv_cache: Any = None,
        **kwargs: Any,
    ) -> Any:
        if self.compiled is not None:
            layer = self.self_attn.layer_idx
            return kv_cache.run_layer(layer, self.compiled, hidden_states, batch, position_embeddings)
        settings = {"position_embeddings": position_embeddings, "batch": batch, "kv_cache": kv_cache, **kwargs}
        total, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **settings)
        normed = self.post_attention_layernorm(hidden_states, total)  # total += hidden_states
        return total.add_(self.mlp(normed))

    def _compile(self) -> native.Layer | None:
        attention: Any = self.self_attn
        first, second, mlp = self.input_layernorm, self.post_attention_layernorm, self.mlp
        if not (isinstance(mlp, MLP) and isinstance(first, RMSNorm) and isinstance(second, RMSNorm)):
            return None
        products: list[Any] = [attention.qkv, attention.o_proj, mlp.gate_up, mlp.down]
        if not all(isinstance(product, Linear) and product.is_packed for product in products):
            return None
        weights = first.weight, second.weight, attention.norms.q_weight, attention.norms.k_weight
        if len({weight.dtype for weight in weights if weight is not None}) > 1:
            return None
        qkv, out, gate_up, down = (product.weight for product in products)
        norm1, norm2 = (Norm(norm.weight, norm.eps, norm.weight_offset) for norm in (first, second))
        num_heads = attention.sizes[0] // attention.head_dim
        return native.Layer((qkv, out, gate_up, down), (norm1, norm2), num_heads, attention.norms, attention.spec)


def packed(backend: Backend, module: Any, int8: bool) -> Any:
    """A plain linear module with its weights packed; any other as it is."""
    return Linear(backend, module.weight, module.bias, int8=int8) if type(module) is nn.Linear else module


def is_quantized(model: nn.Module) -> bool:
    """Whether any weights of a model are int8 now."""
    return any(isinstance(module, Linear) and module.is_quantized for module in model.modules())


def eps_of(norm: Any) -> Any:
    """The epsilon of an RMSNorm of transformers; None if it is called otherwise."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
