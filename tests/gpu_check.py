"""Proves and measures the GPU path; under 8 minutes on one GPU, from a bare checkout, without network.

    PYTHONPATH=. python -m tests.gpu_check [--json PATH] [--only NAME]
    PYTHONPATH=. python -m tests.gpu_check --dry-run       everything from end to end on a CPU: interpreter, tiny shapes

Kernels against their float64 reference on real shapes; greedy equality with transformers on tiny models, with and without
CUDA graphs and running ahead; then speed, with random weights in the shape of Llama-3.1-8B and Qwen3-0.6B, against the
copy bandwidth and the matrix rate measured in the same run. One failure does not hide the rest: each check is a row of
the table that is printed last.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if "--dry-run" in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from cbatch.config import SamplingParams
from cbatch.engine.block_pool import BlockPool
from cbatch.engine.engine import Engine
from cbatch.engine.scheduler import make_scheduler
from cbatch.engine.start import model_cost
from cbatch.kernels import reference
from cbatch.model import ops
from cbatch.model.attention import layer_shapes
from cbatch.model.fused import substitute
from cbatch.model.kv_cache import KVCache
from cbatch.model.runner import Runner
from cbatch.rows.request import Completion, Request, Row
from cbatch.watch.stats import RunStats

_BUDGET_SECONDS = 470  # nothing new is begun after this


@dataclass
class Result:
    name: str
    ok: bool
    figure: str = ""
    error: str = ""
    seconds: float = 0.0


class Check:
    """The settings of this run and what it has found."""

    def __init__(self, dry: bool, only: str, path: str | None) -> None:
        self.dry, self.only, self.path = dry, only, path
        self.device = torch.device("cpu" if dry else "cuda")
        self.dtype = torch.float32 if dry else torch.bfloat16
        self.results: list[Result] = []
        self.started_at = time.perf_counter()
        self.bandwidth = self.flops = 0.0

    def run(self, name: str, work: Callable[[], str]) -> None:
        """Do one check; its return is what it measured."""
        late = self.seconds_left < 0
        if self.only not in name or late:
            if late:
                self.results.append(Result(name, False, error="not begun: out of time"))
            return
        started_at = time.perf_counter()
        try:
            result = Result(name, True, work())
        except Exception as error:  # the table tells; the others go on
            traceback.print_exc()
            result = Result(
                name, False, error=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
            self.free()
        result.seconds = time.perf_counter() - started_at
        self.results.append(result)
        print(
            f"{'ok  ' if result.ok else 'FAIL'} {result.seconds:6.1f} s  {name}: {result.figure or result.error}",
            flush=True,
        )

        self.save()

    def save(self) -> None:
        """Write what there is, so that a run that is killed leaves it."""
        if self.path:
            content = json.dumps({"dry_run": self.dry, "results": [asdict(one) for one in self.results]}, indent=1)
            Path(self.path).write_text(content)

    def free(self) -> None:
        """Give back the memory of what is no longer used; engines and graphs hold each other in cycles."""
        gc.collect()
        if not self.dry:
            with suppress(Exception):  # after a fault of the device nothing works any more
                torch.cuda.empty_cache()

    @property
    def seconds_left(self) -> float:
        return _BUDGET_SECONDS - (time.perf_counter() - self.started_at)

    def sync(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], repeat: int = 20) -> float:
        """Median seconds of a call on the device, after warming up."""
        if self.dry:
            started_at = time.perf_counter()
            work()
            return time.perf_counter() - started_at
        for _ in range(3):
            work()
        times = []
        for _ in range(repeat):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        return sorted(times)[len(times) // 2]


# Ceilings


def ceilings(check: Check) -> str:
    size = 1 << (16 if check.dry else 31)
    source = torch.ones(size // 4, device=check.device)
    target = torch.empty_like(source)
    check.bandwidth = 2 * size / check.seconds(lambda: target.copy_(source))
    side = 64 if check.dry else 8192
    a, b = (torch.randn(side, side, device=check.device).to(check.dtype) for _ in range(2))
    check.flops = 2 * side**3 / check.seconds(lambda: a @ b)
    return f"copy {check.bandwidth / 1e12:.3f} TB/s, matrices {check.flops / 1e12:.1f} TFLOP/s"


# Kernels


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def expect(value: float, limit: float) -> str:
    if not value <= limit:
        raise AssertionError(f"off by {value:.2e}, more than {limit:.0e}")
    return f"off by {value:.1e}"


def paged(check: Check, lengths: list[tuple[int, int]], kv_heads: int, size: int) -> tuple[torch.Tensor, ...]:
    """Caches and index tensors for sequences of (cached, new) tokens; NaN where nothing is stored."""
    totals = [before + new for before, new in lengths]
    blocks = [-(-total // 32) for total in totals]
    shape = (sum(blocks) + 1, 32, kv_heads, size)
    k, v = (torch.randn(shape, device=check.device).to(check.dtype) for _ in range(2))
    order = torch.randperm(sum(blocks)).tolist()
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int64)
    for s, total in enumerate(totals):
        for index in range(blocks[s]):
            tables[s, index] = order.pop()
        k[tables[s, blocks[s] - 1], total - (blocks[s] - 1) * 32 :] = torch.nan
        v[tables[s, blocks[s] - 1], total - (blocks[s] - 1) * 32 :] = torch.nan
    starts = torch.tensor([0, *(new for _, new in lengths)]).cumsum(0)
    return k, v, tables.to(check.device), starts.to(check.device), torch.tensor(totals, device=check.device)


def attention(
    check: Check,
    lengths: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    size: int,
    fp8: bool = False,
    **settings: Any,
) -> str:
    from cbatch.kernels.gpu.paged_attention import paged_attention

    k, v, tables, starts, totals = paged(check, lengths, kv_heads, size)
    if fp8:
        k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    query = torch.randn(int(starts[-1]), heads, size, device=check.device).to(check.dtype)
    longest, longest_kv = max(new for _, new in lengths), int(totals.max())
    out = paged_attention(query, k, v, tables, starts, totals, longest, longest_kv, size**-0.5, **settings)
    k, v, worst = k.to(check.dtype), v.to(check.dtype), 0.0
    for number in range(len(lengths))[-4:]:
        first, stop = int(starts[number]), int(starts[number + 1])
        ends = {min(first + 2, stop), stop}  # the first and the last rows; the reference is slow
        for end in ends:
            keep = slice(max(first, end - 2), end)
            total = totals[number : number + 1] - (stop - end)
            bounds = torch.tensor([0, keep.stop - keep.start])
            want = reference.paged_attention(
                query[keep], k, v, tables[number : number + 1], bounds, total, size**-0.5, **settings
            )
            worst = max(worst, error(out[keep], want))
    return expect(worst, 1e-5 if check.dtype == torch.float32 else 1e-2)


def decode_bandwidth(check: Check, cache: torch.dtype) -> str:
    from cbatch.kernels.gpu.paged_attention import paged_attention

    seqs, context = (2, 40) if check.dry else (64, 4096)
    k, v, tables, starts, totals = paged(check, [(context - 1, 1)] * seqs, 8, 128)
    k, v = k.to(cache), v.to(cache)
    query = torch.randn(seqs, 32, 128, device=check.device).to(check.dtype)
    taken = check.seconds(lambda: paged_attention(query, k, v, tables, starts, totals, 1, context, 128**-0.5))
    rate = seqs * context * 2 * 8 * 128 * cache.itemsize / taken
    return f"{rate / 1e12:.3f} TB/s, {rate / check.bandwidth:.0%} of copy (bar: 85 %)"


def small_kernels(check: Check) -> str:
    rows, width = (3, 96) if check.dry else (256, 4096)
    x, weight, residual = (
        torch.randn(s, device=check.device).to(check.dtype) for s in ((rows, width), (width,), (rows, width))
    )
    mine, theirs = residual.clone(), residual.clone()
    limit = 1e-5 if check.dtype == torch.float32 else 1e-2
    expect(error(ops.rms_norm(x, weight, 1e-5, mine), reference.rms_norm(x, weight, 1e-5, theirs)), limit)
    gate, up = x.double().chunk(2, -1)
    expect(error(ops.gated(x, "silu"), torch.nn.functional.silu(gate) * up), limit)
    tokens, experts, inner = (7, 4, 24) if check.dry else (64, 8, 768)
    gate_up = torch.randn(experts, 2 * inner, width, device=check.device).to(check.dtype) / width**0.5
    down = torch.randn(experts, width, inner, device=check.device).to(check.dtype) / inner**0.5
    weights, topk_ids = torch.rand(tokens, experts, device=check.device).topk(2)
    some = torch.randn(tokens, width, device=check.device).to(check.dtype)
    picked = slice(0, 4)
    out = ops.experts(some, gate_up, down, topk_ids, weights, False)
    want = reference.experts(some[picked], gate_up, down, topk_ids[picked], weights[picked])
    expect(error(out[picked], want), limit)
    return "rms_norm, silu_mul and experts agree"


def rope_and_store(check: Check, cache: torch.dtype) -> str:
    heads, kv_heads, size, tokens = (4, 2, 16, 6) if check.dry else (32, 8, 128, 64)
    query, key, value = (
        torch.randn(tokens, h, size, device=check.device).to(check.dtype) for h in (heads, kv_heads, kv_heads)
    )
    angles = torch.rand(tokens, size // 2, device=check.device)
    cos, sin = (torch.cat([f(angles)] * 2, -1).to(check.dtype) for f in (torch.cos, torch.sin))
    slots = torch.randperm(4 * 32, device=check.device)[:tokens]
    slots[0] = -1
    norms = (*(torch.randn(size, device=check.device).to(check.dtype) for _ in range(2)), 1e-6, 0.0)
    caches = [
        [torch.zeros(4, 32, kv_heads, size, device=check.device, dtype=cache) for _ in range(2)] for _ in range(2)
    ]
    expected = query.clone()
    ops.rope_store_kv(query, key, value, *caches[0], slots, cos, sin, *norms)
    reference.rope_store_kv(expected, key, value, *caches[1], slots, cos, sin, *norms)
    limit = 1e-5 if check.dtype == torch.float32 else 1e-2
    expect(error(query, expected), limit)
    worst = max(error(a, b) for a, b in zip(*caches, strict=True))
    return expect(worst, 2e-2 if cache == torch.float8_e4m3fn else limit)


def sampler(check: Check) -> str:
    from cbatch.kernels.gpu.sample import sample

    rows, vocabulary = (20, 300) if check.dry else (256, 128256)
    logits = torch.randn(rows, vocabulary, device=check.device) * 3
    column = lambda value: torch.full((rows,), float(value), device=check.device)  # noqa: E731
    ints = torch.zeros(rows, dtype=torch.int32, device=check.device)
    seeds = torch.arange(rows, device=check.device)
    greedy = sample(logits, column(0), ints, column(1), column(0), seeds, ints)
    if not torch.equal(greedy, logits.argmax(-1)):
        raise AssertionError("greedy draws are not the largest logits")
    drawn = sample(logits, column(1), ints + 20, column(0.9), column(0), seeds, ints)
    rank = (logits > logits.gather(1, drawn[:, None])).sum(-1)
    if int(rank.max()) >= 20:
        raise AssertionError("a draw from outside of top-k")
    taken = check.seconds(lambda: sample(logits, column(1), ints + 20, column(0.9), column(0), seeds, ints))
    plain = check.seconds(lambda: sample(logits, column(0), ints, column(1), column(0), seeds, ints))
    return f"top-k and top-p of {rows} rows {taken * 1e6:.0f} us, greedy {plain * 1e6:.0f} us"


# Models


class Rows:
    """Requests from a list."""

    def __init__(self, requests: list[Request]) -> None:
        self._rest = requests[::-1]

    @property
    def ended(self) -> bool:
        return not self._rest

    def take(self, wait: bool) -> Request | None:  # noqa: ARG002 there is nothing to wait for
        return self._rest.pop() if self._rest else None


def request(number: int, token_ids: list[int], max_tokens: int) -> Request:
    row = Row("check", number, f"row {number}", {}, 2)
    return Request(row, token_ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True), number)


def build(
    check: Check, model: Any, num_blocks: int, seqs: int, budget: int, depth: int, graphs: bool, longest: int
) -> Engine:
    """An engine around a model on the device, fused."""
    layers = layer_shapes(model)
    substitute(model, layers, 32)
    cache = KVCache(layers, num_blocks, 32, model.dtype, check.device)
    runner = Runner(model, cache)
    if graphs and not check.dry and not runner.record(budget, seqs, -(-longest // 32), longest):
        raise AssertionError(f"{runner.notes[-1]}")
    scheduler = make_scheduler("continuous", BlockPool(num_blocks, 32), budget, seqs)
    stats = RunStats(cost=model_cost(model, sum(layer.bytes_per_token(model.dtype) for layer in layers.values())))
    return Engine(runner, scheduler, lambda ids: str(len(ids)), frozenset(), longest, stats, depth)


def tiny(family: str) -> Any:
    import transformers

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


def greedy(model: Any, one: Request) -> list[int]:
    """What transformers itself generates."""
    ids = torch.tensor([one.token_ids], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=one.params.max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


_WANTED: dict[str, dict[int, list[int]]] = {}  # what transformers generates, by family and row


def equality(check: Check, family: str, depth: int, graphs: bool) -> str:
    """Greedy tokens of ragged rows in float32, with a pool that forces preemption, equal to transformers' own."""
    import copy

    from transformers import AutoModelForCausalLM

    config = tiny(family)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="cbatch", dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
    own = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32)
    own.load_state_dict(model.state_dict())
    model, own = model.to(check.device).eval(), own.to(check.device).eval()
    rng, count, num_blocks = random.Random(0), 3 if check.dry else 24, 3 if check.dry else 6
    prompts, longest = (range(26, 33), 6) if check.dry else (range(1, 71), 40)
    requests = [
        request(n, [rng.randrange(3, 300) for _ in range(rng.choice(prompts))], rng.randint(1, longest))
        for n in range(count)
    ]
    engine = build(check, model, num_blocks, 4, 40, depth, graphs, 190)
    done = {one.row.index: one for one in engine.generate(Rows(requests))}
    if family not in _WANTED:
        _WANTED[family] = {one.row.index: greedy(own, one) for one in requests}
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
    import transformers

    settings = {**SHAPES[name], "max_position_embeddings": 16384}
    if check.dry:
        settings |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                     "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300}  # fmt: skip
    config = getattr(transformers, f"{settings.pop('kind')}Config")(**settings)
    with torch.device(check.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=check.dtype, attn_implementation="cbatch")
    return model.eval()


