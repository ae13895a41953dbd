from __future__ import annotations

import random
import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from cbatch.config import SamplingParams
from cbatch.engine.engine import Engine
from cbatch.rows.request import Request
from tests.drive import Finished, Given, finished, make_engine, make_request, run, spell, twins
from tests.tiny import VOCAB_SIZE, generate, make_config

ROUTED, OWN = twins(make_config())
RNG = random.Random(11)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def outcome(completion: Finished) -> tuple[Any, ...]:
    return completion.token_ids, completion.text, completion.finish_reason, completion.num_prompt_tokens


def one(request: Request, **settings: Any) -> Finished:
    [completion] = run(make_engine(ROUTED, **settings), [request])
    return completion


def greedy(token_ids: list[int], count: int) -> list[int]:
    return generate(OWN, token_ids, count)


# What unused memory holds


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_unused_slots_of_the_cache_may_hold_anything(prefix_caching: bool) -> None:
    requests = [make_request(n, prompt(length), max_tokens=9) for n, length in enumerate((1, 3, 4, 5, 11) * 4)]
    outcomes = []
    for fill in (0.0, float("nan"), float("inf"), float("-inf"), 1e4):
        engine = make_engine(ROUTED, num_blocks=18, fill=fill, prefix_caching=prefix_caching)
        outcomes.append([outcome(completion) for completion in run(engine, requests)])
        assert engine.stats.num_preemptions > 0
    assert outcomes[1:] == outcomes[:1] * 4
    assert [list(tokens) for tokens, *_ in outcomes[0]] == [greedy(r.token_ids, 9) for r in requests]


# Preemption


def test_rows_under_pressure_equal_rows_with_ample_memory_and_single_rows() -> None:
    requests = [make_request(n, prompt(RNG.randint(10, 50), n), max_tokens=32) for n in range(12)]
    ample = make_engine(ROUTED, num_blocks=400, budget=40)
    expected = [outcome(completion) for completion in run(ample, requests)]
    assert ample.stats.num_preemptions == 0
    for num_blocks, budget in ((24, 40), (24, 7), (60, 90)):
        tight = make_engine(ROUTED, num_blocks=num_blocks, budget=budget)
        assert [outcome(completion) for completion in run(tight, requests)] == expected
        assert tight.stats.num_preemptions > 0
    for request, (tokens, *_) in zip(requests, expected, strict=True):
        assert list(tokens) == greedy(request.token_ids, 32)


def test_a_sequence_evicted_again_and_again_keeps_its_tokens() -> None:
    """Also in the middle of a chunked prefill, before it has a single one."""
    engine = make_engine(ROUTED, num_blocks=17, block_size=2, budget=8, prefix_caching=False)
    sizes = [(18, 4), (12, 16), (20, 9), (21, 11), (3, 11), (1, 16), (16, 6), (18, 5), (7, 13), (16, 10)]
    requests = [make_request(n, prompt(length, n), max_tokens=most) for n, (length, most) in enumerate(sizes)]
    victims: list[tuple[int, int, int]] = []
    schedule = engine.scheduler.schedule

    def spy(more_to_come: bool = False) -> Any:
        computed = {id(seq): seq.num_computed_tokens for seq in engine.scheduler.running}
        result = schedule(more_to_come)
        victims.extend((s.request.row.index, s.num_completion_tokens, computed[id(s)]) for s in result.preempted)
        return result

    engine.scheduler.schedule = spy  # type: ignore[method-assign]
    for request, completion in zip(requests, run(engine, requests), strict=True):
        assert list(completion.token_ids) == greedy(request.token_ids, request.params.max_tokens)
    rows = [row for row, *_ in victims]
    assert max(map(rows.count, rows)) >= 2, "evicted twice"
    assert any(count == 0 and computed > 0 for _, count, computed in victims), "evicted during its prefill"
    assert any(count > 0 for _, count, _ in victims), "evicted with tokens"


def test_sampled_rows_survive_preemption() -> None:
    requests = [
        make_request(
            n, prompt(20, n), random_key=n, temperature=0.8, max_tokens=20, frequency_penalty=0.5, min_tokens=3
        )
        for n in range(10)
    ]
    ample, tight = make_engine(ROUTED, num_blocks=400, eos={7, 9}), make_engine(ROUTED, num_blocks=22, eos={7, 9})
    assert [*map(outcome, run(ample, requests))] == [*map(outcome, run(tight, requests))]
    assert tight.stats.num_preemptions > ample.stats.num_preemptions == 0


