"""Greedy outputs of tiny random models of many architectures, against what transformers itself generates."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers as hf

from cbatch.config import EngineConfig
from cbatch.engine.places import find_places
from cbatch.engine.plan import resolve
from cbatch.engine.start import start_engine
from cbatch.errors import Fatal, UsageError
from cbatch.model.attention import NAME, attention_specs
from cbatch.model.kv_cache import KVCache
from cbatch.model.loader import ModelFiles
from cbatch.model.verify import PROVEN, verify
from cbatch.watch.stats import RunStats
from tests.drive import make_engine, make_request, run, twins
from tests.families import EXPERTS, FAMILIES, OTHERS, config_of
from tests.tiny import VOCAB_SIZE, generate, make_config, make_model


def check_against_transformers(config: Any, rng: random.Random, num_rows: int = 12, longest: int = 30) -> None:
    """Random prompts under a random budget, block size and a pool so small that sequences are preempted."""
    routed, own = twins(config)
    block_size = rng.choice([1, 3, 4, 8])
    engine = make_engine(
        routed,
        num_blocks=-(-56 // block_size),
        block_size=block_size,
        budget=rng.choice([6, 9, 17]),
        max_num_seqs=6,
        prefix_caching=rng.random() < 0.5,
    )
    lengths = [rng.randint(1, longest) for _ in range(num_rows)]
    requests = [
        make_request(row, [rng.randrange(VOCAB_SIZE) for _ in range(length)], max_tokens=rng.randint(14, 24))
        for row, length in enumerate(lengths)
    ]
    for request, completion in zip(requests, run(engine, requests), strict=True):
        assert list(completion.token_ids) == generate(own, request.token_ids, request.params.max_tokens)
        assert completion.finish_reason == "length"
    assert engine.stats.num_preemptions > 0


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_greedy_tokens_equal_those_of_transformers_under_preemption(name: str) -> None:
    check_against_transformers(config_of(name), random.Random(name))


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_a_saved_model_loads_with_all_of_its_weights(name: str, tmp_path: Path) -> None:
    made = make_model(config_of(name))
    made.save_pretrained(tmp_path)
    loaded = ModelFiles("saved", tmp_path).load("float32", "cpu", dummy=False)
    assert loaded.state_dict().keys() == made.state_dict().keys()
    for weight, other in zip(loaded.state_dict().values(), made.state_dict().values(), strict=True):
        assert torch.equal(weight, other)


def test_every_architecture_that_skips_the_check_at_load_is_compared_here() -> None:
    assert {config_of(name).model_type for name in FAMILIES} == PROVEN


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"rope_theta": 500.0}, id="old-style base"),
        pytest.param({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}}, id="old-style scaling"),
        pytest.param({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, id="new-style base"),
        pytest.param({"rope_parameters": None}, id="null"),
        pytest.param(
            {
                "rope_theta": 500.0,
                "rope_scaling": {
                    **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
                    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
                },
            },
            id="llama3",
        ),
        pytest.param(
            {
                "rope_parameters": {
                    **{"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0},
                    "original_max_position_embeddings": 64,
                }
            },
            id="yarn",
        ),
    ],
)
def test_rotary_bases_and_scalings_in_all_spellings(settings: dict[str, Any], tmp_path: Path) -> None:
    made = make_config(**settings)
    made.save_pretrained(tmp_path)
    config = ModelFiles("saved", tmp_path).config
    assert config.rope_parameters == made.rope_parameters
    routed, own = twins(config)
    rng = random.Random(5)
    requests = [
        make_request(row, [rng.randrange(VOCAB_SIZE) for _ in range(length)], max_tokens=8)
        for row, length in enumerate((5, 200, 400))
    ]
    completions = run(make_engine(routed, num_blocks=80, block_size=8, budget=64), requests)
    for request, completion in zip(requests, completions, strict=True):
        assert list(completion.token_ids) == generate(own, request.token_ids, 8)


def test_the_base_of_an_old_style_configuration_reaches_the_rotation() -> None:
    ids = torch.arange(200)[None] % VOCAB_SIZE
    first, second = (make_model(make_config(rope_theta=base))(ids).logits[0, -1] for base in (500.0, 100_000.0))
    assert not torch.allclose(first, second, atol=1e-2)


@pytest.mark.parametrize("kind", [hf.LlamaConfig, hf.Phi3Config])
def test_a_rotation_that_depends_on_the_longest_sequence_caps_the_context(kind: type, tmp_path: Path) -> None:
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    config = make_config(
        kind,
        original_max_position_embeddings=64,
        rope_parameters={
            **{"rope_type": "longrope", "rope_theta": 500.0, "original_max_position_embeddings": 64},
            **{"factor": 8.0, **factors},
        },
    )
    config.save_pretrained(tmp_path)
    assert ModelFiles("longrope", tmp_path).context == 64
    check_against_transformers(config, random.Random(1))


def test_dynamic_scaling_is_capped_where_it_would_begin(tmp_path: Path) -> None:
    config = make_config(rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0})
    config.save_pretrained(tmp_path)
    assert ModelFiles("dynamic", tmp_path).context == 512
    check_against_transformers(config, random.Random(2))


REFUSED: dict[str, tuple[type, dict[str, Any], str]] = {
    "bloom": (hf.BloomConfig, {"n_layer": 2, "n_head": 4}, "ALiBi"),
    "mpt": (hf.MptConfig, {"d_model": 32, "n_heads": 4, "n_layers": 2}, "ALiBi"),
    "gpt_oss": (hf.GptOssConfig, {"num_local_experts": 4}, "attention sinks"),
    "t5": (hf.T5Config, {"d_model": 32, "num_layers": 2}, "an encoder and a decoder"),
    "mamba": (hf.MambaConfig, {}, "linear_attention"),
    "qwen3_next": (
        hf.Qwen3NextConfig,
        {**EXPERTS, "layer_types": ["linear_attention", "full_attention"]},
        "linear_attention",
    ),
    "llama4_text": (hf.Llama4TextConfig, {"num_local_experts": 4}, "chunked"),
    "lfm2": (hf.Lfm2Config, {"layer_types": ["conv", "full_attention"]}, "conv"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_refused_by_name_before_weights_are_read(name: str, tmp_path: Path) -> None:
    kind, settings, reason = REFUSED[name]
    make_config(kind, **settings).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=f"models of type {name} .*{reason}"):
        ModelFiles("some model", tmp_path).check()


NOT_ROUTED: dict[str, tuple[type, dict[str, Any], str]] = {
    "rwkv": (hf.RwkvConfig, {}, "0 of 2 layers"),
    "bert": (hf.BertConfig, {}, "not causal"),
    "stablelm": (hf.StableLmConfig, {}, "StableLm"),
    "falcon": (hf.FalconConfig, {"head_dim": None, "alibi": True}, "type falcon"),
    "gpt_neo": (hf.GPTNeoConfig, {"num_heads": 4, "attention_types": [[["global", "local"], 1]]}, "type gpt_neo"),
    "diffllama": (hf.DiffLlamaConfig, {}, "DiffLlama|more than once"),
}


@pytest.mark.parametrize("name", NOT_ROUTED)
def test_models_whose_attention_does_not_go_through_cbatch_are_refused_by_name(name: str, tmp_path: Path) -> None:
    kind, settings, reason = NOT_ROUTED[name]
    settings = {**{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}, **settings}
    kind(**{key: value for key, value in settings.items() if value is not None}).save_pretrained(tmp_path)
    with pytest.raises(Fatal, match=reason):
        attention_specs(ModelFiles("some model", tmp_path).load("float32", "cpu", dummy=True))


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_at_load_accepts_what_is_right(name: str, dtype: torch.dtype) -> None:
    model = make_model(config_of(name), NAME).to(dtype)
    verify(model, attention_specs(model))
    assert model.config._attn_implementation == NAME


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("mistral", {"window": 0}),
        ("mistral", {"window": 6}),
        ("gemma2", {"softcap": 0.0}),
        ("gemma3_text", {"window": 0}),
        ("granite", {"scale": 0.6}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_at_load_notices_a_wrong_window_softcap_or_scale(
    name: str, wrong: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(config_of(name), NAME).to(dtype)
    specs, right = attention_specs(model), KVCache.attend

    def attend(*args: Any) -> Any:
        return cast(Any, right)(*args[:-1], args[-1]._replace(**wrong))

    monkeypatch.setattr(KVCache, "attend", attend)
    with pytest.raises(Fatal, match=f"models of type {name} are not supported"):
        verify(model, specs)


def test_a_sliding_window_that_no_layer_passes_on_is_refused() -> None:
    config = make_config()
    config.sliding_window = 4096
    model = make_model(config, NAME)
    with pytest.raises(Fatal, match="sliding window"):
        verify(model, attention_specs(model))


def test_start_checks_architectures_it_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.tiny import make_tokenizer

    checked = []
    monkeypatch.setattr("cbatch.engine.start.verify", lambda model, _layers: checked.append(model.config.model_type))
    for kind in (hf.LlamaConfig, hf.PhiConfig):
        make_model(make_config(kind)).save_pretrained(tmp_path)
        make_tokenizer().save_pretrained(tmp_path)
        config, files = EngineConfig(kv_cache_memory=0.01, threads=1), ModelFiles("m", tmp_path)
        plan = resolve(config, find_places(config), files, 64)
        start_engine(plan, plan.places[0], files, RunStats())
    assert checked == ["phi"]
