"""What each op computes, in plain torch and with no care for speed. The other implementations are tested against it.

Shapes: T tokens of S sequences, H query heads, H_kv key/value heads (H a multiple of H_kv), D head size.
"""

from __future__ import annotations

import torch


def store_kv(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write `key` and `value` [T, H_kv, D] to their slots of the caches [num_blocks, block_size, H_kv, D], in place.

    `slot_mapping` [T] holds block * block_size + offset; a token with slot -1 is not stored.
    """
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
) -> torch.Tensor:
    """Causal attention of ragged queries over a paged cache, in float64.

    query [T, H, D]: sequence s has rows cu_seqlens_q[s]:cu_seqlens_q[s + 1], the last of its `seq_lens[s]` tokens,
    whose keys and values are in the caches [num_blocks, block_size, H_kv, D] at `block_tables` [S, max_blocks].
    Query head h reads key/value head h // (H // H_kv). With `window` w > 0 a token sees itself and the w - 1 before
    it; with `softcap` c > 0 scores become c * tanh(score / c). Slots past the end of a sequence are not read.
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
                out[token, head] = torch.softmax(scores, 0) @ values[:, kv_head]
    return out
