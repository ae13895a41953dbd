from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cbatch.engine.plan
from cbatch import plan as job_plan
from cbatch.config import (
    DisplayConfig,
    EngineConfig,
    InputConfig,
    OutputConfig,
    PromptConfig,
    RunConfig,
    SamplingParams,
)
from cbatch.engine.places import Place, find_places
from cbatch.engine.plan import EnginePlan, resolve, resolve_dtype
from cbatch.errors import UsageError
from cbatch.model.loader import locate
from cbatch.model.weights import num_weights
from cbatch.opening import _sampling
from tests.jobs import job_config
from tests.tiny import make_config

GIB = 1024**3


def plan_for(model: Path, max_model_len: int | None = None, **settings: Any) -> EnginePlan:
    config = EngineConfig(**{"device": "cpu", "threads": 1, **settings})
    return resolve(config, find_places(config), locate(str(model)), max_model_len)


def nothing() -> int:
    raise AssertionError("the memory was given")


def test_a_plan_answers_what_the_settings_leave_open(tiny_model: Path) -> None:
    plan = plan_for(tiny_model, dtype="float32")
    assert (plan.dtype, plan.kv_dtype, plan.places) == ("float32", "float32", (Place("cpu", 1),))
    assert (plan.block_size, plan.max_num_seqs, plan.max_num_batched_tokens, plan.max_model_len) == (128, 128, 512, 512)
    assert pickle.loads(pickle.dumps(plan)) == plan
    asked = plan_for(
        tiny_model,
        100,
        kv_cache_dtype="int8",
        block_size=32,
        max_num_seqs=3,
        max_num_batched_tokens=7,
        cuda_graphs="off",
    )
    assert (asked.kv_dtype, asked.max_model_len, asked.block_size) == ("int8", 100, 32)
    assert (asked.max_num_seqs, asked.max_num_batched_tokens, asked.cuda_graphs) == (3, 7, False)


def test_on_a_gpu_other_answers_are_the_default(tiny_model: Path) -> None:
    plan = resolve(EngineConfig(dtype="bfloat16"), [Place("cuda:1", 1)], locate(str(tiny_model)))
    assert (plan.block_size, plan.max_num_seqs, plan.max_num_batched_tokens) == (32, 256, 8192)


def test_a_context_longer_than_the_models_is_refused(tiny_model: Path) -> None:
    with pytest.raises(UsageError, match="--max-model-len 513: the model's context is 512 tokens"):
        plan_for(tiny_model, 513)


def test_dtype_auto_is_the_checkpoints_where_the_cpu_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(dtype=torch.bfloat16)
    for fast, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(cbatch.engine.plan, "cpu_has_bfloat16", lambda fast=fast: fast)
        assert resolve_dtype("auto", "cpu", config) == expected
        assert resolve_dtype("auto", "cuda", config) == torch.bfloat16
        assert resolve_dtype("auto", "cuda", make_config(dtype=torch.float16)) == torch.float16
        assert resolve_dtype("auto", "cpu", make_config(dtype=torch.float32)) == torch.float32
        assert resolve_dtype("auto", "cpu", make_config(dtype=None)) == torch.float32
        assert resolve_dtype("float16", "cpu", config) == torch.float16


# Blocks


@pytest.fixture
def plan(tiny_model: Path) -> EnginePlan:
    """Blocks of one token, so that a block takes as many bytes as a token."""
    return replace(plan_for(tiny_model), block_size=1, max_num_seqs=10**6, max_model_len=1000)


def test_blocks_by_the_memory_asked_for(plan: EnginePlan) -> None:
    plan = replace(plan, kv_cache_memory=1024**2)
    assert plan.num_blocks(1024, nothing) == 1024
    assert plan.num_blocks(1025, nothing) == 1023
    assert replace(plan, max_num_seqs=1, max_model_len=100).num_blocks(1024, nothing) == 100
    assert replace(plan, kv_cache_memory=0).num_blocks(1024, nothing) == 0


def test_blocks_by_what_is_left_for_them(plan: EnginePlan) -> None:
    assert plan.num_blocks(1000, lambda: 5000) == 5
    assert plan.num_blocks(6000, lambda: 5000) == 0
    assert plan.num_blocks(1000, lambda: -5000) == 0
    few = replace(plan, max_num_seqs=3, max_model_len=9, block_size=10)
    assert (few.num_blocks(100, lambda: 5000), few.num_blocks_in_memory(100, lambda: 5000)) == (3, 5)


def test_all_replicas_on_a_cpu_share_half_of_its_free_memory(plan: EnginePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cbatch.engine.plan, "available_memory", lambda: 12 * GIB)
    assert plan.free_memory("cpu") == 6 * GIB
    assert plan.free_memory("cpu", weights=2 * GIB) == 5 * GIB
    three = replace(plan, places=(Place("cpu", 1),) * 3)
    assert three.free_memory("cpu") == 2 * GIB
    assert three.free_memory("cpu", weights=2 * GIB) == 1 * GIB


def test_on_a_gpu_the_share_of_it_that_weights_and_work_space_leave(
    plan: EnginePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cbatch.engine.plan, "gpu_memory", lambda _: (70 * GIB, 80 * GIB))
    plan = replace(plan, gpu_memory_utilization=0.75)
    assert plan.free_memory("cuda:0") == 50 * GIB
    assert plan.free_memory("cuda:0", weights=15 * GIB, step=5 * GIB) == 30 * GIB