# What can't fit


@pytest.mark.parametrize("kind", ["continuous", "static", "dynamic"])
def test_a_prompt_larger_than_the_pool_costs_only_its_own_row(kind: str) -> None:
    requests = [make_request(n, prompt(42 if n == 1 else 5, n), max_tokens=4) for n in range(22)]
    completions = run(make_engine(ROUTED, num_blocks=8, kind=kind), requests)
    assert len(completions) == 22
    for request, completion in zip(requests, completions, strict=True):
        if request.row.index == 1:
            assert completion.error is not None
            assert (completion.error.kind, completion.text, completion.token_ids) == ("kv_cache_too_small", None, ())
            assert "row 1: the prompt has 42 tokens" in str(completion.error)
            assert "holds 32" in str(completion.error)
        else:
            assert list(completion.token_ids) == greedy(request.token_ids, 4)


@pytest.mark.parametrize("kind", ["continuous", "static", "dynamic"])
def test_a_completion_that_outgrows_the_pool_is_an_error_and_not_cut_short(kind: str) -> None:
    """Less memory may cost a row, which can be tried again; it never changes one."""
    completion = one(make_request(0, prompt(20), max_tokens=100), num_blocks=8, kind=kind)
    assert completion.error is not None
    assert (completion.error.kind, completion.text) == ("kv_cache_too_small", None)
    fits = one(make_request(0, prompt(20), max_tokens=12), num_blocks=8, kind=kind)
    assert (fits.finish_reason, list(fits.token_ids)) == ("length", greedy(prompt(20), 12))


@pytest.mark.parametrize("kind", ["continuous", "static", "dynamic"])
def test_two_rows_of_60_percent_of_the_pool_both_complete(kind: str) -> None:
    requests = [make_request(n, prompt(10, n), max_tokens=38) for n in range(2)]
    engine = make_engine(ROUTED, num_blocks=20, kind=kind)
    for request, completion in zip(requests, run(engine, requests), strict=True):
        assert list(completion.token_ids) == greedy(request.token_ids, 38)
    assert engine.stats.num_preemptions <= 1


# Where a completion ends


def test_every_end_of_sequence_token_ends_a_row() -> None:
    tokens = greedy(prompt(6), 20)
    place = next(n for n in range(3, 20) if tokens[n] not in tokens[:n])
    for eos in ({tokens[place]}, {1, tokens[place]}, {tokens[place], tokens[-1]} - set(tokens[:place])):
        completion = one(make_request(0, prompt(6), max_tokens=20), eos=eos)
        assert list(completion.token_ids) == tokens[:place]
        assert completion.text == spell(tokens[:place])
        assert completion.finish_reason == "stop"


def test_ignore_eos_disables_all_of_them_but_no_stop_token() -> None:
    tokens = greedy(prompt(6), 20)
    ignoring = one(make_request(0, prompt(6), max_tokens=20, ignore_eos=True), eos=set(tokens))
    assert list(ignoring.token_ids) == tokens
    assert ignoring.finish_reason == "length"
    both = one(make_request(0, prompt(6), max_tokens=20, ignore_eos=True, stop_token_ids=tokens[4]), eos=set(tokens))
    assert list(both.token_ids) == tokens[: tokens.index(tokens[4])]
    assert both.finish_reason == "stop"


def test_a_row_without_any_end_token_runs_to_its_length() -> None:
    completion = one(make_request(0, prompt(6), max_tokens=20), eos=())
    assert (len(completion.token_ids), completion.finish_reason) == (20, "length")


def test_an_end_as_the_very_first_token_gives_an_empty_completion() -> None:
    completion = one(make_request(0, prompt(6), max_tokens=20), eos={greedy(prompt(6), 1)[0]})
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("", (), "stop")


