from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from cbatch.config import EngineConfig
from cbatch.engine.places import find_places
from cbatch.engine.plan import resolve
from cbatch.engine.start import model_cost, start_engine
from cbatch.errors import UsageError
from cbatch.model import ops
from cbatch.model.fused import is_quantized
from cbatch.model.loader import ModelFiles, locate
from cbatch.watch.stats import RunStats
from tests.drive import make_request, run
from tests.families import FAMILIES, OTHERS, config_of
from tests.tiny import VOCAB_SIZE, generate, make_config, make_model, save_model

HIDDEN, MLP, QKVO = 32, 3 * 32 * 48, 32 * 32 + 2 * 32 * 16 + 32 * 32


def started(tiny_model: Path, max_model_len: int = 64, **settings: Any) -> Any:
    config = EngineConfig(**{"kv_cache_memory": 0.01, "threads": 1, "dtype": "float32", **settings})
    files = locate(str(tiny_model))
    plan = resolve(config, find_places(config), files, max_model_len)
    return start_engine(plan, plan.places[0], files, RunStats())


def test_an_engine_from_a_folder_generates_what_transformers_does(tiny_model: Path) -> None:
    engine = started(tiny_model)
    own = hf.AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="eager")
    requests = [make_request(n, [5 + n, 6, 7], max_tokens=12, ignore_eos=True) for n in range(4)]
    for request, completion in zip(requests, run(engine, requests), strict=True):
        assert list(completion.token_ids) == generate(own, request.token_ids, 12)


def test_special_tokens_are_no_text_and_spaces_stay_as_they_are(tiny_model: Path) -> None:
    engine, tokenizer = started(tiny_model), locate(str(tiny_model)).tokenizer
    assert engine.decode([1, *tokenizer("a , b . don 't")["input_ids"], 2]) == "a , b . don 't"
    assert engine.eos_token_ids == {2}


def test_blocks_are_as_many_as_fit_but_no_more_than_can_be_used(tiny_model: Path) -> None:
    engine = started(tiny_model, max_num_seqs=2, block_size=16)
    assert engine.scheduler.pool.num_blocks == 2 * 64 // 16
    small = started(tiny_model, kv_cache_memory=20 / 1024**2, block_size=16)  # 20 KiB; a token takes 256 bytes
    assert small.scheduler.pool.num_blocks == 5
    assert small.max_model_len == 64
    smaller = started(tiny_model, kv_cache_memory=8 / 1024**2, block_size=16)
    assert smaller.capacity == 32


def test_no_room_for_a_single_block_is_refused_with_what_to_change(tiny_model: Path) -> None:
    with pytest.raises(UsageError, match=r"--kv-cache-memory and --block-size"):
        started(tiny_model, kv_cache_memory=0.0)


def test_quantization_is_not_left_out_in_silence(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_quantized(started(tiny_model, quantization="int8").runner.model)
    with pytest.raises(UsageError, match=r"no layer .* in torch.float16"):
        started(tiny_model, quantization="int8", dtype="float16")
    monkeypatch.setattr(ops, "choose", lambda _: ops.Backend("no C compiler"))
    with pytest.raises(UsageError, match="no C compiler"):
        started(tiny_model, quantization="int8")


def test_a_cache_of_int8_holds_more_tokens(tmp_path: Path) -> None:
    folder = save_model(tmp_path, make_config(head_dim=64))
    engines = [started(folder, 512, kv_cache_memory=0.001, kv_cache_dtype=name) for name in ("auto", "int8")]
    assert [engine.stats.cost.kv_bytes_per_token for engine in engines] == [2 * 2 * 2 * 64 * 4, 2 * 2 * 2 * (64 + 4)]
    assert [engine.scheduler.pool.num_blocks for engine in engines] == [4, 15]
    [own] = run(engines[0], [make_request(0, list(range(3, 40)), max_tokens=1)])
    [done] = run(engines[1], [make_request(0, list(range(3, 40)), max_tokens=1)])
    assert done.token_ids == own.token_ids


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_dtype": "fp8"}, "on a CPU there is int8"),
        ({"dtype": "float16"}, "it does not go with --dtype float16"),
        ({"block_size": 48}, "--block-size must be a multiple of 32 up to 65536, not 48"),
        ({"block_size": 2**17}, "--block-size must be a multiple of 32 up to 65536, not 131072"),
        ({"compiler": "none"}, "there are no C kernels: no C compiler"),
    ],
)
def test_a_cache_that_can_not_be_is_refused_before_the_weights_are_read(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(ModelFiles, "load", None)
    if settings.pop("compiler", None):
        monkeypatch.setattr(ops, "choose", lambda _: ops.Backend("no C compiler"))
    with pytest.raises(UsageError, match=message):
        started(tiny_model, **{"kv_cache_dtype": "int8", **settings})


def test_settings_reach_the_scheduler(tiny_model: Path) -> None:
    engine = started(tiny_model, max_num_batched_tokens=7, max_num_seqs=3, scheduling="static", block_size=4)
    scheduler = engine.scheduler
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs, scheduler.pool.block_size) == (7, 3, 4)
    assert type(scheduler).__name__ == "StaticScheduler"
    assert not started(tiny_model, enable_prefix_caching=False).scheduler.pool.enable_prefix_caching