def test_weights_are_counted_without_being_read(tiny_model: Path, tmp_path: Path) -> None:
    model = locate(str(tiny_model)).load("float32", "cpu", dummy=False)
    assert num_weights(tiny_model) == sum(weight.numel() for weight in model.parameters())
    assert num_weights(tmp_path) == 0
    for content in (b"", b"{", b"\xff" * 99, b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"{"):
        (tmp_path / "model.safetensors").write_bytes(content)
        assert num_weights(tmp_path) == 0


# The manifest


def test_a_manifest_keeps_its_names_so_that_older_jobs_can_go_on(tiny_model: Path) -> None:
    files, sampling = locate(str(tiny_model)), SamplingParams(seed=1, stop_token_ids=(7,), stop=("x",))
    engine = EngineConfig(device="cpu", dtype="float32", kv_cache_dtype="int8", threads=1)
    config = RunConfig(
        InputConfig(), PromptConfig(date="2026-01-31"), sampling, engine, OutputConfig(), DisplayConfig()
    )
    plan = plan_for(tiny_model, dtype="float32", kv_cache_dtype="int8")
    recorded = job_plan.settings(config, plan, job_plan.prompt_builder(config, files, plan.max_model_len), files, [])
    assert {name: value for name, value in recorded.items() if not name.startswith("model ")} == {
        **{"max_tokens": 256, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
        **{"presence_penalty": 0.0, "frequency_penalty": 0.0, "stop": ["x"], "stop_token_id": [7]},
        **{"ignore_eos": False, "min_tokens": 0, "seed": 1, "prompt_column": "prompt", "template": None},
        **{"system": None, "chat": True, "max_model_len": 512, "truncate": None, "inputs": [], "input sizes": []},
        **{"special_tokens_in_text": None, "date": "2026-01-31T00:00:00"},
        **{"dtype": "float32", "quantization": None, "kv_cache_dtype": "int8", "load_format": "auto"},
    }


def test_a_models_own_sampling_settings_that_can_not_be_are_refused_by_name(tiny_model: Path, tmp_path: Path) -> None:
    files = locate(str(save_copy(tiny_model, tmp_path / "model", '{"min_p": 3.0}')))
    config = RunConfig(
        *(InputConfig(), PromptConfig(), SamplingParams(), EngineConfig(generation_config="model")),
        *(OutputConfig(), DisplayConfig()),
    )
    with pytest.raises(UsageError, match=r"--generation-config model: .*min_p must be between 0 and 1"):
        job_plan.sampling_defaults(config, files)


GIVEN_MODEL = {"do_sample": True, "temperature": 1.2, "top_k": 50, "repetition_penalty": 1.1, "min_new_tokens": 2}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {"temperature": 1.2, "top_k": 50, "repetition_penalty": 1.1, "min_tokens": 2}),
        ({"temperature": 0}, {"top_k": 50, "repetition_penalty": 1.1, "min_tokens": 2}),
        ({"top_k": 0}, {"temperature": 1.2, "repetition_penalty": 1.1, "min_tokens": 2}),
        ({"repetition_penalty": 1, "min_tokens": 0}, {"temperature": 1.2, "top_k": 50}),
        (
            {"temperature": 0.7, "max_tokens": 256},
            {"temperature": 0.7, **{"top_k": 50, "repetition_penalty": 1.1, "min_tokens": 2}},
        ),
    ],
)
def test_what_was_given_goes_before_the_models_settings_also_where_it_is_the_default(
    tiny_model: Path, tmp_path: Path, given: dict[str, Any], wanted: dict[str, Any]
) -> None:
    files = locate(str(save_copy(tiny_model, tmp_path / "model", json.dumps(GIVEN_MODEL))))
    config = job_config(generation_config="model", **given)
    assert job_plan.sampling_defaults(config, files) == SamplingParams(**wanted)
    assert job_plan.sampling_defaults(job_config(**given), files) == SamplingParams(**given)


def test_settings_of_the_model_that_cbatch_does_not_have_are_named(tiny_model: Path, tmp_path: Path) -> None:
    model = {"num_beams": 4, "no_repeat_ngram_size": 3, "typical_p": 1.0, "bad_words_ids": [[5]], "length_penalty": 2.0}
    neutral = {"num_beams": 1, "suppress_tokens": None, "guidance_scale": 1.0, "min_length": 0}
    for name, settings, line in (
        ("a", model, "--generation-config model: cbatch does not apply num_beams, no_repeat_ngram_size, bad_words_ids"),
        ("b", neutral, ""),
    ):
        files = locate(str(save_copy(tiny_model, tmp_path / name, json.dumps(settings))))
        assert job_plan.not_applied(job_config(generation_config="model"), files) == line
        assert job_plan.not_applied(job_config(), files) == ""


def test_the_first_line_shows_all_sampling_settings_that_are_not_neutral() -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, stop=("\n", "a"), ignore_eos=True, seed=3)
    assert _sampling(params) == (
        "max_tokens 256, temperature 0.7, seed 3, top_p 0.9, top_k 5, stop '\\n' 'a', ignore_eos true"
    )
    assert _sampling(SamplingParams(seed=3)) == "max_tokens 256, greedy"
    others: dict[str, Any] = {
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": -1,
        "frequency_penalty": 2.0,
        "min_tokens": 3,
    }
    assert _sampling(SamplingParams(**others, stop_token_ids=(7, 8))) == (
        "max_tokens 256, greedy, min_p 0.1, repetition_penalty 1.1, presence_penalty -1, frequency_penalty 2, "
        "stop_token_ids 7 8, min_tokens 3"
    )


def save_copy(model: Path, folder: Path, generation_config: str) -> Path:
    shutil.copytree(model, folder)
    (folder / "generation_config.json").write_text(generation_config)
    return folder