def test_an_end_token_in_the_last_place_is_a_stop() -> None:
    tokens = greedy(prompt(6), 20)
    place = next(n for n in range(3, 20) if tokens[n] not in tokens[:n])
    completion = one(make_request(0, prompt(6), max_tokens=place + 1), eos={tokens[place]})
    assert (list(completion.token_ids), completion.finish_reason) == (tokens[:place], "stop")


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 5, 10, 30])
def test_no_row_ends_before_min_tokens_except_by_its_length(min_tokens: int) -> None:
    eos = set(range(0, VOCAB_SIZE, 2))
    requests = [make_request(n, prompt(5, n), max_tokens=12, min_tokens=min_tokens) for n in range(6)]
    for completion in run(make_engine(ROUTED, eos=eos), requests):
        assert len(completion.token_ids) >= min(min_tokens, 12)
        assert not eos & set(completion.token_ids[:min_tokens])


def test_a_stop_text_is_cut_off_and_may_span_tokens() -> None:
    tokens = greedy(prompt(6), 20)
    text = spell(tokens)
    place = next(n for n in range(2, 20) if text.find(text[n : n + 2]) == n)
    completion = one(make_request(0, prompt(6), max_tokens=20, stop=[text[place : place + 2]]))
    assert (completion.text, completion.finish_reason) == (text[:place], "stop")
    assert list(completion.token_ids) == tokens[:place]
    last = one(make_request(0, prompt(6), max_tokens=place + 2, stop=[text[place : place + 2]]))
    assert (last.text, last.finish_reason) == (text[:place], "stop")


# The context


@pytest.mark.parametrize("num_prompt", [1, 13, 14, 15])
@pytest.mark.parametrize("max_tokens", [1, 5, 10**9, 10**30])
def test_completions_are_clamped_to_the_context(num_prompt: int, max_tokens: int) -> None:
    completion = one(make_request(0, prompt(num_prompt), max_tokens=max_tokens), max_model_len=16)
    assert completion.finish_reason == "length"
    assert list(completion.token_ids) == greedy(prompt(num_prompt), min(max_tokens, 16 - num_prompt))


def test_the_whole_context_of_a_learned_position_table_can_be_used() -> None:
    from transformers import GPT2Config

    config = make_config(GPT2Config, n_embd=32, n_layer=2, n_head=4, n_positions=16, max_position_embeddings=16)
    routed, own = twins(config)
    for length in (1, 14, 15):
        [completion] = run(make_engine(routed, max_model_len=16), [make_request(0, prompt(length), max_tokens=100)])
        assert list(completion.token_ids) == generate(own, prompt(length), 16 - length)


@pytest.mark.parametrize("wrong", [0, -1, "20", True, 1.5])
def test_token_budgets_that_make_no_sense_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        SamplingParams(max_tokens=wrong)


# Chunks and batches


@pytest.mark.parametrize("kind", ["continuous", "static", "dynamic"])
@pytest.mark.parametrize("budget", [1, 5, 16, 512])
def test_slices_of_a_prompt_change_nothing(kind: str, budget: int) -> None:
    settings = [(5, 40), (16, 2), (17, 1), (48, 40), (90, 2), (200, 1)]
    requests = [make_request(n, prompt(length), max_tokens=most) for n, (length, most) in enumerate(settings)]
    for ordered in (requests, requests[::-1]):
        engine = make_engine(ROUTED, num_blocks=150, budget=budget, kind=kind)
        for request, completion in zip(requests, run(engine, ordered), strict=True):
            assert list(completion.token_ids) == greedy(request.token_ids, request.params.max_tokens)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_padding_of_a_locked_batch_changes_nothing(kind: str, block_size: int, prefix_caching: bool) -> None:
    requests = [make_request(n, prompt(4 + n % 3), max_tokens=1 + 7 * n % 13) for n in range(20)]
    engine = make_engine(ROUTED, 200, block_size, kind=kind, prefix_caching=prefix_caching, max_num_seqs=4, eos={5, 17})
    free = make_engine(ROUTED, 200, block_size, eos={5, 17})
    assert [*map(outcome, run(engine, requests))] == [*map(outcome, run(free, requests))]


def test_completions_come_in_the_order_in_which_they_finish() -> None:
    requests = [make_request(n, prompt(5, n), max_tokens=20 - 3 * n) for n in range(6)]
    rows = [completion.row.index for completion in make_engine(ROUTED).generate(Given(requests))]
    assert rows == [5, 4, 3, 2, 1, 0]


