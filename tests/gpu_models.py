"""Checks of whole models: greedy tokens against transformers', then speed with random weights in the shape of real ones."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers

from cbatch.config import SamplingParams
from cbatch.engine.block_pool import BlockPool
from cbatch.engine.engine import Engine
from cbatch.engine.scheduler import make_scheduler
from cbatch.engine.start import model_cost
from cbatch.model.attention import attention_specs
from cbatch.model.kv_cache import KVCache
from cbatch.model.runner import Runner
from cbatch.model.substitute import substitute
from cbatch.rows.request import Completion, Request, Row
from cbatch.watch.stats import RunStats
from tests.drive import Given
from tests.gpu_results import Check


def check_models(check: Check) -> None:
    """All checks of this file."""
    for family in ("Llama", "Qwen3", "Gemma3Text", "Mixtral"):
        for depth, graphs in ((0, False), (1, False), (1, True)):
            title = f"greedy {family}, depth {depth}, graphs {'on' if graphs else 'off'}"
            check.run(title, partial(equality, check, family, depth, graphs))
    for name in SHAPES:
        for title, work in Speed(check, name).checks():
            check.run(f"{name}: {title}", work)


def request(number: int, token_ids: list[int], max_tokens: int) -> Request:
    row = Row("check", number, f"row {number}", {}, 2)
    return Request(row, token_ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True), number)


def build(
    check: Check, model: Any, num_blocks: int, seqs: int, budget: int, depth: int, graphs: bool, longest: int
) -> Engine:
    """An engine around a model on the device, fused."""
    specs = attention_specs(model)
    substitute(model, specs, 32, backend=check.backend)
    cache = KVCache(specs, num_blocks, 32, model.dtype, check.device, backend=check.backend)
    runner = Runner(model, cache)
    if graphs and not check.dry and not runner.record(budget, seqs, -(-longest // 32), longest):
        raise AssertionError(f"{runner.notes[-1]}")
    scheduler = make_scheduler("continuous", BlockPool(num_blocks, 32), budget, seqs)
    stats = RunStats(cost=model_cost(model, sum(spec.bytes_per_token(model.dtype) for spec in specs.values())))
    return Engine(runner, scheduler, lambda ids: str(len(ids)), frozenset(), longest, stats, depth)


def tiny(family: str) -> Any:
    kind = getattr(transformers, f"{family}Config")
    settings: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300, "max_position_embeddings": 512,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "moe_intermediate_size": 48,
        "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    if family != "Llama":  # transformers would give its cache a window, though the model has none
        settings["sliding_window"] = 24
    return kind(**settings)


def greedy(model: Any, row: Request) -> list[int]:
    """What transformers itself generates."""
    ids = torch.tensor([row.token_ids], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=row.params.max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


_WANTED: dict[str, dict[int, list[int]]] = {}  # what transformers generates, by family and row


def equality(check: Check, family: str, depth: int, graphs: bool) -> str:
    """Greedy tokens of ragged rows in float32, with a pool that forces preemption, equal to transformers' own."""
    config = tiny(family)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="cbatch", dtype=torch.float32
    )
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
    own = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32
    )
    own.load_state_dict(model.state_dict())
    model, own = model.to(check.device).eval(), own.to(check.device).eval()
    rng, count, num_blocks = random.Random(0), 3 if check.dry else 24, 3 if check.dry else 6
    prompts, longest = (range(26, 33), 6) if check.dry else (range(1, 71), 40)
    requests = [
        request(n, [rng.randrange(3, 300) for _ in range(rng.choice(prompts))], rng.randint(1, longest))
        for n in range(count)
    ]
    engine = build(check, model, num_blocks, 4, 40, depth, graphs, 190)
    done = {completion.row.index: completion for completion in engine.generate(Given(requests))}
    if family not in _WANTED:
        _WANTED[family] = {row.row.index: greedy(own, row) for row in requests}
    wrong = [row for row, tokens in _WANTED[family].items() if list(done[row].outputs[0].token_ids) != tokens]
    if wrong:
        raise AssertionError(f"{len(wrong)} of {count} rows differ: {wrong[:8]}")
    return f"{count} rows equal, {engine.stats.num_preemptions} preemptions"


