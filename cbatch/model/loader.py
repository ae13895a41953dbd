"""Finds a model by path or name, and loads its configuration, tokenizer and weights."""

from __future__ import annotations

import copy
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cbatch.errors import Fatal, UsageError, first_line
from cbatch.model import checkpoint, fetch
from cbatch.model.checkpoint import about, reading
from cbatch.model.gguf import GgufHeader, check_gguf, is_gguf, set_rope_factors
from cbatch.model.tokenizer_files import check_tokenizer, missing_packages
from cbatch.model.weights import stored_tensors

os.environ.setdefault("TQDM_DISABLE", "1")  # transformers draws bars even where nobody can see them
if "OMP_WAIT_POLICY" not in os.environ:
    # How long OpenMP's threads spin for each other, set before torch loads it. By default 30 times longer, and where
    # others keep the CPUs busy that makes a step up to 50 times slower; not spinning at all halves the speed elsewhere.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

_HUB_DESCRIBES = ["*.json", "*.txt", "*.jinja"]
_HUB_FILES = [*_HUB_DESCRIBES, "*.safetensors", "*.model", "*.tiktoken"]
_NOT_DECODERS = {
    "bloom": "ALiBi",
    "mpt": "ALiBi",
    "falcon_mamba": "no attention",
    "gpt_oss": "attention sinks",
    "llama4": "chunked attention",
    "llama4_text": "chunked attention",
}
_GGUF_ENDS = ("eot", "eom")  # of a turn, of a message: beside the end of a text, which the tokenizer names
_BOUND_TO_CONTEXT = ("dynamic", "longrope")  # the rotation of a token depends on the longest sequence of its batch


