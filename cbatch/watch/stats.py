"""Counters of a run. The engine and the job add to them; the progress view and the report read them."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from typing import Any

from cbatch.rows.request import Completion


class Histogram:
    """Durations in seconds, in buckets 5 % wide, so that memory does not grow with their number."""

    _WIDTH = math.log(1.05)

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        self._counts[round(math.log(max(seconds, 1e-6)) / self._WIDTH)] += 1

    def percentile(self, share: float) -> float | None:
        """The duration that `share` (0 to 1) of all do not exceed; None if there is none."""
        left = math.ceil(share * sum(self._counts.values()))
        for bucket, count in sorted(self._counts.items()):
            left -= count
            if left <= 0:
                return math.exp(bucket * self._WIDTH)
        return None

    def __add__(self, other: Histogram) -> Histogram:
        both = Histogram()
        both._counts = self._counts + other._counts
        return both


@dataclass(frozen=True)
class ModelCost:
    """The cost of a forward pass, counted from the shapes of the model. Matrix multiplications only."""

    weight_bytes: int = 0  # read once a step
    flops_per_token: int = 0
    flops_per_sampled: int = 0  # the LM head
    flops_per_attended: int = 0  # for each pair of a query token and a token it sees
    kv_bytes_per_token: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that is about to run, in numbers."""

    num_running: int  # sequences that were admitted and have not ended
    num_waiting: int
    max_num_seqs: int
    kv_cache_use: float  # share of the blocks that are held
    num_preempted: int = 0  # sequences that gave way
    num_active: int = 0  # sequences in the batch, without padding
    num_tokens: int = 0
    num_decode_tokens: int = 0
    num_outputs: int = 0  # tokens that go through the LM head
    num_read_tokens: int = 0  # tokens whose keys and values are read
    num_attended: int = 0  # pairs of a query token and a token it attends to


@dataclass
class EngineStats:
    """Counters of one engine. Times in seconds."""

    cost: ModelCost = field(default_factory=ModelCost)
    first_step_at: float | None = None
    num_prefill_tokens: int = 0  # computed, recomputed ones included
    num_decode_tokens: int = 0
    num_generated_tokens: int = 0  # drawn, also for rows that still run
    num_cached_tokens: int = 0
    num_steps: int = 0
    busy_seconds: float = 0.0  # inside steps
    occupancy: int = 0  # sum over steps of the sequences in the batch; padding is none
    num_preemptions: int = 0
    flops: int = 0
    bytes: int = 0
    num_running: int = 0
    num_waiting: int = 0
    max_num_seqs: int = 0
    kv_cache_use: float = 0.0  # share of the blocks
    kv_cache_use_sum: float = 0.0  # over steps
    kv_cache_use_most: float = 0.0
    ttft: Histogram = field(default_factory=Histogram)
    inter_token: Histogram = field(default_factory=Histogram)

    def count_step(self, step: StepRecord) -> None:
        self.num_running, self.num_waiting, self.max_num_seqs = step.num_running, step.num_waiting, step.max_num_seqs
        self.kv_cache_use = step.kv_cache_use
        self.num_preemptions += step.num_preempted
        if not step.num_tokens:
            return
        if self.first_step_at is None:
            self.first_step_at = time.perf_counter()
        self.num_steps += 1
        self.kv_cache_use_sum += step.kv_cache_use
        self.kv_cache_use_most = max(self.kv_cache_use_most, step.kv_cache_use)
        self.occupancy += step.num_active
        self.num_decode_tokens += step.num_decode_tokens
        self.num_prefill_tokens += step.num_tokens - step.num_decode_tokens
        cost = self.cost
        self.bytes += cost.weight_bytes + step.num_read_tokens * cost.kv_bytes_per_token
        self.flops += step.num_tokens * cost.flops_per_token
        self.flops += step.num_outputs * cost.flops_per_sampled + step.num_attended * cost.flops_per_attended

    def count_first_token(self, seconds: float, num_cached_tokens: int) -> None:
        """Count the first token of a sequence, which came `seconds` after its request."""
        self.num_generated_tokens += 1
        self.ttft.add(seconds)
        self.num_cached_tokens += num_cached_tokens

    def count_next_token(self, seconds: float) -> None:
        """Count a token that came `seconds` after the one before it."""
        self.num_generated_tokens += 1
        self.inter_token.add(seconds)

    def at_rest(self) -> EngineStats:
        """These counters for an engine that has ended: nothing runs or waits in it any more."""
        return replace(self, num_running=0, num_waiting=0, max_num_seqs=0, kv_cache_use=0.0)


@dataclass
class RunStats(EngineStats):
    """Counters of one run: of its rows, and of its engines together."""

    num_replicas: int = 1
    started_at: float = field(default_factory=time.perf_counter)
    first_completion_at: float | None = None
    last_completion_at: float | None = None
    num_rows: int | None = None
    num_rows_earlier: int = 0  # done by an earlier run of the job, failed ones included
    num_rows_earlier_failed: int = 0
    num_rows_ok: int = 0
    num_rows_failed: int = 0
    num_rows_length: int = 0  # ended by max_tokens or the context
    num_prompt_tokens: int = 0  # of finished rows
    num_completion_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    remarks: Counter[str] = field(default_factory=Counter)  # what is worth knowing about rows that were read
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started_at

    @property
    def to_first_step(self) -> float | None:
        return None if self.first_step_at is None else self.first_step_at - self.started_at

    @property
    def generation_seconds(self) -> float:
        """From the start of the first step to the last completion."""
        if self.first_step_at is None or self.last_completion_at is None:
            return 0.0
        return max(0.0, self.last_completion_at - self.first_step_at)

    @property
    def model_seconds(self) -> float:
        """Inside steps; of several engines on average."""
        return self.busy_seconds / self.num_replicas

    @property
    def num_rows_done(self) -> int:
        return self.num_rows_ok + self.num_rows_failed

    def row_seconds(self) -> float:
        """How long a row runs, in seconds, by Little's law: rows at once / rows ended a second. A running row counts half."""
        ended = self.num_rows_ok + self.num_running / 2
        return self.occupancy / self.num_steps * self.busy_seconds / ended if self.num_steps and ended else 0.0

    def gather(self, parts: list[EngineStats]) -> None:
        """Replace the counters of the engine by the sums over engines in other processes."""
        for counter in fields(EngineStats):
            setattr(self, counter.name, self._together(counter.name, [getattr(part, counter.name) for part in parts]))

    def _together(self, name: str, values: list[Any]) -> Any:
        if name == "cost":
            return max(values, key=lambda cost: cost.weight_bytes)  # an engine that has not loaded yet has no cost
        if name == "first_step_at":
            return min((value for value in values if value is not None), default=None)
        if name == "kv_cache_use_most":
            return max(values)
        total = sum(values, start=type(values[0])())
        return total / self.num_replicas if name == "kv_cache_use" else total

    def finished(self, completion: Completion) -> None:
        """Count a row that is done. Called from two threads."""
        with self._lock:
            if error := completion.error:
                self.num_rows_failed += 1
                self.errors[error.kind] += 1
                return
            self.last_completion_at = time.perf_counter()
            self.first_completion_at = self.first_completion_at or self.last_completion_at
            self.num_rows_ok += 1
            self.num_rows_length += any(output.finish_reason == "length" for output in completion.outputs)
            self.num_prompt_tokens += completion.num_prompt_tokens
            self.num_completion_tokens += completion.num_completion_tokens
