"""What a checkpoint says of itself is understood or refused by name, before a weight is read; `check` says the same."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from cbatch.errors import Fatal, UsageError
from cbatch.model.loader import locate
from tests.ggufs import save_gguf
from tests.jobs import records, run_job, write_rows
from tests.tiny import TEMPLATE, edit, generate, make_config, make_model, make_tokenizer, save_model

pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.fixture
def folder(tiny_model: Path) -> Path:
    """A copy of the tiny model that a test may edit."""
    return Path(shutil.copytree(tiny_model, "model"))


def add_tensors(folder: Path, **tensors: torch.Tensor) -> None:
    weights = {**load_file(folder / "model.safetensors"), **tensors}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def refused(folder: Path, pattern: str) -> str:
    """Check that a model is refused in one line before its weights are read; the line."""
    with pytest.raises(UsageError, match=pattern) as caught:
        locate(str(folder)).check()
    line = str(caught.value)
    assert line.startswith(f"{folder}: ")
    assert "\n" not in line
    return line


def test_the_tiny_model_is_taken(tiny_model: Path) -> None:
    locate(str(tiny_model)).check()


# Architecture


@pytest.mark.parametrize(
    "architecture",
    [
        "LlamaForSequenceClassification",
        "LlamaModel",
        "LlamaForRewardModel",
        "MistralForCausalLM",
        "LlavaLlamaForCausalLM",
    ],
)
def test_what_is_no_language_model_of_its_type_is_refused(folder: Path, architecture: str) -> None:
    edit(folder / "config.json", architectures=[architecture], tie_word_embeddings=True)
    refused(folder, f"its architecture is {architecture}")


@pytest.mark.parametrize("architectures", [None, [], ["LlamaForCausalLM"], ["LLaMAForCausalLM"]])
def test_what_names_a_language_model_or_nothing_is_taken(folder: Path, architectures: Any) -> None:
    edit(folder / "config.json", architectures=architectures)
    locate(str(folder)).check()


def test_a_classifier_that_names_no_architecture_is_known_by_its_head(folder: Path) -> None:
    edit(folder / "config.json", architectures=None)
    add_tensors(folder, **{"score.weight": torch.ones(1, 32)})
    refused(folder, r"no place for 1 of the tensors, score\.weight among them")


def test_an_embedding_model_is_refused(folder: Path) -> None:
    edit(folder / "modules.json")
    refused(folder, "is an embedding model")


def test_a_model_that_transformers_can_not_generate_with_is_refused(folder: Path) -> None:
    hf.CLIPConfig().save_pretrained(folder)
    refused(folder, "models of type clip ")


# Quantized weights


@pytest.mark.parametrize(
    ("settings", "scheme"),
    [
        ({"quant_method": "gptq", "bits": 4}, "by gptq"),
        ({"quant_method": "awq", "bits": 4}, "by awq"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "by bitsandbytes"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "by compressed-tensors"),
        ({"quant_method": "hqq"}, "by hqq"),
        ({"quant_method": "torchao"}, "by torchao"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "by fp8"),
        ({"quant_method": "mxfp4"}, "by mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "by modelopt"),
        ({"quant_method": "of_tomorrow"}, "by of_tomorrow"),
        ({"bits": 4}, "are quantized"),
        ("gptq", "are quantized"),
    ],
)
@pytest.mark.parametrize("key", ["quantization_config", "compression_config", "quantization"])
def test_a_scheme_of_quantization_is_refused_by_its_name(folder: Path, settings: Any, scheme: str, key: str) -> None:
    edit(folder / "config.json", **{key: settings})
    line = refused(folder, scheme)
    assert f"{key} in config.json" in line
    assert "GGUF" in line


def test_quantization_of_the_text_part_is_found(folder: Path) -> None:
    edit(folder / "config.json", text_config={"quantization_config": {"quant_method": "fp8"}})
    refused(folder, "quantized by fp8")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}),
        ("quantize_config.json", {"bits": 4, "group_size": 128}),
        ("quant_config.json", {"zero_point": True, "w_bit": 4}),
    ],
)
def test_quantization_that_only_a_file_of_its_own_tells_is_found(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(json.dumps(content))
    refused(folder, f"are quantized.*{name}")


@pytest.mark.parametrize("setting", [None, {}])
def test_a_scheme_that_is_none_is_taken(folder: Path, setting: Any) -> None:
    edit(folder / "config.json", quantization_config=setting)
    locate(str(folder)).check()


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "float8_e4m3fn", "float8_e5m2"])
def test_weights_stored_as_what_only_a_scheme_explains_are_refused(folder: Path, dtype: str) -> None:
    add_tensors(folder, **{f"{UP}.weight": torch.ones(48, 32).to(getattr(torch, dtype))})
    refused(folder, rf"{UP}\.weight is stored as [IUF]\w+")
    with pytest.raises(Fatal, match=r"can't load the weights: .* is stored as"):
        locate(str(folder)).load("float32", "cpu", dummy=False)


@pytest.mark.parametrize(
    "suffix",
    [
        "weight_scale",
        "weight_scale_inv",
        "input_scale",
        "scales",
        "qzeros",
        "g_idx",
        "SCB",
        "weight_shape",
        "lora_A.weight",
    ],
)
def test_a_tensor_beside_a_weight_is_never_passed_over(folder: Path, suffix: str) -> None:
    add_tensors(folder, **{f"{UP}.{suffix}": torch.ones(1)})
    refused(folder, rf"no place for 1 of the tensors, {re.escape(UP)}\.{re.escape(suffix)} among them")
    with pytest.raises(Fatal, match=r"can't load the weights: .* no place"):
        locate(str(folder)).load("float32", "cpu", dummy=False)


def test_tensors_that_follow_from_the_configuration_may_be_stored(folder: Path) -> None:
    add_tensors(
        folder,
        **{
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
            "model.layers.0.attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8),
            "model.layers.0.attn.masked_bias": torch.tensor(-1e4),
            "model.position_ids": torch.arange(8),
        },
    )
    files = locate(str(folder))
    files.check()
    files.load("float32", "cpu", dummy=False)


# Weights and settings that do not go together


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"num_hidden_layers": 1}, r"no place for \d+ of the tensors, model\.layers\.1\."),
        ({"num_hidden_layers": 3}, r"\d+ are missing or of another shape, model\.layers\.2\."),
        ({"vocab_size": 299}, r"another shape, (lm_head|model\.embed)"),
        ({"hidden_size": 64}, "another shape"),
        ({"attention_bias": True}, r"are missing .*bias"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": -1}, "."),
        ({"hidden_act": "of_tomorrow"}, "of_tomorrow"),
        ({"rope_scaling": {"type": "of_tomorrow", "factor": 2.0}}, "of_tomorrow"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_attention_heads": 0}, "."),
        ({"hidden_size": "many"}, "."),
        ({"num_key_value_heads": 3}, "."),
        ({"max_position_embeddings": None}, "."),
    ],
)
def test_settings_that_are_not_those_of_the_weights_are_refused(
    folder: Path, settings: dict[str, Any], pattern: str
) -> None:
    edit(folder / "config.json", **settings)
    refused(folder, pattern)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
        ({"logits_scaling": 8.0}, "logits_scaling"),
        ({"alibi": True}, "alibi"),
        ({"rotary_pct": 0.25}, "rotary_pct"),
        ({"clip_qkv": 8.0}, "clip_qkv"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "of_tomorrow": 3.0}}, "of_tomorrow"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "of_tomorrow": 3.0}}, "of_tomorrow"),
    ],
)
def test_a_setting_of_the_arithmetic_that_the_type_does_not_know_is_refused(
    folder: Path, settings: dict[str, Any], key: str
) -> None:
    edit(folder / "config.json", **settings)
    refused(folder, f"{key} = .* changes what a model computes")


def test_neutral_and_unrelated_settings_are_taken(folder: Path) -> None:
    edit(
        folder / "config.json",
        final_logit_softcapping=None,
        embedding_multiplier=1.0,
        alibi=False,
        rope_scaling={"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "finetuned": True},
        ffn_dim_multiplier=1.3,
        use_rotary_pos_emb=True,
        unsloth_version="2024.9",
        torch_dtype="bfloat16",
        pretraining_tp=1,
        _name_or_path="x/y",
    )
    locate(str(folder)).check()


@pytest.mark.parametrize("pad", [300, 10**6, -1, None])
def test_a_pad_token_outside_of_the_vocabulary_does_not_matter(folder: Path, pad: int | None) -> None:
    write_rows([{"prompt": "the rain"}])
    run_job(model="model", output="before.jsonl", max_tokens=4)
    edit(folder / "config.json", pad_token_id=pad)
    assert run_job(model="model", output="after.jsonl", max_tokens=4) == 0
    assert records("after.jsonl") == records("before.jsonl")


def test_an_end_token_outside_of_the_vocabulary_ends_nothing(folder: Path) -> None:
    edit(folder / "config.json", eos_token_id=[2, 300, -1])
    assert locate("model").eos_token_ids == {2}


# Files


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_beside_a_model_is_refused(folder: Path, name: str) -> None:
    (folder / name).write_text("{}")
    refused(folder, f"adapter .{name}.*merge_and_unload")


def test_an_adapter_alone_is_refused() -> None:
    Path("model").mkdir()
    Path("model/adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match="model: holds an adapter"):
        locate("model")


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5\n"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"])
def test_a_pointer_of_git_lfs_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text(LFS)
    refused(folder, f"{name} is a Git LFS pointer.*git lfs pull")


def test_a_pointer_instead_of_a_gguf_file_is_named() -> None:
    Path("model.gguf").write_text(LFS)
    refused(Path("model.gguf"), "Git LFS pointer")


def test_weights_in_pickles_are_refused_with_what_to_do(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, r"pytorch_model\.bin, a pickle.*save_pretrained")


def test_a_gguf_file_in_a_folder_is_to_be_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    for name in ("a.Q4_K_M.gguf", "b.gguf"):
        save_gguf(folder / name)
    refused(folder, r"GGUF files \(2\); name one: -m model/a\.Q4_K_M\.gguf")
    (folder / "config.json").unlink()
    with pytest.raises(UsageError, match=r"no config\.json .*name one: -m model/a\.Q4_K_M\.gguf"):
        locate("model")


@pytest.mark.parametrize(
    ("index", "pattern"),
    [
        ({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}, "2 of 2 files .* are missing"),
        ({"weight_map": {"a": "../other.safetensors"}}, "no safetensors file of this folder"),
        ({"weight_map": {"a": "/etc/passwd"}}, "no safetensors file of this folder"),
        ({"weight_map": {}}, "names no file"),
        ({"weight_map": 5}, "is damaged"),
        ([], "is damaged"),
        ("{", "is damaged"),
    ],
)
def test_an_index_that_names_what_is_not_there_is_refused(folder: Path, index: Any, pattern: str) -> None:
    (folder / "model.safetensors").unlink()
    text = index if isinstance(index, str) else json.dumps(index)
    (folder / "model.safetensors.index.json").write_text(text)
    refused(folder, pattern)


def test_weights_in_several_files_are_taken(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(weights)}
    for file in set(where.values()):
        part = {name: weight for name, weight in weights.items() if where[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    edit(folder / "model.safetensors.index.json", weight_map=where, metadata={})
    locate("model").check()
    (folder / "model-1.safetensors").unlink()
    refused(folder, r"1 of 2 files .* missing, model-1\.safetensors")


# GGUF files


def test_a_gguf_file_is_the_whole_model_whatever_lies_beside_it() -> None:
    model = save_gguf(Path("m.gguf"), TEMPLATE.replace("assistant", "model"))
    write_rows([{"prompt": "the rain in spain"}])
    assert run_job(model="m.gguf", output="alone.jsonl", max_tokens=6, dtype="float32") == 0
    before = locate("m.gguf").fingerprint()
    make_tokenizer("{{ messages[0]['content'] }} other").save_pretrained(".")
    edit(Path("tokenizer_config.json"), eos_token="<|im_start|>", add_bos_token=True)
    edit(Path("generation_config.json"), eos_token_id=list(range(300)))
    edit(Path("special_tokens_map.json"), eos_token="<|im_start|>")
    edit(Path("config.json"), vocab_size=7)
    assert run_job(model="m.gguf", output="beside.jsonl", max_tokens=6, dtype="float32") == 0
    assert locate("m.gguf").fingerprint() == before
    assert records("beside.jsonl") == records("alone.jsonl")
    tokenizer = make_tokenizer(TEMPLATE.replace("assistant", "model"))
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "the rain in spain"}], add_generation_prompt=True, return_dict=False
    )
    expected = generate(model, ids, 6, eos_token_id=2)
    assert records("alone.jsonl")[0]["completion"] == tokenizer.decode(expected, skip_special_tokens=True)


def test_the_ending_of_a_gguf_file_may_be_in_capitals() -> None:
    save_gguf(Path("M.GGUF"))
    files = locate("M.GGUF")
    files.check()
    files.load("float32", "cpu", dummy=False)


def test_the_end_of_a_turn_in_a_gguf_file_ends_a_completion() -> None:
    save_gguf(Path("m.gguf"), metadata={"tokenizer.ggml.eot_token_id": 40, "tokenizer.ggml.eom_token_id": 41})
    assert locate("m.gguf").eos_token_ids == {2, 40, 41}


@pytest.mark.parametrize(
    ("metadata", "pattern"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, r"rope\.scaling\.type is 'linear'"),
        ({"llama.attention.sliding_window": 64}, r"attention\.sliding_window is 64"),
        ({"llama.final_logit_softcapping": 30.0}, "final_logit_softcapping is 30"),
        ({"llama.attention.key_length": 16}, r"attention\.key_length is 16"),
        ({"llama.expert_count": 8}, "expert_count is 8"),
        ({"llama.logit_scale": 0.5}, "logit_scale is 0.5"),
        ({"llama.attention.causal": False}, r"attention\.causal is False"),
        ({"llama.block_count": 10**9}, "block_count is 1000000000"),
        ({"llama.block_count": 1}, "not read as what it is"),
        ({"llama.vocab_size": 299}, "not read as what it is"),
        ({"general.alignment": 0}, "alignment is 0"),
    ],
)
def test_metadata_of_a_gguf_file_that_transformers_passes_over_is_refused(
    metadata: dict[str, Any], pattern: str
) -> None:
    save_gguf(Path("m.gguf"), metadata=metadata)
    refused(Path("m.gguf"), pattern)


@pytest.mark.parametrize("name", ["rope_factors_long.weight", "blk.0.attn_q.bias", "score.weight"])
def test_a_tensor_of_a_gguf_file_that_transformers_passes_over_is_refused(name: str) -> None:
    save_gguf(Path("m.gguf"), tensors={name: [1.0, 2.0, 4.0, 8.0]})
    refused(Path("m.gguf"), "not read as what it is")


def test_the_scaling_of_llama_3_is_read_from_the_factors_of_a_gguf_file() -> None:
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"rope_theta": 500_000.0, "original_max_position_embeddings": 8192}
    plain, scaled = make_config(rope_theta=500_000.0), make_config(rope_parameters=scaling)
    factors = make_model(plain).model.rotary_emb.inv_freq / make_model(scaled).model.rotary_emb.inv_freq
    assert factors.max() == 32
    save_gguf(Path("m.gguf"), metadata={"llama.rope.freq_base": 500_000.0}, tensors={"rope_freqs.weight": factors})
    assert locate("m.gguf").config.rope_parameters == scaling
    write_rows([{"token_ids": list(range(3, 300, 2))}])
    assert run_job(model="m.gguf", output="out.jsonl", max_tokens=6, dtype="float32", ignore_eos=True) == 0
    expected = generate(make_model(scaled), list(range(3, 300, 2)), 6)
    assert records("out.jsonl")[0]["completion"] == make_tokenizer().decode(expected, skip_special_tokens=True)


def test_factors_of_another_scaling_are_refused() -> None:
    save_gguf(Path("m.gguf"), tensors={"rope_freqs.weight": [1.0, 2.0, 4.0, 8.0]})
    refused(Path("m.gguf"), r"rope_freqs\.weight is no scaling of Llama 3\.1")


def test_a_way_to_split_text_that_transformers_does_not_know_is_refused() -> None:
    save_gguf(Path("m.gguf"), split="deepseek-llm")
    refused(Path("m.gguf"), r"tokenizer\.ggml\.pre is 'deepseek-llm'")


def test_a_part_of_a_gguf_file_is_refused() -> None:
    save_gguf(Path("m-00001-of-00003.gguf"))
    refused(Path("m-00001-of-00003.gguf"), "one of 3 parts of a GGUF file.*llama-gguf-split")


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.3, 0.5, 0.9, 0.999])
def test_a_gguf_file_that_is_cut_short_is_refused(share: float) -> None:
    save_gguf(Path("m.gguf"))
    content = Path("m.gguf").read_bytes()
    Path("m.gguf").write_bytes(content[: int(len(content) * share)])
    refused(Path("m.gguf"), "is damaged, or no GGUF file")


def test_the_weights_of_a_gguf_file_are_loaded_as_they_were() -> None:
    model = save_gguf(Path("m.gguf"))
    files = locate("m.gguf")
    files.check()
    loaded = files.load("float32", "cpu", dummy=False)
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    assert loaded.config.eos_token_id == 2


def test_a_saved_reward_model_is_refused() -> None:
    config = make_config(tie_word_embeddings=True, num_labels=1)
    hf.LlamaForSequenceClassification(config).save_pretrained("model")
    make_tokenizer().save_pretrained("model")
    refused(Path("model"), "LlamaForSequenceClassification")


def test_a_model_with_the_same_weights_under_another_prefix_is_taken() -> None:
    save_model(Path("model"), make_config(tie_word_embeddings=True))
    weights = {name.removeprefix("model."): w for name, w in load_file("model/model.safetensors").items()}
    save_file(weights, "model/model.safetensors", metadata={"format": "pt"})
    files = locate("model")
    files.check()
    loaded, made = files.load("float32", "cpu", dummy=False), make_model(make_config(tie_word_embeddings=True))
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), made.parameters(), strict=True))


# Damage


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("config.json", {"architectures": 5}),
        ("config.json", {"architectures": "LlamaForCausalLM"}),
        ("config.json", {"eos_token_id": "</s>"}),
        ("config.json", {"eos_token_id": [[2]]}),
        ("config.json", {"rope_scaling": 5}),
        ("config.json", {"num_experts": {"a": 1}}),
        ("config.json", {"original_max_position_embeddings": "x"}),
        ("config.json", {"model_type": ["llama"]}),
        ("config.json", {"dtype": "of_tomorrow"}),
        ("config.json", {"dtype": "float8_e4m3fn"}),
        ("config.json", {"dtype": 5}),
        ("generation_config.json", {"eos_token_id": {"a": 1}}),
        ("generation_config.json", {"eos_token_id": True}),
        ("tokenizer_config.json", {"eos_token": 5}),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}),
        ("tokenizer.json", {"model": {"type": "of_tomorrow"}}),
        ("tokenizer.json", {"model": None}),
        ("tokenizer.json", {"added_tokens": 7}),
    ],
)
def test_a_setting_of_another_kind_is_refused_in_one_line(folder: Path, file: str, settings: dict[str, Any]) -> None:
    edit(folder / file, **settings)
    refused(folder, "can't read the model's")


def test_what_a_checkpoint_says_is_quoted_as_one_line_that_does_nothing_to_a_terminal(folder: Path) -> None:
    edit(folder / "config.json", model_type="a\nb\x1b[2J")
    line = refused(folder, "models of type ")
    assert line.isprintable()


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe{}", b"[" * 100_000])
def test_a_file_that_holds_no_object_is_refused_in_one_line(folder: Path, file: str, content: bytes) -> None:
    (folder / file).write_bytes(content)
    refused(folder, "can't read the model's")


def test_settings_of_generation_that_cbatch_does_not_use_may_be_anything(folder: Path) -> None:
    edit(folder / "generation_config.json", pad_token_id="<pad>", num_beams=[4])
    write_rows([{"prompt": "the rain"}])
    assert run_job(model="model", output="out.jsonl", max_tokens=2) == 0


def header_of(folder: Path) -> tuple[dict[str, Any], bytes]:
    content = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [2**40, 2**40]},
        {"shape": [-1]},
        {"shape": "32"},
        {"dtype": "F7"},
        {"data_offsets": [0, 2**62]},
        {"data_offsets": [8, 0]},
        {"data_offsets": None},
    ],
)
def test_a_header_that_can_not_be_is_refused_before_anything_is_allocated(folder: Path, change: dict[str, Any]) -> None:
    header, data = header_of(folder)
    header["model.norm.weight"].update(change)
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    refused(folder, r"model\.safetensors is damaged or cut short")


@pytest.mark.parametrize("length", [0, 7, 8, 100, -1])
def test_weights_that_are_cut_short_are_refused(folder: Path, length: int) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:length])
    refused(folder, r"model\.safetensors is damaged or cut short")
