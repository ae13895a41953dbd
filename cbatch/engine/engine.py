"""The engine: requests in, completions out, one step after another (schedule, pack, launch, collect)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator

from cbatch.config import SamplingParams
from cbatch.engine.backlog import Backlog
from cbatch.engine.detokenizer import CompletionText, Decode, StopFinder
from cbatch.engine.pack import pack, pack_sampling
from cbatch.engine.protocol import Facts, Requests, Until
from cbatch.engine.scheduler import Schedule, Scheduler
from cbatch.engine.sequence import Sequence
from cbatch.errors import RowError
from cbatch.model.runner import LaunchedStep, Runner
from cbatch.model.sampler import INVALID_LOGITS
from cbatch.rows.request import Completion, Output, Request
from cbatch.watch.stats import EngineStats, StepRecord

_PAUSE = 0.001  # seconds before asking again whether there is something to compute


class _Endless:
    """A deadline that never comes."""

    is_near = is_past = False


_ENDLESS = _Endless()


class Engine:
    """Turns requests into completions, in the order in which they finish."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        decode: Decode,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        stats: EngineStats | None = None,
        depth: int = 0,
        order: str = "input",
    ) -> None:
        """`depth`: launched steps whose tokens the host has not waited for yet, 0 or 1. `order`: input or auto."""
        self.runner, self.scheduler, self.decode, self.eos_token_ids = runner, scheduler, decode, eos_token_ids
        self._eos_in_order = sorted(eos_token_ids)
        self.max_model_len = max_model_len
        self.capacity = scheduler.pool.num_blocks * scheduler.pool.block_size  # tokens that one row may hold
        self.stats = stats or EngineStats()
        self.depth = depth
        self._backlog = Backlog(scheduler.max_num_seqs, self.facts.longest_row, order)
        self._launched: deque[tuple[Schedule, LaunchedStep]] = deque()

    def generate(self, requests: Requests, until: Until = _ENDLESS) -> Generator[Completion, None, None]:
        """Yield a completion for each request, or for those that are finished in time."""
        for completions in self.steps(requests, until):
            yield from completions

    def steps(self, requests: Requests, until: Until) -> Iterator[list[Completion]]:
        """Run to the end, and yield after every step the completions that it brought, which may be none."""
        while not until.is_past:
            yield list(self._take(requests))
            self.scheduler.admits = not until.is_near
            if not self.is_busy and (until.is_near or (requests.ended and not self.scheduler.waiting)):
                return
            yield self.step(more_to_come=not requests.ended)

    @property
    def is_busy(self) -> bool:
        """Whether any sequence runs."""
        return bool(self.scheduler.running or self._launched)

    @property
    def has_unfinished(self) -> bool:
        """Whether a request was taken that has no completion yet."""
        return self.is_busy or bool(self.scheduler.waiting)

    @property
    def facts(self) -> Facts:
        runner, scheduler = self.runner, self.scheduler
        return Facts(
            str(runner.device),
            str(runner.model.dtype).removeprefix("torch."),
            scheduler.max_num_seqs,
            self.capacity,
            self.max_model_len,
            bool(self.eos_token_ids),
            tuple(runner.notes),
        )

    def step(self, more_to_come: bool = False) -> list[Completion]:
        """Decide the batch, launch it, and return the completions of the step launched `depth` steps before.

        With depth 1 the next step is launched while this one computes. Its decodes take their input from the tokens
        drawn on the device, which the host does not know yet; a sequence that turns out to have ended already costs
        one discarded token.
        """
        started_at = time.perf_counter()
        schedule = self.scheduler.schedule(more_to_come)
        self.stats.count_step(step_record(schedule, self.scheduler))
        if schedule.chunks:
            self._launch(schedule)
        elif not self._launched:  # a locked batch that waits for more rows
            time.sleep(_PAUSE)
            return []
        ahead = self.depth if self.depth and schedule.chunks and not self._needs_history() else 0
        completions = []
        while len(self._launched) > ahead:
            completions += self._collect()
        self.stats.busy_seconds += time.perf_counter() - started_at
        return completions

    def _launch(self, schedule: Schedule) -> None:
        """Start a step; if the step before is not collected yet, its tokens are taken over on the device."""
        chunks, device = schedule.chunks, self.runner.device
        before = self._launched[-1][0].sampled if self._launched else ()
        batch = pack(chunks, self.scheduler.pool.block_size, device, before)
        launched = self.runner.launch(batch, pack_sampling(chunks, self._eos_in_order, self.runner.vocab_size, device))
        for chunk in schedule.chunks:
            chunk.seq.launch(chunk.num_tokens, chunk.reaches_end)
        self._launched.append((schedule, launched))

    def _needs_history(self) -> bool:
        """Whether a running row has penalties, whose next draw depends on the token that came last."""
        return any(seq.params.has_penalties for seq in self.scheduler.running)

    def _take(self, requests: Requests) -> Iterator[Completion]:
        """Let requests wait for the scheduler; yield a failed completion for each that is too long to fit."""
        for request in self._backlog.take(requests, len(self.scheduler.waiting), is_idle=not self.has_unfinished):
            try:
                self.scheduler.add(self._sequence(request))
            except RowError as error:
                yield Completion.of(request, Output(error=error.at(request.row.where)))

    def _sequence(self, request: Request) -> Sequence:
        num_prompt_tokens = len(request.token_ids)
        assert num_prompt_tokens < self.max_model_len, "prompts are made to leave room for a token"
        if num_prompt_tokens >= self.capacity:
            raise RowError("kv_cache_too_small", f"the prompt has {num_prompt_tokens} tokens; {self._room()}")
        max_len = min(request.longest(self.max_model_len), self.capacity)
        stop, text_of = request.params.stop, CompletionText(self.decode, request.token_ids)
        stop_finder = StopFinder(text_of, stop, request.params.min_tokens) if stop else None
        return Sequence(request, max_len, stop_finder, added_at=time.perf_counter())

    def _collect(self) -> list[Completion]:
        """Wait for the tokens of the oldest launched step; returns the completions of the sequences that ended with it."""
        schedule, launched = self._launched.popleft()
        token_ids, now = launched.wait().token_ids.tolist(), time.perf_counter()
        completions = []
        for seq, token in zip(schedule.sampled, token_ids, strict=True):
            if not seq.num_unknown_tokens:  # the sequence ended in the step before, when this step was already launched
                continue
            if completion := self._learn(seq, token):
                completions.append(completion)
            self._time_token(seq, now)
        for chunk in schedule.chunks:
            self.scheduler.pool.remember(chunk.seq)
        return completions

    def _time_token(self, seq: Sequence, now: float) -> None:
        if seq.last_token_at is None:
            self.stats.count_first_token(now - seq.added_at, seq.num_cached_tokens or 0)
        else:
            self.stats.count_next_token(now - seq.last_token_at)
        seq.last_token_at = now

    def _learn(self, seq: Sequence, token: int) -> Completion | None:
        """Append a token to a sequence; returns its completion if the token ends it."""
        params = seq.params
        if token == INVALID_LOGITS:
            return self._end(seq, error=self._no_token(params))
        if seq.num_known_tokens - seq.num_prompt_tokens >= params.min_tokens and (
            token in params.stop_token_ids or (token in self.eos_token_ids and not params.ignore_eos)
        ):
            return self._end(seq, "stop")
        seq.learn(token)
        if seq.stop_finder and seq.stop_finder.add(token):
            return self._end(seq, "stop")
        if seq.num_known_tokens < seq.max_len:
            return None
        if seq.max_len < seq.request.longest(self.max_model_len):  # with more memory the row would go on
            return self._end(seq, error=RowError("kv_cache_too_small", f"the row has outgrown it; {self._room()}"))
        return self._end(seq, "length")

    def _no_token(self, params: SamplingParams) -> RowError:
        """Why no token could be drawn."""
        barred = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}
        if params.min_tokens and barred.issuperset(range(self.runner.vocab_size)):
            return RowError("invalid_params", "min_tokens bars every token: all of them are to end the completion")
        return RowError("invalid_logits", "the model's output is not a number")

    def _room(self) -> str:
        return f"the KV cache holds {self.capacity}: see --kv-cache-memory"

    def _end(self, seq: Sequence, finish_reason: str = "error", error: RowError | None = None) -> Completion:
        """Take a sequence that has ended out of the batch; returns its completion."""
        if error and error.kind == "invalid_logits":
            self.scheduler.pool.forget(seq)  # keys and values that are not numbers would spoil other rows
        else:
            self.scheduler.pool.remember(seq)
        seq.end()
        self.scheduler.finish(seq)
        if error:
            error = error.at(seq.request.row.where)
        return self._completion(seq, finish_reason, error)

    def _completion(self, seq: Sequence, finish_reason: str, error: RowError | None) -> Completion:
        token_ids, text_of = seq.completion_ids, CompletionText(self.decode, seq.request.token_ids)
        text = None if error else text_of(token_ids)
        if text is not None and seq.stop_finder and (shorter := seq.stop_finder.cut(text)) is not None:
            text, finish_reason = shorter, "stop"
            token_ids = text_of.fewest(token_ids, text)
        output = Output(text, tuple(token_ids), finish_reason, error)
        return Completion.of(seq.request, output, num_cached_tokens=seq.num_cached_tokens or 0)


def step_record(schedule: Schedule, scheduler: Scheduler) -> StepRecord:
    """Count what a schedule computes; to be called before its step is launched."""
    num_active = num_tokens = num_decode_tokens = num_outputs = num_read_tokens = num_attended = 0
    for chunk in schedule.chunks:
        n, first = chunk.num_tokens, chunk.seq.num_computed_tokens
        num_active += chunk.reaches_end or n < chunk.seq.num_pending_tokens  # a chunk that reaches nothing is padding
        num_tokens += n
        num_decode_tokens += n == 1
        num_outputs += chunk.num_outputs
        num_read_tokens += first + n
        num_attended += n * first + n * (n + 1) // 2
    return StepRecord(
        len(scheduler.running),
        len(scheduler.waiting),
        scheduler.max_num_seqs,
        scheduler.pool.num_used_blocks / scheduler.pool.num_blocks,
        len(schedule.preempted),
        num_active,
        num_tokens,
        num_decode_tokens,
        num_outputs,
        num_read_tokens,
        num_attended,
    )
