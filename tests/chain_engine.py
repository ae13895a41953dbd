"""Jobs with the model of tests/chain.py: everything is the real thing but what computes tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import cbatch.model.ceilings
from cbatch.engine.block_pool import BlockPool
from cbatch.engine.engine import Engine
from cbatch.engine.plan import EnginePlan
from cbatch.engine.scheduler import make_scheduler
from tests.chain import ChainRunner

BLOCK_SIZE = 8


def decoder(tokenizer: Any) -> Callable[[Any], str]:
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def replace_models(num_blocks: int, max_num_seqs: int, engine: type[Engine] = Engine, order: str = "input") -> None:
    """Make every later job of this process generate with the chain model, and measure nothing."""

    def start_engine(plan: EnginePlan, _place: Any, files: Any, stats: Any) -> Engine:
        scheduler = make_scheduler("continuous", BlockPool(num_blocks, BLOCK_SIZE), 256, max_num_seqs)
        runner: Any = ChainRunner(num_blocks * BLOCK_SIZE, BLOCK_SIZE, files.config.vocab_size)
        decode, eos = decoder(files.tokenizer), files.eos_token_ids
        return engine(runner, scheduler, decode, eos, plan.max_model_len, stats, order=order)

    module: Any = ModuleType("cbatch.engine.start")  # the real one imports transformers' models: seconds a process
    module.start_engine = start_engine
    sys.modules["cbatch.engine.start"] = module
    cbatch.model.ceilings.ceilings = lambda *_: None