def speed(check: Check, name: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """Checks of one model's speed, sharing its engine."""
    shared: dict[str, Any] = {}
    seqs, budget, longest = (4, 64, 256) if check.dry else (256, 8192, 8704)

    def load() -> str:
        model = random_model(check, name)
        num_blocks = 64 if check.dry else int(60e9) // (2 * 32 * 8 * 128 * 32 * model.dtype.itemsize)
        shared["engine"] = build(check, model, num_blocks, seqs, budget, 0 if check.dry else 1, True, longest)
        return f"{sum(w.numel() for w in model.parameters()) / 1e9:.2f}B parameters"

    def generate(requests: list[Request]) -> tuple[Engine, float, list[Completion]]:
        engine: Engine = shared["engine"]
        engine.stats = replace(RunStats(), cost=engine.stats.cost)
        check.sync()
        started_at = time.perf_counter()
        done = list(engine.generate(Rows(requests)))
        check.sync()
        return engine, time.perf_counter() - started_at, done

    def prompt(number: int, length: int) -> list[int]:
        rng = random.Random(number)
        return [rng.randrange(10, 290) for _ in range(length)]

    def decode(batch: int) -> str:
        new = 4 if check.dry else 128
        generate([request(n, prompt(n, 16), new) for n in range(batch)])  # records the graphs
        engine, seconds, _ = generate([request(n, prompt(n, 16), new) for n in range(batch)])
        share = engine.stats.bytes / seconds / check.bandwidth
        return f"{batch * new / seconds:,.0f} tokens/s, {seconds / new * 1000:.2f} ms a step, {share:.0%} of copy bandwidth"

    def prefill(length: int) -> str:
        length = 40 if check.dry else length
        generate([request(0, prompt(-1, length), 1)])
        engine, seconds, _ = generate([request(0, prompt(length, length), 1)])
        share = engine.stats.flops / seconds / check.flops
        return f"{length / seconds:,.0f} tokens/s, {share:.0%} of the matrix rate"

    def ragged() -> str:
        rng, count, high = random.Random(0), 3 if check.dry else 256, 8 if check.dry else 1024
        low = 4 if check.dry else 100
        shared["ragged"] = [
            request(n, prompt(n + 1000, rng.randint(low, high)), rng.randint(low, high)) for n in range(count)
        ]
        for warm in (1, 2, 4, *range(8, 256, 8)) if not check.dry else ():  # every size of a graph, before the clock
            generate([request(n, prompt(5000 + warm + n, 20), 2) for n in range(warm)])
        generate([request(n, prompt(9000 + n, low + n), 2) for n in range(1 if check.dry else 4)])
        engine, seconds, done = generate(shared["ragged"])
        tokens = sum(one.num_completion_tokens for one in done)
        shared["rate"] = tokens / seconds
        idle = 1 - engine.stats.busy_seconds / seconds
        return f"{shared['rate']:,.0f} tokens/s, host outside of steps {idle:.1%} of the time"

    def free() -> str:
        shared.clear()
        check.free()
        return ""

    yield "load", load
    for batch in (1, 2) if check.dry else (1, 32, 256):
        yield f"decode at batch {batch}", lambda batch=batch: decode(batch)
    for length in (2048, 8192):
        yield f"prefill {length}", lambda length=length: prefill(length)
    yield "ragged workload", ragged
    yield "ragged workload, transformers generate_batch", lambda: peer(check, name, shared)
    yield "free", free


def peer(check: Check, name: str, shared: dict[str, Any]) -> str:
    """The same rows through transformers' own continuous batching."""
    from transformers import GenerationConfig

    rows, rate = shared["ragged"], shared["rate"]
    shared.pop("engine")
    check.free()
    model = random_model(check, name)
    model.set_attn_implementation("sdpa")
    settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1024)
    tokens, left, wanted = 0, len(rows), sum(one.params.max_tokens for one in rows)
    limit = max(10.0, min(90.0, check.seconds_left - 15))
    with model.continuous_batching_context_manager(generation_config=settings) as manager:
        started_at = time.perf_counter()
        for one in rows:
            manager.add_request(one.token_ids, max_new_tokens=one.params.max_tokens)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--only", default="", help="run the checks whose name holds this")
    options = parser.parse_args()
    check = Check(options.dry_run, options.only, options.json)
    if options.dry_run:
        import tests.interpreter  # noqa: F401

        ops.interpreted = True
        torch.set_num_threads(1)
    else:
        import triton

        name = torch.cuda.get_device_name()
        print(f"{name}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    big = 1 if check.dry else 8
    check.run("ceilings", lambda: ceilings(check))
    decode = [(n * 37 * big, 1) for n in range(1, 2 + 2 * big)]
    mixed = [(33 * big, 1), (0, 17 * big), (40 * big, 31 * big), (9, 1)]
    for heads, kv_heads, size in (
        ((4, 2, 16), (6, 2, 80)) if check.dry else ((32, 8, 128), (9, 3, 64), (32, 32, 80), (8, 4, 256))
    ):
        label = f"attention {heads}/{kv_heads} heads of {size}"
        check.run(f"{label}, decode", lambda h=heads, k=kv_heads, s=size: attention(check, decode, h, k, s))
        check.run(f"{label}, mixed", lambda h=heads, k=kv_heads, s=size: attention(check, mixed, h, k, s))
        check.run(
            f"{label}, window and soft-cap",
            lambda h=heads, k=kv_heads, s=size: attention(check, mixed, h, k, s, window=40, softcap=30.0),
        )
    check.run("decode attention, batch 64, context 4096", lambda: decode_bandwidth(check, check.dtype))
    check.run("rope and store", lambda: rope_and_store(check, check.dtype))
    if why := "" if check.dry else ops.why_not_fp8(check.device):
        print(f"without fp8: {why}", flush=True)
    else:
        check.run("fp8 cache, decode", lambda: attention(check, decode, 8, 2, 64, fp8=True))
        check.run("fp8 cache, mixed", lambda: attention(check, mixed, 8, 2, 64, fp8=True))
        check.run("fp8 cache, batch 64, context 4096", lambda: decode_bandwidth(check, torch.float8_e4m3fn))
        check.run("fp8 cache, rope and store", lambda: rope_and_store(check, torch.float8_e4m3fn))
    check.run("norm, gate, experts", lambda: small_kernels(check))
    check.run("sampler", lambda: sampler(check))
    for family in ("Llama", "Qwen3", "Gemma3Text", "Mixtral"):
        for depth, graphs in ((0, False), (1, False), (1, True)):
            title = f"greedy {family}, depth {depth}, graphs {'on' if graphs else 'off'}"
            check.run(title, lambda f=family, d=depth, g=graphs: equality(check, f, d, g))
    for name in SHAPES:
        for title, work in speed(check, name):
            check.run(f"{name}: {title}", work)
    width = max(len(result.name) for result in check.results)
    print()
    for result in check.results:
        print(f"{'ok  ' if result.ok else 'FAIL'}  {result.name:<{width}}  {result.figure or result.error}")
    failed = sum(not result.ok for result in check.results)
    print(f"{len(check.results) - failed} passed, {failed} failed, {time.perf_counter() - check.started_at:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
