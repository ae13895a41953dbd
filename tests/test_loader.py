from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3TextConfig

from cbatch.errors import Fatal, UsageError
from cbatch.model.loader import ModelFiles, locate
from tests.tiny import edit, make_config, save_model


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may edit."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


# End-of-sequence tokens


def test_end_tokens_are_those_of_all_three_files(folder: Path) -> None:
    edit(folder / "config.json", eos_token_id=[2, 40])
    edit(folder / "generation_config.json", eos_token_id=[0, 41])
    edit(folder / "tokenizer_config.json", eos_token="<|im_start|>")
    assert locate(str(folder)).eos_token_ids == {0, 1, 2, 40, 41}


def test_generation_config_does_not_replace_the_end_of_the_tokenizer(folder: Path) -> None:
    edit(folder / "config.json", eos_token_id=None)
    edit(folder / "generation_config.json", eos_token_id=0)
    assert locate(str(folder)).eos_token_ids == {0, 2}


def test_no_generation_config_at_all(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=33)
    assert locate(str(folder)).eos_token_ids == {2, 33}


def test_a_model_without_any_end_token(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=None)
    edit(folder / "tokenizer_config.json", eos_token=None)
    assert locate(str(folder)).eos_token_ids == frozenset()


def test_a_damaged_generation_config_is_said_to_be_so(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(UsageError, match="generation"):
        _ = locate(str(folder)).eos_token_ids


def test_sampling_settings_in_generation_config_are_read_as_they_are(folder: Path) -> None:
    edit(folder / "generation_config.json", temperature=0.6, top_p=0.9, do_sample=False)
    settings = locate(str(folder)).generation_config
    assert (settings["temperature"], settings["top_p"]) == (0.6, 0.9)


# Names


@pytest.mark.parametrize("name", ["no-such-model", "./no/such", "/no/such/folder", "~/no-such-folder", "a/b/c", ""])
def test_a_name_that_means_nothing_is_refused_with_what_it_could_be(name: str) -> None:
    with pytest.raises(UsageError, match=r"no such model|no config\.json"):
        locate(name)


@pytest.mark.usefixtures("empty_folder")
def test_a_built_in_model_is_meant_where_a_folder_of_its_name_holds_none(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbatch.model.fetch.built_in", lambda _: Path("fetched"))
    name = "smollm2-135m"
    Path(name, ".cbatch").mkdir(parents=True)  # the output of a job
    assert locate(name).path == Path("fetched")
    with pytest.raises(UsageError, match=r"\./smollm2-135m: no config\.json"):
        locate(f"./{name}")
    shutil.copytree(tiny_model, name, dirs_exist_ok=True)
    assert locate(name).path == locate(f"./{name}").path == Path(name)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        locate(str(tmp_path))


def test_a_repository_that_cannot_be_fetched_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError, match="somebody/something: can't be fetched") as caught:
        locate("somebody/something")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match="no such model"):
        locate(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model" * 100])
def test_a_damaged_gguf_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    files = locate(str(tmp_path / "m.gguf"))
    assert files.path == tmp_path / "m.gguf"
    assert files.generation_config == {}
    with pytest.raises(UsageError, match="is damaged, or no GGUF file"):
        _ = files.config


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model_type": "no_such_type"}'])
def test_a_damaged_configuration_is_refused(content: str, folder: Path) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(UsageError, match="can't read the model's configuration"):
        _ = locate(str(folder)).config


def test_a_missing_tokenizer_is_refused(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UsageError, match="can't read the model's tokenizer"):
        _ = locate(str(folder)).tokenizer


@pytest.mark.parametrize("content", [None, b"", b"damaged" * 100])
def test_missing_or_damaged_weights_are_refused(content: bytes | None, folder: Path) -> None:
    weights = folder / "model.safetensors"
    if content is None:
        weights.unlink()
    else:
        weights.write_bytes(content)
    with pytest.raises(Fatal, match="can't load the weights"):
        locate(str(folder)).load("float32", "cpu", dummy=False)


def test_weights_that_do_not_belong_to_the_configuration_are_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    missing = {name: value for name, value in weights.items() if "layers.1.mlp" not in name}
    save_file(missing, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Fatal, match=r"layers\.1\.mlp"):
        locate(str(folder)).load("float32", "cpu", dummy=False)


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    edit(folder / "config.json", intermediate_size=64)
    with pytest.raises(Fatal, match=r"can't load the weights: .* another shape, .*mlp"):
        locate(str(folder)).load("float32", "cpu", dummy=False)


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    save_model(tmp_path, make_config(tie_word_embeddings=True))
    model = locate(str(tmp_path)).load("float32", "cpu", dummy=False)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


# Precision and device


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_model_loads_in_the_dtype_asked_for(dtype: str, tiny_model: Path) -> None:
    model = locate(str(tiny_model)).load(dtype, "cpu", dummy=False)
    assert {weight.dtype for weight in model.parameters()} == {getattr(torch, dtype)}
    assert not model.training


def test_dummy_weights_need_no_checkpoint_and_are_the_same_each_time(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    first, second = (locate(str(folder)).load("float32", "cpu", dummy=True) for _ in range(2))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


# Context


def test_the_context_is_the_models_own(tmp_path: Path) -> None:
    for config, context in (
        (make_config(max_position_embeddings=77), 77),
        (make_config(Gemma3TextConfig, max_position_embeddings=99), 99),
        (
            make_config(
                rope_parameters={
                    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
                    "original_max_position_embeddings": 128,
                }
            ),
            512,
        ),
    ):
        config.save_pretrained(tmp_path)
        assert ModelFiles("m", tmp_path).context == context


# Fingerprint


def test_the_fingerprint_is_the_same_in_another_place_and_at_another_time(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    for file in other.iterdir():
        os.utime(file, (1, 1))
    assert locate(str(folder)).fingerprint() == locate(str(other)).fingerprint()


def test_the_fingerprint_shows_a_changed_weight(folder: Path) -> None:
    before = locate(str(folder)).fingerprint()
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    after = locate(str(folder)).fingerprint()
    assert {name for name in before if before[name] != after[name]} == {"model model.safetensors"}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "merges.txt"])
def test_the_fingerprint_shows_other_changes_that_matter(name: str, folder: Path) -> None:
    (folder / "merges.txt").write_text("a b\n")
    before = locate(str(folder)).fingerprint()
    assert f"model {name}" in before
    (folder / name).write_text((folder / name).read_text() + " ")
    after = locate(str(folder)).fingerprint()
    assert {key for key in before if before[key] != after[key]} == {f"model {name}"}


def test_the_fingerprint_ignores_what_is_no_part_of_the_model(folder: Path) -> None:
    before = locate(str(folder)).fingerprint()
    (folder / "README.md").write_text("hello")
    (folder / "logs").mkdir()
    (folder / "model.Q4.gguf").write_bytes(b"GGUF")
    assert locate(str(folder)).fingerprint() == before


def test_the_fingerprint_shows_templates_in_a_folder_of_their_own(folder: Path) -> None:
    before = locate(str(folder)).fingerprint()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    after = locate(str(folder)).fingerprint()
    assert after.keys() - before.keys() == {"model additional_chat_templates/tool_use.jinja"}


def test_large_files_are_sampled_from_beginning_to_end(tmp_path: Path) -> None:
    path, size = tmp_path / "model.gguf", 20 * 1024**2
    path.write_bytes(bytes(size))
    before = ModelFiles("m", path).fingerprint()
    seen = 0
    for share in range(16):
        data = bytearray(size)
        start = share * size // 16
        data[start : start + size // 16] = b"\1" * (size // 16)
        path.write_bytes(data)
        seen += ModelFiles("m", path).fingerprint() != before
    assert seen == 16


def test_a_cached_file_of_the_hub_is_known_by_its_name(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / "0123abc"
    blob.parent.mkdir()
    blob.write_bytes(b"anything")
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(blob)
    assert ModelFiles("m", snapshot).fingerprint() == {"model model.safetensors": "0123abc"}
