"""A model that is exact and costs nothing: what it makes of a token depends on every token before it.

It reads a batch as attention does: the state of a position comes from that of the position before, which is looked up
in a fake KV cache through the block table. One wrong slot, one lost or doubled token, and all that follows differs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch

from cbatch.model.batch import Batch, SamplingBatch, StepOutput


def state_after(state: int, token: int) -> int:
    return zlib.crc32(b"%d %d" % (state, token))


def continuation(token_ids: Sequence[int], vocabulary: int, ended: Callable[[list[int]], bool]) -> list[int]:
    """What the model says after a prompt, until it has `ended`."""
    state, made = 0, list[int]()
    for token in token_ids:
        state = state_after(state, token)
    while not ended(made):
        made.append(state % vocabulary)
        state = state_after(state, made[-1])
    return made


class ChainRunner:
    """In place of cbatch.model.runner.Runner."""

    notes = ()

    def __init__(self, num_slots: int, block_size: int, vocabulary: int) -> None:
        self.device = torch.device("cpu")
        self.model = SimpleNamespace(device=self.device, dtype=torch.float32)
        self.vocab_size = vocabulary
        self._last_tokens = torch.zeros(0, dtype=torch.int64)
        self._cache: list[int | None] = [None] * num_slots
        self._block_size = block_size

    def launch(self, batch: Batch, sampling: SamplingBatch) -> SimpleNamespace:
        if batch.carried is not None:
            where, which = batch.carried
            batch.input_ids.index_copy_(0, where, self._last_tokens[which])
        ids, slots, positions = batch.input_ids.tolist(), batch.slot_mapping.tolist(), batch.positions.tolist()
        states: list[int] = []
        for (start, stop, _), table in zip(batch.spans, batch.block_tables.tolist(), strict=True):
            for index in range(start, stop):
                states.append(state_after(self._state_before(positions[index], table), ids[index]))
                self._cache[slots[index]] = states[-1]
        tokens = torch.tensor([states[index] % self.vocab_size for index in batch.logits_indices.tolist()])
        tokens = tokens.long() if sampling.logits_rows is None else tokens[sampling.logits_rows]
        self._last_tokens = tokens
        return SimpleNamespace(wait=lambda: StepOutput(tokens))

    def _state_before(self, position: int, table: Sequence[int]) -> int:
        if position == 0:
            return 0
        block, offset = divmod(position - 1, self._block_size)
        state = self._cache[table[block] * self._block_size + offset]
        assert state is not None, "read before it was written"
        return state
