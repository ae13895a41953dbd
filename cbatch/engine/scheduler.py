"""The scheduler: decides before every step which tokens of which sequences it computes."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, replace

from cbatch.engine.block_pool import BlockPool
from cbatch.engine.sequence import Sequence

_PRIOR_TOKENS = 1000.0  # the weight of the first guess at how much sequences generate


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The next `num_tokens` of a sequence, and the last `num_outputs` of them whose logits are wanted."""

    seq: Sequence
    num_tokens: int
    num_outputs: int
    reaches_end: bool  # the last of the outputs yields the sequence's next token


@dataclass(frozen=True, slots=True)
class Schedule:
    chunks: tuple[ScheduledChunk, ...]
    preempted: tuple[Sequence, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def sampled(self) -> tuple[Sequence, ...]:
        return tuple(chunk.seq for chunk in self.chunks if chunk.reaches_end)


class Scheduler:
    """Each step spends a token budget on what sequences still owe the KV cache.

    There is no prefill phase and no decode phase: a sequence is `num_pending_tokens` behind, one when it decodes, many
    when it prefills. Decodes are paid first, then prompts in slices, then waiting sequences are admitted.

    A sequence is admitted only when the pool holds all the tokens it has, and what it and the running ones are still
    expected to generate: of the tokens they may, the share that finished sequences did. So blocks run out only where
    many get longer than those before them. Then the youngest running sequence gives way: it frees its blocks,
    goes back to the head of the queue and is recomputed later, generated tokens included. Nothing is admitted until a
    running sequence has finished, so that two sequences never evict each other in turn.
    """

    def __init__(
        self, pool: BlockPool, max_num_batched_tokens: int, max_num_seqs: int, expected_share: float = 1.0
    ) -> None:
        """`expected_share`: the share of their `max_tokens` that sequences are expected to generate, until some have finished."""
        self.pool = pool
        self._generated, self._allowed = expected_share * _PRIOR_TOKENS, _PRIOR_TOKENS
        self.max_num_batched_tokens, self.max_num_seqs = max_num_batched_tokens, max_num_seqs
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.admits = True  # set to False when time runs out: nothing is admitted any more
        self._short_of_blocks = False  # a sequence was preempted, and none has finished since

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def schedule(self, more_to_come: bool = False) -> Schedule:  # noqa: ARG002 for StaticScheduler
        """The next step's chunks. `more_to_come`: the input has not ended."""
        preempted, chunks = self._make_room(), []
        budget = self.max_num_batched_tokens
        decodes = [seq for seq in self.running if seq.num_pending_tokens == 1]
        prefills = [seq for seq in self.running if seq.num_pending_tokens > 1]
        for seq in decodes + prefills:
            if budget:
                chunks.append(_chunk(seq, budget))
                budget -= chunks[-1].num_tokens
        while budget and self.admits and (admitted := self._admit()):
            chunks.append(_chunk(admitted, budget))
            budget -= chunks[-1].num_tokens
        return Schedule(tuple(chunks), tuple(preempted))

    def finish(self, seq: Sequence) -> None:
        """Take a sequence out of the batch; its blocks are free at once. It may have just been preempted."""
        (self.running if seq.block_table else self.waiting).remove(seq)
        self.pool.release(seq)
        self._short_of_blocks = False
        self._generated += seq.num_completion_tokens
        self._allowed += seq.max_len - seq.num_prompt_tokens

    def check(self) -> None:
        """Raise AssertionError if the blocks and the sequences do not agree."""
        assert not any(seq.block_table for seq in self.waiting), "a waiting sequence holds blocks"
        self.pool.check(self.running)

    def _make_room(self) -> list[Sequence]:
        """Let every running sequence hold its tokens; the youngest give way where blocks run out."""
        preempted: list[Sequence] = []
        index = 0
        while index < len(self.running):
            if self.pool.grow(self.running[index]):
                index += 1
                continue
            preempted.append(victim := self.running.pop())
            self.pool.release(victim)
            self.waiting.appendleft(victim)
            self._short_of_blocks = True
        return preempted

    def _admit(self) -> Sequence | None:
        """Move the head of the queue into the batch if there is room."""
        if not self.waiting or len(self.running) == self.max_num_seqs or (self.running and self._short_of_blocks):
            return None
        if self.waiting[0].num_unknown_tokens:  # preempted a moment ago: its last token is still being computed
            return None
        if self.running and self._peak([*self.running, self.waiting[0]]) > self.pool.num_blocks:
            return None
        if not self.pool.admit(self.waiting[0], reserve=len(self.running)):
            return None
        self.running.append(self.waiting.popleft())
        return self.running[-1]

    def _peak(self, sequences: list[Sequence]) -> float:
        """Blocks that these will hold at the worst moment if each generates what is expected of it.

        That is when one of them ends: those that have more to generate have grown by as much (arXiv:2507.10150).
        """
        share = self._generated / self._allowed
        futures = []
        for seq in sequences:
            expected = math.ceil(share * (seq.max_len - seq.num_prompt_tokens)) - seq.num_completion_tokens
            futures.append((max(1, expected), self.pool.blocks_for(len(seq.token_ids))))
        shared = self.pool.num_used_blocks / max(1, sum(len(seq.block_table) for seq in sequences))
        peak = held = 0.0
        for count, (growth, blocks) in enumerate(sorted(futures, reverse=True), 1):
            held += min(1.0, shared) * blocks
            peak = max(peak, held + count * growth / self.pool.block_size)
        return peak


class StaticScheduler(Scheduler):
    """A baseline: a batch is chosen once and locked to its slowest member.

    A finished sequence keeps its place and its blocks, and computes one padding token a step, until the last of the
    batch has finished. Room for `max_tokens` is set aside at the start, so nothing is preempted. A batch starts when
    it is full, when the input has ended, or, with a `window` in seconds (dynamic batching), when its first sequence
    has waited that long. Prompts are not padded to the longest, which flatters this baseline.
    """

    def __init__(
        self, pool: BlockPool, max_num_batched_tokens: int, max_num_seqs: int, window: float = math.inf
    ) -> None:
        super().__init__(pool, max_num_batched_tokens, max_num_seqs)
        self._window = window
        self._filling = True
        self._padding: list[Sequence] = []

    def schedule(self, more_to_come: bool = False) -> Schedule:
        if not self.running:
            self._filling = bool(self.waiting) and (
                len(self.waiting) >= self.max_num_seqs
                or not more_to_come
                or time.perf_counter() - self.waiting[0].added_at >= self._window
            )
        schedule = super().schedule(more_to_come)
        padding = self._padding[: self.max_num_batched_tokens - schedule.num_tokens]
        for seq in padding:
            seq.num_computed_tokens = len(seq.token_ids) - 1
        return replace(schedule, chunks=schedule.chunks + tuple(ScheduledChunk(seq, 1, 0, False) for seq in padding))

    def finish(self, seq: Sequence) -> None:
        seq.num_computed_tokens = len(seq.token_ids)  # it owes nothing more
        self._padding.append(seq)
        if len(self._padding) == len(self.running):
            for padding in self._padding:
                super().finish(padding)
            self._padding = []

    def _admit(self) -> Sequence | None:
        """Fill the batch before its first step is over: one sequence each call, none once it has begun to decode."""
        if not self._filling or not self.waiting or len(self.running) == self.max_num_seqs:
            self._filling = False
            return None
        seq = self.waiting[0]
        if not self.pool.admit(seq, reserve=0, max_tokens=seq.max_len):
            self._filling = False
            return None
        self.running.append(self.waiting.popleft())
        return seq


def make_scheduler(
    kind: str, pool: BlockPool, max_num_batched_tokens: int, max_num_seqs: int, expected_share: float = 1.0
) -> Scheduler:
    """The scheduler of `--scheduling`: continuous, static, or dynamic (a static batch collected for 50 ms)."""
    if kind == "continuous":
        return Scheduler(pool, max_num_batched_tokens, max_num_seqs, expected_share)
    window = {"window": 0.05} if kind == "dynamic" else {}
    return StaticScheduler(pool, max_num_batched_tokens, max_num_seqs, **window)


def _chunk(seq: Sequence, budget: int) -> ScheduledChunk:
    num_tokens = min(seq.num_pending_tokens, budget)
    reaches_end = num_tokens == seq.num_pending_tokens
    return ScheduledChunk(seq, num_tokens, seq.num_outputs(num_tokens, reaches_end), reaches_end)
