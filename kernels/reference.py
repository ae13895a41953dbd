"""What each op computes, in plain torch and with no care for speed. The other implementations are tested against it.

Shapes: T tokens of S sequences, H query heads, H_kv key/value heads (H a multiple of H_kv), D head size.
"""

from __future__ import annotations

import torch


def store_kv(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write `key` and `value` [T, H_kv, D] to their slots of the caches [num_blocks, block_size, H_kv, D], in place.

    `slot_mapping` [T] holds block * block_size + offset; a token with slot -1 is not stored. A cache of fp8 (e4m3) holds
    the nearest value that it can, at most 448; what is not finite becomes NaN.
    """
    if k_cache.dtype == torch.float8_e4m3fn:
        key, value = (torch.where(x.isfinite(), x, torch.nan).clamp(-448, 448).to(k_cache.dtype) for x in (key, value))
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, k_cache.shape[1])
            k_cache[block, offset], v_cache[block, offset] = key[token], value[token]


def paged_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of ragged queries over a paged cache, in float64.

    query [T, H, D]: sequence s has rows cu_seqlens_q[s]:cu_seqlens_q[s + 1], the last of its `seq_lens[s]` tokens,
    whose keys and values are in the caches [num_blocks, block_size, H_kv, D] at `block_tables` [S, max_blocks].
    Query head h reads key/value head h // (H // H_kv). With `window` w > 0 a token sees itself and the w - 1 before
    it; with `softcap` c > 0 scores become c * tanh(score / c); `sinks` [H] are extra scores without a value. Slots past the end of a sequence are not read.
    The head size of values may differ from that of queries and keys. Returns [T, H, D of the values] float64.
    """
    num_heads, num_kv_heads = query.shape[1], k_cache.shape[2]
    out = torch.full((*query.shape[:2], v_cache.shape[3]), torch.nan, dtype=torch.float64, device=query.device)
    for s, seq_len in enumerate(seq_lens.tolist()):
        start, stop = cu_seqlens_q[s].item(), cu_seqlens_q[s + 1].item()
        for token in range(int(start), int(stop)):
            position = seq_len - (int(stop) - token)
            first = max(0, position - window + 1) if window else 0
            places = [divmod(p, k_cache.shape[1]) for p in range(first, position + 1)]
            blocks = [int(block_tables[s, index]) for index, _ in places]
            offsets = [offset for _, offset in places]
            keys, values = k_cache[blocks, offsets].double(), v_cache[blocks, offsets].double()  # [n, H_kv, D]
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                scores = keys[:, kv_head] @ query[token, head].double() * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                extra = scores[:0] if sinks is None else sinks[head : head + 1].double()
                weights = torch.softmax(torch.cat([scores, extra]), 0)[: len(scores)]
                out[token, head] = weights @ values[:, kv_head]
    return out


def rope_store_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    weight_offset: float = 0.0,
) -> None:
    """Normalise (with weights [D]) and rotate `query` [T, H, D] in place and `key` [T, H_kv, D], then `store_kv`.

    cos and sin [T, ROT], both halves equal; the first ROT <= D dimensions turn, in pairs (i, i + ROT / 2).
    """

    query.copy_(rotate(query, cos, sin, q_weight, eps, weight_offset))
    key = rotate(key, cos, sin, k_weight, eps, weight_offset)
    store_kv(key, value, k_cache, v_cache, slot_mapping)


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_offset: float
) -> torch.Tensor:
    """x [T, heads, D], normalised if there is a weight, then rotated, as `rope_store_kv` says."""
    if weight is not None:
        x = rms_norm(x, weight, eps, weight_offset=weight_offset)
    size = cos.shape[-1]
    a, b = x[..., : size // 2].float(), x[..., size // 2 : size].float()
    c, s = cos[:, None, : size // 2].float(), sin[:, None, : size // 2].float()
    return torch.cat([a * c - b * s, b * c + a * s, x[..., size:].float()], -1).to(x.dtype)


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
    """Each token through its topk_ids experts, weighted: x [T, K], gate_up [E, 2I, K], down [E, K, I], topk_ids [T, top]."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for token, row in enumerate(topk_ids.tolist()):
        for place, expert in enumerate(row):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            act = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else torch.nn.functional.silu(gate)
            out[token] += weights[token, place].double() * (down[expert].double() @ (act * up))
    return out.to(x.dtype)
