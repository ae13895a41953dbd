"""The specification of each op, in plain torch and with no care for speed. The other implementations are tested against it.

Shapes: T tokens of S sequences, H query heads, H_kv key/value heads (H a multiple of H_kv), D head size.
"""

from __future__ import annotations

import torch

from cbatch.kernels.attention import NO_NORMS, AttentionSpec, HeadNorms, Layout, Rotary


def store_kv(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write `key` and `value` [T, H_kv, D] to their slots of the caches [num_blocks, block_size, H_kv, D], in place.

    `slot_mapping` [T] holds block * block_size + offset; a token with slot -1 is not stored. In a cache of fp8 (e4m3) a
    value is rounded to the nearest there is, up to 448; one that is not finite becomes NaN.
    """
    if k_cache.dtype == torch.float8_e4m3fn:
        key, value = (torch.where(x.isfinite(), x, torch.nan).clamp(-448, 448).to(k_cache.dtype) for x in (key, value))
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, k_cache.shape[1])
            k_cache[block, offset], v_cache[block, offset] = key[token], value[token]


def paged_attention(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: Layout, spec: AttentionSpec
) -> torch.Tensor:
    """Causal attention of ragged queries over a paged cache, in float64.

    query [T, H, D]: sequence s has rows cu_seqlens_q[s]:cu_seqlens_q[s + 1], the last of its `seq_lens[s]` tokens,
    whose keys and values are in the caches [num_blocks, block_size, H_kv, D] at `block_tables` [S, max_blocks].
    Query head h reads key/value head h // (H // H_kv). With a window w > 0 a token sees itself and the w - 1 before it;
    with a softcap c > 0 scores become c * tanh(score / c). Slots past the end of a sequence are not read. The head size
    of values may differ from that of queries and keys. Returns [T, H, D of the values] float64.
    """
    num_heads, num_kv_heads = query.shape[1], k_cache.shape[2]
    out = torch.full((*query.shape[:2], v_cache.shape[3]), torch.nan, dtype=torch.float64, device=query.device)
    for s, seq_len in enumerate(layout.seq_lens.tolist()):
        start, stop = layout.cu_seqlens_q[s : s + 2].tolist()
        for token in range(start, stop):
            position = seq_len - (stop - token)
            first = max(0, position - spec.window + 1) if spec.window else 0
            places = [divmod(p, k_cache.shape[1]) for p in range(first, position + 1)]
            blocks = [int(layout.block_tables[s, index]) for index, _ in places]
            offsets = [offset for _, offset in places]
            keys, values = k_cache[blocks, offsets].double(), v_cache[blocks, offsets].double()  # [n, H_kv, D]
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                scores = keys[:, kv_head] @ query[token, head].double() * spec.scale
                if spec.softcap:
                    scores = spec.softcap * torch.tanh(scores / spec.softcap)
                out[token, head] = torch.softmax(scores, 0) @ values[:, kv_head]
    return out


def rope_store_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    rotary: Rotary,
    norms: HeadNorms = NO_NORMS,
) -> None:
    """Normalise and rotate `query` [T, H, D] in place and `key` [T, H_kv, D] on its way to the cache, then `store_kv`.

    The first ROT <= D dimensions of a head turn, in pairs (i, i + ROT / 2).
    """
    query.copy_(rotate(query, rotary, norms.q_weight, norms))
    store_kv(rotate(key, rotary, norms.k_weight, norms), value, k_cache, v_cache, slot_mapping)


def rotate(x: torch.Tensor, rotary: Rotary, weight: torch.Tensor | None, norms: HeadNorms) -> torch.Tensor:
    """x [T, heads, D], normalised if there is a weight, then rotated, as `rope_store_kv` says."""
    if weight is not None:
        x = rms_norm(x, weight, norms.eps, weight_offset=norms.weight_offset)
    size = rotary.cos.shape[-1]
    a, b = x[..., : size // 2].float(), x[..., size // 2 : size].float()
    cos, sin = (table[:, None, : size // 2].float() for table in rotary)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., size:].float()], -1).to(x.dtype)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    """x [..., N] over the root of its mean square, times (weight [N] + offset); `residual` becomes x + residual."""
    if residual is not None:
        x = residual.add_(x)
    wide = x.double()
    normed = wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return (normed * (weight.double() + weight_offset)).to(x.dtype)


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: torch.Tensor,
    gelu: bool = False,
) -> torch.Tensor:
    """The weighted sum of each token's experts: x [T, K], gate_up [E, 2I, K], down [E, K, I], topk_ids and weights [T, top]."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for token, row in enumerate(topk_ids.tolist()):
        for place, expert in enumerate(row):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            act = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else torch.nn.functional.silu(gate)
            out[token] += weights[token, place].double() * (down[expert].double() @ (act * up))
    return out.to(x.dtype)
