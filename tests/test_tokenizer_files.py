"""A tokenizer is the one that the files of its checkpoint describe, or the model is refused in one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cbatch.errors import UsageError
from cbatch.model.loader import locate
from tests.ggufs import save_gguf
from tests.tiny import edit

pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.fixture
def folder(tiny_model: Path) -> Path:
    return Path(shutil.copytree(tiny_model, "model"))


def refused(pattern: str) -> None:
    with pytest.raises(UsageError, match=f"model: can't read the model's tokenizer: .*{pattern}") as caught:
        locate("model").check()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["BertTokenizer", "GemmaTokenizer", "CodeLlamaTokenizer", "T5Tokenizer"])
def test_a_class_that_makes_another_tokenizer_of_the_file_is_refused(folder: Path, name: str) -> None:
    edit(folder / "tokenizer_config.json", tokenizer_class=name)
    refused("")


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "PreTrainedTokenizerFast", "LlamaTokenizerFast", "OfTomorrow", None])
def test_a_class_that_makes_the_same_tokenizer_is_taken(folder: Path, name: str | None) -> None:
    before = locate("model").tokenizer.encode("the rain, 1984")
    edit(folder / "tokenizer_config.json", tokenizer_class=name)
    files = locate("model")
    files.check()
    assert files.tokenizer.encode("the rain, 1984") == before


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast"])
def test_a_tokenizer_without_a_vocabulary_is_refused(folder: Path, name: str) -> None:
    (folder / "tokenizer.json").unlink()
    edit(folder / "tokenizer_config.json", tokenizer_class=name)
    refused("there is no tokenizer.json")


@pytest.mark.parametrize("file", ["tokenizer.model", "qwen.tiktoken"])
def test_a_tokenizer_that_needs_a_missing_package_says_which(
    folder: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbatch.model.tokenizer_files.find_spec", lambda _: None)
    (folder / "tokenizer.json").unlink()
    (folder / file).write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\2")
    edit(folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    packages = {"tokenizer.model": "sentencepiece protobuf", "qwen.tiktoken": "tiktoken"}[file]
    refused(f"there is no tokenizer.json, and {file} needs: pip install {packages}")


def test_a_vocabulary_for_other_texts_is_taken(folder: Path) -> None:
    proteins = Tokenizer(
        models.WordLevel({"<unk>": 0, "<eos>": 1, **{c: i + 2 for i, c in enumerate("ACDEFG")}}, "<unk>")
    )
    proteins.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=proteins, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    locate("model").check()


def test_the_tokenizer_of_a_gguf_file_is_taken() -> None:
    save_gguf(Path("m.gguf"))
    files = locate("m.gguf")
    files.check()
    assert files.tokenizer.decode(files.tokenizer.encode("the rain, 1984")) == "the rain, 1984"