# Prefix caching


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
def test_repeated_prompts_on_block_edges_give_the_same_tokens(length: int) -> None:
    others = [make_request(n, prompt(7, n), max_tokens=6) for n in range(10, 14)]
    again = [make_request(n, prompt(length), max_tokens=6) for n in range(4)]
    expected = greedy(prompt(length), 6)
    for num_blocks, max_num_seqs in ((64, 1), (64, 8), (5, 2)):
        for caching in (True, False):
            engine = make_engine(ROUTED, num_blocks, max_num_seqs=max_num_seqs, prefix_caching=caching)
            completions = {c.row.index: c for c in run(engine, [*again[:3], *others, again[3]])}
            assert all(list(completions[n].token_ids) == expected for n in range(4))
            hits = [completions[n].num_cached_tokens for n in range(4)]
            assert all(hit <= length - 1 for hit in hits)
            if not caching:
                assert hits == [0] * 4
            elif (num_blocks, max_num_seqs) == (64, 1):
                assert hits == [0] + [(length - 1) // 4 * 4] * 3


def test_a_shared_prefix_is_computed_once_and_generated_tokens_are_found_too() -> None:
    first = make_request(0, prompt(16), max_tokens=9)
    longer = [*prompt(16), *greedy(prompt(16), 9), 5]
    engine = make_engine(ROUTED, max_num_seqs=1)
    completions = run(
        engine, [first, make_request(1, longer, max_tokens=5), make_request(2, longer[:12], max_tokens=3)]
    )
    assert [c.num_cached_tokens for c in completions] == [0, 24, 8]
    assert list(completions[1].token_ids) == greedy(longer, 5)
    assert list(completions[2].token_ids) == greedy(longer[:12], 3)
    assert engine.stats.num_cached_tokens == 32


# Faults inside


def test_a_row_whose_logits_are_not_numbers_fails_alone() -> None:
    from cbatch.model.attention import NAME
    from tests.tiny import make_model

    broken = make_model(make_config(), NAME)
    with torch.no_grad():
        broken.get_input_embeddings().weight[299] = torch.nan
    requests = [make_request(n, [5, 299 if n == 2 else 6, 7 + n], max_tokens=6) for n in range(5)]
    completions = run(make_engine(broken), requests)
    assert [c.error.kind if c.error else None for c in completions] == [None, None, "invalid_logits", None, None]
    assert completions[2].text is None
    for completion in completions[:2] + completions[3:]:
        assert list(completion.token_ids) == greedy([5, 6, 7 + completion.row.index], 6)


@pytest.mark.parametrize("kind", ["continuous", "static"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("budget", [3, 4, 32])
def test_nothing_of_a_row_that_is_not_a_number_is_found_again(kind: str, depth: int, budget: int) -> None:
    """An overflow of one moment: later rows with the same beginning are completed as in a fresh engine."""
    model, same = twins(make_config())[0], prompt(14)
    engine = make_engine(model, budget=budget, kind=kind)
    engine.depth = depth
    embedding = model.get_input_embeddings().weight
    before = embedding[same[2]].clone()
    with torch.no_grad():
        embedding[same[2]] = torch.nan
        [failed] = run(engine, [make_request(0, same, max_tokens=5)])
        embedding[same[2]] = before
    assert failed.error is not None
    assert failed.error.kind == "invalid_logits"
    requests = [make_request(n, [*same, 7 + n], max_tokens=5) for n in range(1, 4)]
    later = run(engine, requests)
    assert [list(completion.token_ids) for completion in later] == [greedy(r.token_ids, 5) for r in requests]
    assert run(engine, [make_request(9, same, max_tokens=5)])[0].num_cached_tokens == 12


def test_a_row_that_is_not_a_number_after_a_good_beginning_costs_no_other_row() -> None:
    """It decodes beside others that hold the same blocks; afterwards these are computed anew."""
    model, same = twins(make_config())[0], prompt(14)
    engine, embedding = make_engine(model), model.get_input_embeddings().weight
    assert run(engine, [make_request(0, same, max_tokens=5)])[0].error is None
    with torch.no_grad():
        before, embedding[299] = embedding[299].clone(), torch.nan
        rows = run(engine, [make_request(1, [*same, 5], max_tokens=5), make_request(2, [*same, 299], max_tokens=5)])
        embedding[299] = before
    assert [row.error and row.error.kind for row in rows] == [None, "invalid_logits"]
    [after] = run(engine, [make_request(3, [*same, 299], max_tokens=5)])
    assert list(after.token_ids) == greedy([*same, 299], 5)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_row_whose_own_settings_leave_no_token_is_told_so(temperature: float) -> None:
    everything = list(range(VOCAB_SIZE))
    settings: dict[str, Any] = {"max_tokens": 5, "min_tokens": 1, "temperature": temperature}
    completion = one(make_request(0, prompt(6), stop_token_ids=everything, **settings))
    assert completion.error is not None
    assert completion.error.kind == "invalid_params"
    assert "min_tokens bars every token" in str(completion.error)
    most = one(make_request(0, prompt(6), stop_token_ids=everything[:-1], **settings))
    assert (most.error, most.token_ids) == (None, (VOCAB_SIZE - 1,))


class Moment:
    """Near once `near` rows are seen, past once `past` are."""

    def __init__(self, near: int = 100, past: int = 100) -> None:
        self.near, self.past = near, past
        self.seen: list[int] = []

    @property
    def is_near(self) -> bool:
        return len(self.seen) >= self.near

    @property
    def is_past(self) -> bool:
        return len(self.seen) >= self.past

    def run(self, engine: Engine, requests: Iterable[Request]) -> list[int]:
        for completion in engine.generate(Given(requests), self):
            self.seen.append(completion.row.index)
        return self.seen


def test_a_moment_that_is_past_ends_the_run_after_the_step_that_runs() -> None:
    requests = [make_request(n, prompt(5, n), max_tokens=3 + n) for n in range(5)]
    assert Moment(past=1).run(make_engine(ROUTED), requests) == [0]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", ["continuous", "static"])
def test_a_moment_that_is_near_lets_what_runs_end_and_nothing_start(kind: str, depth: int) -> None:
    requests = [make_request(n, prompt(5, n), max_tokens=3 + n) for n in range(9)]
    engine = make_engine(ROUTED, max_num_seqs=3, kind=kind)
    engine.depth = depth
    assert Moment(near=1).run(engine, requests) == [0, 1, 2]
    assert not engine.is_busy
    assert engine.scheduler.waiting


class Slowly:
    """Requests that come one for each second call, as from a slow pipe."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self.left, self.calls, self.waits = list(requests), 0, 0
        self.ended = False

    def take(self, wait: bool) -> Request | None:
        self.calls += 1
        self.waits += wait
        if self.calls % 2:
            return None
        if not self.left:
            self.ended = True
            return None
        return self.left.pop(0)


@pytest.mark.parametrize("kind", ["continuous", "static", "dynamic"])
def test_requests_may_come_slowly(kind: str) -> None:
    requests = [make_request(n, prompt(5, n), max_tokens=1 + n) for n in range(7)]
    source = Slowly(requests)
    completions = list(make_engine(ROUTED, kind=kind, max_num_seqs=3).generate(source))
    assert sorted(c.row.index for c in completions) == list(range(7))


class Late:
    """One request at once, and the end of the input after a tenth of a second."""

    def __init__(self, request: Request) -> None:
        self.left, self.calls, self.ended, self.end = [request], 0, False, time.monotonic() + 0.1

    def take(self, wait: bool) -> Request | None:  # noqa: ARG002
        self.calls += 1
        if self.left:
            return self.left.pop()
        self.ended = time.monotonic() > self.end
        return None


def test_a_batch_that_waits_for_more_rows_does_not_spin() -> None:
    source = Late(make_request(0, prompt(5), max_tokens=2))
    [completion] = map(finished, make_engine(ROUTED, kind="static").generate(source))
    assert completion.finish_reason == "length"
    assert source.calls < 500


def test_no_requests_give_no_completions() -> None:
    assert run(make_engine(ROUTED), []) == []


def test_counts_of_a_run_agree_with_its_rows() -> None:
    requests = [make_request(n, prompt(6, n), max_tokens=5) for n in range(6)]
    engine = make_engine(ROUTED, budget=1000, prefix_caching=False)
    completions = run(engine, requests)
    stats = engine.stats
    assert stats.num_prefill_tokens == sum(c.num_prompt_tokens for c in completions) == 36
    assert stats.num_decode_tokens == sum(len(c.token_ids) - 1 for c in completions) == 24
    assert stats.num_steps == 5
    assert stats.occupancy == 30
    assert engine.stats.ttft.percentile(0.5) is not None
