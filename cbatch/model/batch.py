"""The only place where lists become tensors."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from cbatch.engine.scheduler import ScheduledChunk
    from cbatch.engine.sequence import Sequence


_SLICE = 32  # tokens of a sequence that one thread attends with at a time


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
    carried: tuple[torch.Tensor, torch.Tensor] | None = None  # input tokens that the step before is sampling: where in
    # `input_ids`, and which of its sampled tokens; [n] each

    @cached_property
    def max_seqlen_q(self) -> int:
        return max(stop - start for start, stop, _ in self.spans)

    @cached_property
    def max_seq_len(self) -> int:
        return max(seq_len for _, _, seq_len in self.spans)

    @cached_property
    def tasks(self) -> torch.Tensor:
        """[n, 3] on the host: a sequence, first and last + 1 of up to `_SLICE` of its tokens in this step.

        Together they are all the tokens; the one that attends to the most comes first.
        """
        tasks = []
        for s, (start, stop, seq_len) in enumerate(self.spans):
            before = seq_len - (stop - start)
            for first in range(0, stop - start, _SLICE):
                last = min(first + _SLICE, stop - start)
                tasks.append(((last - first) * (before + last), s, first, last))
        return torch.tensor([task[1:] for task in sorted(tasks, reverse=True)])


def single(first: int, stop: int, num_blocks: int, block_size: int, device: torch.device) -> Batch:
    """Tokens first:stop of one sequence, all zero, whose blocks lie in the cache from back to front."""
    table = torch.arange(num_blocks - 1, -1, -1, device=device)
    positions = torch.arange(first, stop, device=device)
    count = stop - first
    return Batch(
        torch.zeros_like(positions),
        positions,
        table[positions // block_size] * block_size + positions % block_size,
        table[None],
        torch.tensor([0, count], device=device),
        torch.tensor([stop], device=device),
        torch.arange(count, device=device),
        ((0, count, stop),),
        (),
    )


def nothing(device: torch.device) -> Batch:
    """A step of one padding token, which is written nowhere and belongs to no sequence."""
    (zero, slot, empty) = to_device(device, [0], [-1], [])
    return Batch(zero, zero, slot, empty.view(0, 0), zero, empty, zero, ((0, 1, 1),), ())


def pack(
    chunks: SequenceOf[ScheduledChunk], block_size: int, device: torch.device, before: SequenceOf[Sequence] = ()
) -> Batch:
    """Lay the tokens of `chunks` out in one flat batch. `before`: the sequences that the step before sampled."""
    which = {id(seq): index for index, seq in enumerate(before)}
    carried: list[tuple[int, int]] = []
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
        if stop > seq.num_known_tokens:
            carried.append((len(input_ids) - 1, which[id(seq)]))

    max_blocks = max(-(-seq_len // block_size) for _, _, seq_len in spans)
    sampling = [stop - 1 for chunk, (_, stop, _) in zip(chunks, spans, strict=True) if chunk.reaches_end]
    ids, at, slot_mapping, cu_seqlens_q, seq_lens, logits_indices, where, index, tables = to_device(
        device,
        input_ids,
        positions,
        slots,
        [0] + [stop for _, stop, _ in spans],
        [seq_len for _, _, seq_len in spans],
        sampling,
        [place for place, _ in carried],
        [one for _, one in carried],
        [block for chunk in chunks for block in (chunk.seq.block_table + [0] * max_blocks)[:max_blocks]],
    )
    return Batch(
        ids,
        at,
        slot_mapping,
        tables.view(len(chunks), max_blocks),
        cu_seqlens_q,
        seq_lens,
        logits_indices,
        tuple(spans),
        tuple(chunk.seq for chunk in chunks if chunk.reaches_end),
        (where, index) if carried else None,
    )


def to_device(device: torch.device, *lists: list[int]) -> tuple[torch.Tensor, ...]:
    """Lists of whole numbers as int64 tensors, in a single transfer that the host does not wait for.

    Each begins at a multiple of 16 bytes: Triton compiles a kernel anew for a pointer that does not.
    """
    even = [one if len(one) % 2 == 0 else [*one, 0] for one in lists]
    flat = torch.tensor(list(chain.from_iterable(even)), dtype=torch.int64, pin_memory=device.type == "cuda")
    parts = torch.split(flat.to(device, non_blocking=True), [len(one) for one in even])
    return tuple(part[: len(one)] for part, one in zip(parts, lists, strict=True))
