"""The attention ops with torch's own operators, for any device: sequence by sequence over gathered blocks.

The contract is that of `reference.py`. Query heads that share a key/value head are laid out as extra rows, so that keys
and values are never repeated.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from cbatch.kernels.attention import NO_NORMS, AttentionSpec, HeadNorms, Layout, Rotary
from cbatch.kernels.reference import rotate


def store_kv(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """`reference.store_kv` where every token has a slot."""
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, key)
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, value)


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
    """`reference.rope_store_kv` where every token has a slot."""
    query.copy_(rotate(query, rotary, norms.q_weight, norms))
    store_kv(rotate(key, rotary, norms.k_weight, norms), value, k_cache, v_cache, slot_mapping)


def paged_attention(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: Layout, spec: AttentionSpec
) -> torch.Tensor:
    """`reference.paged_attention` in the dtype of `query`."""
    block_size, window = k_cache.shape[1], spec.window
    out = query.new_empty(*query.shape[:2], v_cache.shape[3])
    for table, (start, stop, seq_len) in zip(layout.block_tables, layout.spans, strict=True):
        num_rows = stop - start
        first = max(0, seq_len - num_rows - window + 1) if window else 0  # no row sees a token before this one
        first_block = first // block_size
        blocks = table[first_block : -(-seq_len // block_size)]
        seen = slice(first - first_block * block_size, seq_len - first_block * block_size)
        keys = k_cache.index_select(0, blocks).flatten(0, 1)[seen].transpose(0, 1)  # [H_kv, L, D]
        values = v_cache.index_select(0, blocks).flatten(0, 1)[seen].transpose(0, 1)
        grouped = query[start:stop].view(num_rows, keys.shape[0], -1, query.shape[2])
        rows = grouped.permute(1, 2, 0, 3).flatten(1, 2)  # [H_kv, G * n, D]
        mask = None if num_rows == 1 else _mask(num_rows, seq_len - first, window, query.device)
        attended = _attend(rows, keys, values, mask, spec)
        ungrouped = attended.view(keys.shape[0], -1, num_rows, values.shape[2])
        out[start:stop] = ungrouped.permute(2, 0, 1, 3).flatten(1, 2)
    return out


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, spec: AttentionSpec
) -> torch.Tensor:
    """query [H_kv, G * n, D], keys and values [H_kv, L, D], mask [n, L] (True where visible)."""
    if mask is not None:
        mask = mask.repeat(query.shape[1] // mask.shape[0], 1)
    if not spec.softcap:
        batched = query[None], keys[None], values[None]
        return scaled_dot_product_attention(*batched, attn_mask=mask, scale=spec.scale)[0]
    scores = spec.softcap * torch.tanh((query @ keys.transpose(1, 2)).float() * (spec.scale / spec.softcap))
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).to(values.dtype) @ values


def _mask(num_rows: int, num_keys: int, window: int, device: torch.device) -> torch.Tensor:
    """[num_rows, num_keys]: the rows are the last of the keys' tokens, each sees itself and what came before."""
    behind = torch.arange(num_keys - num_rows, num_keys, device=device)[:, None] - torch.arange(num_keys, device=device)
    return (behind >= 0) & (behind < window) if window else behind >= 0
