"""Engines around a tiny model, driven without files, threads or a tokenizer."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cbatch.config import SamplingParams
from cbatch.engine import sequence as engine_sequence
from cbatch.engine.block_pool import BlockPool
from cbatch.engine.engine import Engine
from cbatch.engine.pack import pack_sampling
from cbatch.engine.scheduler import ScheduledChunk, make_scheduler
from cbatch.errors import RowError
from cbatch.kernels.attention import AttentionSpec
from cbatch.model.attention import NAME, attention_specs
from cbatch.model.batch import SamplingBatch
from cbatch.model.kv_cache import KVCache
from cbatch.model.ops import Backend
from cbatch.model.runner import Runner
from cbatch.rows.request import Completion, Request, Row
from tests.tiny import make_model

torch.set_num_threads(1)  # tiny models only lose by more


class Given:
    """Requests that are all there from the start."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._left = deque(requests)

    @property
    def ended(self) -> bool:
        return not self._left

    def take(self, wait: bool) -> Request | None:  # noqa: ARG002
        return self._left.popleft() if self._left else None


def make_request(number: int, token_ids: Sequence[int], random_key: int = 0, **params: Any) -> Request:
    return Request(
        Row("prompts", number, f"row {number}", {}, 1), list(token_ids), SamplingParams(**params), random_key
    )


def spell(token_ids: Sequence[int]) -> str:
    """A decoder that shows each token as one character."""
    return "".join(chr(0x100 + token) for token in token_ids)


def make_engine(
    model: Any,
    num_blocks: int = 64,
    block_size: int = 4,
    budget: int = 32,
    max_num_seqs: int = 8,
    max_model_len: int = 512,
    kind: str = "continuous",
    prefix_caching: bool = True,
    fill: float | None = float("nan"),
    eos: Iterable[int] = (),
    decode: Any = spell,
    specs: Mapping[int, AttentionSpec] | None = None,
    cache_dtype: torch.dtype | None = None,
    backend: Backend | None = None,
) -> Engine:
    """An engine whose KV cache holds `fill` wherever nothing has been stored yet; in one of bytes, scales do.

    It expects nothing of its sequences, so where blocks are few it runs out of them. `specs`: of a model whose modules
    have been replaced.
    """
    specs = specs or attention_specs(model)
    cache = KVCache(specs, num_blocks, block_size, cache_dtype or model.dtype, model.device, backend=backend)
    if fill is not None:
        for tensor in [*cache.k.values(), *cache.v.values()]:
            (tensor.view(torch.float32) if tensor.dtype == torch.int8 else tensor).fill_(fill)
    pool = BlockPool(num_blocks, block_size, prefix_caching)
    scheduler = make_scheduler(kind, pool, budget, max_num_seqs, expected_share=0)
    eos = frozenset(eos)
    return Engine(Runner(model, cache), scheduler, decode, eos, max_model_len)


def sampling_of(sequences: Sequence[engine_sequence.Sequence], eos: Sequence[int], vocab_size: int) -> SamplingBatch:
    """What the engine makes of sequences that all get their next token."""
    chunks = [ScheduledChunk(seq, 1, 1, True) for seq in sequences]
    return pack_sampling(chunks, eos, vocab_size, torch.device("cpu"))


@dataclass(frozen=True)
class Finished:
    """A completion with a single output, laid flat."""

    row: Row
    num_prompt_tokens: int
    num_cached_tokens: int
    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: str
    error: RowError | None


def finished(completion: Completion) -> Finished:
    (output,) = completion.outputs
    counts = completion.num_prompt_tokens, completion.num_cached_tokens
    return Finished(completion.row, *counts, output.text, output.token_ids, output.finish_reason, output.error)


def run(engine: Engine, requests: Iterable[Request]) -> list[Finished]:
    """All completions in the order of the requests; the engine is left clean."""
    completions = [finished(completion) for completion in engine.generate(Given(requests))]
    engine.scheduler.check()
    assert engine.scheduler.pool.num_used_blocks == 0
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    return sorted(completions, key=lambda completion: completion.row.index)


def twins(config: Any, seed: int = 0) -> tuple[Any, Any]:
    """The same random model twice: routed to cbatch, and with transformers' own eager attention."""
    routed, own = make_model(copy.deepcopy(config), NAME, seed), make_model(copy.deepcopy(config), "eager", seed)
    for a, b in zip(routed.state_dict().values(), own.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    return routed, own
