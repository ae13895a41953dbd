"""The only place where lists become tensors."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from cbatch.engine.scheduler import ScheduledChunk
    from cbatch.engine.sequence import Sequence


@dataclass(frozen=True)
class Batch:
    """T tokens of S sequences, back to back; no pad token.

    Index tensors are int64 on the model's device. `spans` is `cu_seqlens_q` and `seq_lens` on the host.
    """

    input_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    slot_mapping: torch.Tensor  # [T] block * block_size + offset of each token
    block_tables: torch.Tensor  # [S, max_blocks], unused entries 0
    cu_seqlens_q: torch.Tensor  # [S + 1]
    seq_lens: torch.Tensor  # [S] cached tokens, this step's included
    logits_indices: torch.Tensor  # [num_sampled]
    spans: tuple[tuple[int, int, int], ...]  # (first token, last token + 1, seq_len) of each sequence
    sampled: tuple[Sequence, ...]  # those that `logits_indices` points at


def pack(chunks: SequenceOf[ScheduledChunk], block_size: int, device: torch.device) -> Batch:
    """Lay the tokens of `chunks` out in one flat batch."""
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    spans: list[tuple[int, int, int]] = []
    for chunk in chunks:
        seq, start = chunk.seq, len(input_ids)
        first, stop = seq.num_computed_tokens, seq.num_computed_tokens + chunk.num_tokens
        input_ids += seq.token_ids[first:stop]
        positions += range(first, stop)
        table = seq.block_table
        slots += [table[pos // block_size] * block_size + pos % block_size for pos in range(first, stop)]
        spans.append((start, len(input_ids), stop))

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    max_blocks = max(-(-seq_len // block_size) for _, _, seq_len in spans)
    tables = [(chunk.seq.block_table + [0] * max_blocks)[:max_blocks] for chunk in chunks]
    return Batch(
        tensor(input_ids),
        tensor(positions),
        tensor(slots),
        torch.tensor(tables, dtype=torch.int64, device=device),
        tensor([0] + [stop for _, stop, _ in spans]),
        tensor([seq_len for _, _, seq_len in spans]),
        tensor([stop - 1 for chunk, (_, stop, _) in zip(chunks, spans, strict=True) if chunk.reaches_end]),
        tuple(spans),
        tuple(chunk.seq for chunk in chunks if chunk.reaches_end),
    )