def test_the_cost_of_a_dense_model_is_that_of_its_matrices() -> None:
    cost = model_cost(make_model(make_config()), 256)
    assert cost.flops_per_token == 2 * 2 * (MLP + QKVO)
    assert cost.flops_per_sampled == 2 * HIDDEN * VOCAB_SIZE
    assert cost.weight_bytes == 4 * (2 * (MLP + QKVO) + HIDDEN * VOCAB_SIZE)
    assert cost.flops_per_attended == 2 * 2 * HIDDEN * 2
    assert cost.kv_bytes_per_token == 256


def test_a_tied_head_costs_as_much_as_one_of_its_own() -> None:
    assert model_cost(make_model(make_config(tie_word_embeddings=True)), 1) == model_cost(make_model(make_config()), 1)


def test_of_the_experts_only_those_that_a_token_uses_cost() -> None:
    config = make_config(hf.MixtralConfig, num_local_experts=4, num_experts_per_tok=2)
    cost = model_cost(make_model(config), 1)
    assert cost.flops_per_token == 2 * 2 * (2 * MLP + QKVO + 4 * HIDDEN)
    assert cost.weight_bytes == 4 * (2 * (4 * MLP + QKVO + 4 * HIDDEN) + HIDDEN * VOCAB_SIZE)


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_every_family_has_a_cost(name: str) -> None:
    cost = model_cost(make_model(config_of(name)), 1)
    assert 2 * 2 * QKVO / 2 < cost.flops_per_token < 2 * 2 * (4 * MLP + 2 * QKVO)
    assert cost.flops_per_sampled == 2 * HIDDEN * VOCAB_SIZE
    assert cost.flops_per_attended > 0


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_weights_of_a_step_are_counted_as_they_are_packed(tiny_model: Path, quantization: str | None) -> None:
    if not ops.choose(torch.device("cpu")).has_kernels:
        pytest.skip("no C compiler")
    config = EngineConfig(kv_cache_memory=0.01, threads=1, dtype="float32", quantization=quantization)
    stats, files = RunStats(), locate(str(tiny_model))
    plan = resolve(config, find_places(config), files, 64)
    start_engine(plan, plan.places[0], files, stats)
    matrices = ((32 + 2 * 16, 32), (32, 32), (2 * 48, 32), (32, 48))  # q, k and v; o; gate and up; down
    head = 4 * HIDDEN * VOCAB_SIZE
    if quantization:  # one byte each, and of each output a scale and an offset of 4 bytes
        assert stats.cost.weight_bytes == head + 2 * sum(n * k + 8 * n for n, k in matrices)
    else:
        assert stats.cost.weight_bytes == head + 4 * 2 * sum(n * k for n, k in matrices)
    assert stats.cost.flops_per_token == 2 * 2 * (MLP + QKVO)
