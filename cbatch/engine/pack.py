"""The only place where lists become tensors: a schedule -> what the model is given."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch

from cbatch.engine.scheduler import ScheduledChunk
from cbatch.engine.sequence import Sequence
from cbatch.model.batch import Batch, Penalties, SamplingBatch, floats_to_device, to_device


def pack(
    chunks: SequenceOf[ScheduledChunk], block_size: int, device: torch.device, before: SequenceOf[Sequence] = ()
) -> Batch:
    """Lay the tokens of `chunks` out in one flat batch.

    `before`: the sequences that the step before draws tokens for, in its order, if the host does not know these yet.
    """
    drawn = {id(seq): index for index, seq in enumerate(before)}
    carried_to: list[int] = []
    carried_from: list[int] = []
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    outputs: list[int] = []
    spans: list[tuple[int, int, int]] = []
    for chunk in chunks:
        seq, start = chunk.seq, len(input_ids)
        first, stop = seq.num_computed_tokens, seq.num_computed_tokens + chunk.num_tokens
        input_ids += seq.token_ids[first:stop]
        positions += range(first, stop)
        table = seq.block_table
        slots += [table[pos // block_size] * block_size + pos % block_size for pos in range(first, stop)]
        outputs += range(len(input_ids) - chunk.num_outputs, len(input_ids))
        spans.append((start, len(input_ids), stop))
        if stop > seq.num_known_tokens:
            carried_to.append(len(input_ids) - 1)
            carried_from.append(drawn[id(seq)])

    max_blocks = max(-(-seq_len // block_size) for _, _, seq_len in spans)
    tables = [block for chunk in chunks for block in (chunk.seq.block_table + [0] * max_blocks)[:max_blocks]]
    starts, lengths = [0] + [stop for _, stop, _ in spans], [seq_len for _, _, seq_len in spans]
    lists = input_ids, positions, slots, starts, lengths, outputs, carried_to, carried_from, tables
    ids, at, slot_mapping, cu_seqlens_q, seq_lens, logits_indices, to, from_, block_tables = to_device(device, *lists)
    return Batch(
        ids,
        at,
        slot_mapping,
        block_tables.view(len(chunks), max_blocks),
        cu_seqlens_q,
        seq_lens,
        logits_indices,
        tuple(spans),
        (to, from_) if carried_to else None,
    )


def pack_sampling(
    chunks: SequenceOf[ScheduledChunk], eos_token_ids: SequenceOf[int], vocab_size: int, device: torch.device
) -> SamplingBatch:
    """How the next token of each sequence is drawn whose chunk reaches its end, in the order of `chunks`."""
    rows: list[int] = []  # of the step's logits
    num_outputs = 0
    for chunk in chunks:
        num_outputs += chunk.num_outputs
        if chunk.reaches_end:
            rows.append(num_outputs - 1)
    sequences = [chunk.seq for chunk in chunks if chunk.reaches_end]
    params = [seq.params for seq in sequences]
    signed_keys = [(seq.request.random_key + 2**63) % 2**64 - 2**63 for seq in sequences]
    top_ks = [max(0, min(p.top_k, vocab_size)) for p in params]
    positions = [seq.num_completion_tokens for seq in sequences]
    barred_rows, barred_ids = _barred(sequences, eos_token_ids, vocab_size)
    top_k, random_keys, at, logits_rows, *barred = to_device(
        device, top_ks, signed_keys, positions, rows, barred_rows, barred_ids
    )
    temperatures = [p.temperature for p in params]
    temperature, top_p, min_p = floats_to_device(
        device, temperatures, [p.top_p for p in params], [p.min_p for p in params]
    )
    return SamplingBatch(
        temperature,
        top_k,
        top_p,
        min_p,
        random_keys,
        at,
        is_greedy=not any(temperatures),
        barred=(barred[0], barred[1]) if barred_rows else None,
        penalties=_penalties(sequences, device),
        logits_rows=None if num_outputs == len(rows) else logits_rows,
    )


def _barred(
    sequences: SequenceOf[Sequence], eos_token_ids: SequenceOf[int], vocab_size: int
) -> tuple[list[int], list[int]]:
    """Rows and tokens that must not be drawn together: the token would end the row before its `min_tokens`."""
    rows: list[int] = []
    token_ids: list[int] = []
    for row, seq in enumerate(sequences):
        if seq.num_completion_tokens < seq.params.min_tokens:
            ends = [*seq.params.stop_token_ids, *([] if seq.params.ignore_eos else eos_token_ids)]
            token_ids += [token for token in ends if token < vocab_size]
            rows += [row] * (len(token_ids) - len(rows))
    return rows, token_ids


def _penalties(sequences: SequenceOf[Sequence], device: torch.device) -> Penalties | None:
    rows = [row for row, seq in enumerate(sequences) if seq.params.has_penalties]
    if not rows:
        return None
    penalized = [sequences[row] for row in rows]
    params, lengths = [seq.params for seq in penalized], [len(seq.token_ids) for seq in penalized]
    longest = max(lengths)
    history = [token for seq in penalized for token in seq.token_ids + [0] * (longest - len(seq.token_ids))]
    at, tokens, *counts = to_device(device, rows, history, lengths, [seq.num_prompt_tokens for seq in penalized])
    factors = floats_to_device(
        device,
        [p.repetition_penalty for p in params],
        [p.presence_penalty for p in params],
        [p.frequency_penalty for p in params],
    )
    return Penalties(at, tokens.view(len(rows), longest), counts[0], counts[1], *factors)