SHAPES = {
    "8B": {"kind": "Llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256},
    "0.6B": {"kind": "Qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
             "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
}  # fmt: skip


def random_model(check: Check, name: str) -> Any:
    """Random weights in the shape of a real model, on the device."""
    settings = {**SHAPES[name], "max_position_embeddings": 16384}
    if check.dry:
        settings |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                     "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300}  # fmt: skip
    config = getattr(transformers, f"{settings.pop('kind')}Config")(**settings)
    with torch.device(check.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=check.dtype, attn_implementation="cbatch")
    return model.eval()


class Speed:
    """Checks of one model's speed, which share its engine."""

    def __init__(self, check: Check, name: str) -> None:
        self._check, self._name = check, name
        self._engine: Engine | None = None
        self._rows: list[Request] = []  # the ragged workload
        self._rate = 0.0  # tokens a second of the ragged workload

    def checks(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Titles and checks, to be run in this order."""
        yield "load", self._load
        for batch in (1, 2) if self._check.dry else (1, 32, 256):
            yield f"decode at batch {batch}", partial(self._decode, batch)
        for length in (2048, 8192):
            yield f"prefill {length}", partial(self._prefill, length)
        yield "ragged workload", self._ragged
        yield "ragged workload, transformers generate_batch", self._peer
        yield "free", self._free

    def _load(self) -> str:
        check = self._check
        seqs, budget, longest = (4, 64, 256) if check.dry else (256, 8192, 8704)
        model = random_model(check, self._name)
        num_blocks = 64 if check.dry else int(60e9) // (2 * 32 * 8 * 128 * 32 * model.dtype.itemsize)
        self._engine = build(check, model, num_blocks, seqs, budget, 0 if check.dry else 1, True, longest)
        return f"{sum(w.numel() for w in model.parameters()) / 1e9:.2f}B parameters"

    def _generate(self, requests: list[Request]) -> tuple[Engine, float, list[Completion]]:
        engine = self._engine
        assert engine is not None
        engine.stats = replace(RunStats(), cost=engine.stats.cost)
        self._check.sync()
        started_at = time.perf_counter()
        done = list(engine.generate(Given(requests)))
        self._check.sync()
        return engine, time.perf_counter() - started_at, done

    def _decode(self, batch: int) -> str:
        new = 4 if self._check.dry else 128
        self._generate([request(n, prompt(n, 16), new) for n in range(batch)])  # records the graphs
        engine, seconds, _ = self._generate([request(n, prompt(n, 16), new) for n in range(batch)])
        share = engine.stats.bytes / seconds / self._check.bandwidth
        return f"{batch * new / seconds:,.0f} tokens/s, {seconds / new * 1000:.2f} ms a step, {share:.0%} of copy bandwidth"

    def _prefill(self, length: int) -> str:
        length = 40 if self._check.dry else length
        self._generate([request(0, prompt(-1, length), 1)])
        engine, seconds, _ = self._generate([request(0, prompt(length, length), 1)])
        share = engine.stats.flops / seconds / self._check.flops
        return f"{length / seconds:,.0f} tokens/s, {share:.0%} of the matrix rate"

    def _ragged(self) -> str:
        dry = self._check.dry
        rng, count, high, low = random.Random(0), 3 if dry else 256, 8 if dry else 1024, 4 if dry else 100
        self._rows = [
            request(n, prompt(n + 1000, rng.randint(low, high)), rng.randint(low, high)) for n in range(count)
        ]
        for warm in (1, 2, 4, *range(8, 256, 8)) if not dry else ():  # every size of a graph, before the clock
            self._generate([request(n, prompt(5000 + warm + n, 20), 2) for n in range(warm)])
        self._generate([request(n, prompt(9000 + n, low + n), 2) for n in range(1 if dry else 4)])
        engine, seconds, done = self._generate(self._rows)
        self._rate = sum(len(completion.outputs[0].token_ids) for completion in done) / seconds
        idle = 1 - engine.stats.busy_seconds / seconds
        return f"{self._rate:,.0f} tokens/s, host outside of steps {idle:.1%} of the time"

    def _peer(self) -> str:
        self._engine = None
        self._check.free()
        return peer(self._check, random_model(self._check, self._name), self._rows, self._rate)

    def _free(self) -> str:
        self._engine = None
        self._check.free()
        return ""


def prompt(number: int, length: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(10, 290) for _ in range(length)]


def peer(check: Check, model: Any, rows: list[Request], rate: float) -> str:
    """Rows through transformers' own continuous batching; `rate`: tokens a second of cbatch with them."""
    model.set_attn_implementation("sdpa")
    settings = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1024)
    tokens, left, wanted = 0, len(rows), sum(row.params.max_tokens for row in rows)
    limit = max(10.0, min(90.0, check.seconds_left - 15))
    with model.continuous_batching_context_manager(generation_config=settings) as manager:
        started_at = time.perf_counter()
        for row in rows:
            manager.add_request(row.token_ids, max_new_tokens=row.params.max_tokens)
        while left and manager.is_running() and time.perf_counter() - started_at < limit:
            result = manager.get_result(timeout=5)
            if result is not None and result.is_finished():
                if result.error:
                    raise AssertionError(result.error)
                left -= 1
                tokens += len(result.generated_tokens)
        seconds = time.perf_counter() - started_at
    if left:
        raise AssertionError(f"{left} rows unfinished after {seconds:.0f} s, {tokens / seconds:,.0f} tokens/s so far")
    if tokens != wanted:
        raise AssertionError(f"{tokens} tokens instead of {wanted}")
    used = model.config._attn_implementation
    return f"{tokens / seconds:,.0f} tokens/s ({used}); cbatch {rate / (tokens / seconds):.1f} times as fast (bar: 3)"
