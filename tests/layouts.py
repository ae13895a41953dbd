"""Batches of which only the layout matters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cbatch.model.batch import Batch


def make_layout(tables: torch.Tensor, spans: Sequence[tuple[int, int, int]]) -> Batch:
    """Sequences given as (first token, last token + 1, cached tokens), with blocks [S, max_blocks] of any dtype."""
    empty = torch.empty(0, dtype=torch.int64)
    return Batch(
        input_ids=empty,
        positions=empty,
        slot_mapping=empty,
        block_tables=tables,
        cu_seqlens_q=torch.tensor([0, *(stop for _, stop, _ in spans)]).to(tables),
        seq_lens=torch.tensor([seq_len for _, _, seq_len in spans]).to(tables),
        logits_indices=empty,
        spans=tuple(spans),
    )