@dataclass(frozen=True)
class ModelFiles:
    """A model on the local disk; nothing is loaded until it is asked for."""

    name: str  # as the user wrote it
    path: Path  # folder, or a GGUF file

    @property
    def is_gguf(self) -> bool:
        return is_gguf(self.path)

    @contextmanager
    def _where(self) -> Iterator[dict[str, Any]]:
        """Arguments of `from_pretrained` that name the model. Unless told not to run a model's code, it asks standard input.

        A GGUF file is shown alone in a folder: transformers would prefer a tokenizer that lies beside it.
        """
        if not self.is_gguf:
            yield {"pretrained_model_name_or_path": str(self.path), "trust_remote_code": False}
            return
        with tempfile.TemporaryDirectory(prefix="cbatch-gguf-") as folder:
            (Path(folder) / "model.gguf").symlink_to(self.path.absolute())
            yield {"pretrained_model_name_or_path": folder, "gguf_file": "model.gguf", "trust_remote_code": False}

    @cached_property
    def config(self) -> Any:
        from transformers import AutoConfig

        with about(self.name), reading("configuration"), self._where() as where:
            if self.is_gguf:
                self._header.check_size()
            else:
                checkpoint.read_config(self.path)
            config = AutoConfig.from_pretrained(**where)
            checkpoint.believe(config)
            if self.is_gguf:
                set_rope_factors(self._header, self.path, config)
        return config

    @cached_property
    def _header(self) -> GgufHeader:
        """The header of a GGUF file."""
        return GgufHeader.read(self.path)

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        with about(self.name), reading("tokenizer", missing_packages(self.path)), self._where() as where:
            tokenizer = AutoTokenizer.from_pretrained(**where)
            check_tokenizer(tokenizer, self.path / "tokenizer.json")
        return tokenizer

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """The settings in the model's generation_config.json; empty without such a file."""
        file = self.path / "generation_config.json"
        with about(self.name):
            return checkpoint.read_json(file) if file.is_file() else {}

    @property
    def context(self) -> int:
        """Positions that the model can tell apart, in tokens."""
        text = self.config.get_text_config()
        parameters = getattr(text, "rope_parameters", None) or {}
        ropes = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
        for rope in ropes:
            if rope.get("rope_type") in _BOUND_TO_CONTEXT:
                original = rope.get("original_max_position_embeddings") or getattr(
                    text, "original_max_position_embeddings", None
                )
                return int(original or text.max_position_embeddings)
        return int(getattr(text, "max_position_embeddings", None) or 2**20)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """All end-of-sequence ids: of the configuration, the generation configuration and the tokenizer."""
        named = [
            getattr(self.config.get_text_config(), "eos_token_id", None),
            getattr(self.config, "eos_token_id", None),
            self.generation_config.get("eos_token_id"),
            self.tokenizer.eos_token_id,
            *(self._header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _GGUF_ENDS if self.is_gguf),
        ]
        with about(self.name):
            ids = {token for value in named for token in checkpoint.token_ids(value, "eos_token_id")}
        vocabulary = range(self.config.get_text_config().vocab_size)
        return frozenset(token for token in ids if token in vocabulary)

    def check(self, dummy: bool = False) -> None:
        """Refuse by name, before any weight is read, what can't be run. `dummy`: the weights need not be there."""
        with about(self.name):
            checkpoint.check_files(self.path)
            if not self.is_gguf:
                checkpoint.check_config(checkpoint.read_config(self.path), _NOT_DECODERS)
        config = self.config
        with about(self.name):
            self._check_type()
            if not self.is_gguf:
                checkpoint.check_settings(checkpoint.read_config(self.path), config)
            self._check_skeleton(dummy)
        _ = self.eos_token_ids  # reads the tokenizer and the generation configuration

    def _check_type(self) -> None:
        text = self.config.get_text_config()
        reason = _NOT_DECODERS.get(self.config.model_type)
        if getattr(self.config, "is_encoder_decoder", False):
            reason = "an encoder and a decoder"
        other = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if other:
            reason = f"layers of type {', '.join(sorted(other))}"
        if reason:
            raise UsageError(f"models of type {self.config.model_type} ({reason}) are not supported")

    def _check_skeleton(self, dummy: bool) -> None:
        """UsageError if the configuration makes no model that cbatch can run, or the stored tensors are not its weights."""
        from cbatch.model.skeleton import check_attention, check_tensors, skeleton

        model = skeleton(self.config)
        check_attention(model)
        if self.is_gguf:
            check_gguf(self._header, self.config, model)
        elif not dummy:
            check_tensors(model, stored_tensors(self.path))

    def fingerprint(self) -> dict[str, Any]:
        """Digests of the files that completions depend on, by file name.

        Of a large file 256 pieces of 4 KiB are read, evenly spread; a file of the Hub's cache is known by its hash.
        """
        files = [self.path]
        if not self.is_gguf:
            files = [path for path in self.path.iterdir() if path.suffix in checkpoint.FILES and path.is_file()]
            files += self.path.glob("additional_chat_templates/*.jinja")
        digests = {
            str(path.relative_to(self.path.parent if self.is_gguf else self.path)): _digest(path) for path in files
        }
        return {f"model {name}": digest for name, digest in sorted(digests.items())}

    def load(self, dtype: str, device: str, dummy: bool) -> Any:
        """The model in evaluation mode, its attention routed to cbatch. `dtype`: as torch names it."""
        import torch
        from transformers.utils import logging

        from cbatch.model.attention import NAME

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        load = self._with_random_weights if dummy else self._with_weights
        try:
            model = load(device, dtype=getattr(torch, dtype), attn_implementation=NAME)
        except KeyError as error:
            if error.args != (NAME,):
                raise
            kind = self.config.model_type
            raise Fatal(
                f"{self.name}: models of type {kind} have attention of their own, which is not supported"
            ) from None
        except Exception as error:  # damaged files make it fail in many ways
            raise Fatal(f"{self.name}: can't load the weights: {first_line(error)}") from None
        return model.to(device).eval()  # to() does nothing where the weights are there already

    def _with_random_weights(self, device: str, **settings: Any) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(self.config, **settings, trust_remote_code=False)

    def _with_weights(self, device: str, **settings: Any) -> Any:
        """The model with the weights of its files; ValueError if these are not all of its weights, and nothing else."""
        from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

        from cbatch.model.skeleton import misfit

        if self.is_gguf:
            settings["quantization_config"] = GgufConfig(dequantize=True)
        with self._where() as where:
            model, info = AutoModelForCausalLM.from_pretrained(
                **where,
                **settings,
                config=copy.deepcopy(self.config),
                generation_config=GenerationConfig(),  # so that it reads none: what cbatch takes of it, it reads itself
                use_safetensors=True,
                device_map=None if device == "cpu" else {"": device},
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        if problem := misfit(model, {} if self.is_gguf else stored_tensors(self.path), info):
            raise ValueError(problem)
        return model


def locate(name: str) -> ModelFiles:
    """Find a model on disk, or fetch it: a folder, a GGUF file, a built-in name, or the id of a Hub repository."""
    path = Path(name)
    if name in fetch.BUILT_IN and not (path / "config.json").is_file():  # a job's output may have the model's name
        return ModelFiles(name, fetch.built_in(name))
    if path.is_file() and is_gguf(path):
        return ModelFiles(name, path)
    if path.is_dir():
        with about(name):
            _check_has_config(path)
        return ModelFiles(name, path)
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UsageError(f"{name}: no such model: neither a folder, nor a .gguf file, nor the id of a Hub repository")
    return ModelFiles(name, _from_hub(name))


def _from_hub(name: str) -> Path:
    """The folder of a repository of the Hub, fetched if it is not there; its weights only if cbatch can run them."""
    from huggingface_hub import snapshot_download

    for patterns in (_HUB_DESCRIBES, _HUB_FILES):
        try:
            folder = Path(snapshot_download(name, allow_patterns=patterns))
        except Exception as error:
            raise UsageError(f"{name}: can't be fetched from the Hugging Face Hub: {first_line(error)}") from None
        with about(name):
            _check_has_config(folder)
            checkpoint.check_files(folder)
            checkpoint.check_config(checkpoint.read_config(folder), _NOT_DECODERS)
    return folder


def _check_has_config(folder: Path) -> None:
    """UsageError says what a folder without config.json has instead."""
    if not (folder / "config.json").is_file():
        checkpoint.check_files(folder)
        ggufs = sorted(path.name for path in folder.glob("*.gguf"))
        what = f", but GGUF files ({len(ggufs)}); name one: -m {folder / ggufs[0]}" if ggufs else ""
        raise UsageError(f"no config.json in this folder{what}")


def _digest(path: Path) -> str:
    real, size = path.resolve(), path.stat().st_size
    if real.parent.name == "blobs":  # the Hub's cache names files by their content
        return real.name
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        step = max(4096, size // 256)
        for start in range(0, size, step):
            file.seek(start)
            digest.update(file.read(4096))
    return digest.hexdigest()
