"""Finds a model by path or name, and loads its configuration, tokenizer and weights."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cbatch.errors import Fatal, UsageError
from cbatch.model import fetch

os.environ.setdefault("TQDM_DISABLE", "1")  # transformers draws bars even where nobody can see them
if "OMP_WAIT_POLICY" not in os.environ:
    # How long OpenMP's threads spin for each other, set before torch loads it. By default 30 times longer, and where
    # others keep the CPUs busy that makes a step up to 50 times slower; not spinning at all halves the speed elsewhere.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
_FINGERPRINTED = (".safetensors", ".gguf", ".json", ".jinja", ".model", ".txt", ".tiktoken")
_NOT_DECODERS = {
    "bloom": "ALiBi",
    "mpt": "ALiBi",
    "falcon_mamba": "no attention",
    "gpt_oss": "attention sinks",
    "llama4": "chunked attention",
    "llama4_text": "chunked attention",
}
_BOUND_TO_CONTEXT = ("dynamic", "longrope")  # the rotation of a token depends on the longest sequence of its batch


@dataclass(frozen=True)
class ModelFiles:
    """A model on the local disk; nothing is loaded until it is asked for."""

    name: str  # as the user wrote it
    path: Path  # folder, or a GGUF file

    @property
    def _where(self) -> dict[str, Any]:
        """Arguments of `from_pretrained` that name the model. Unless told not to run a model's code, it asks standard input."""
        if self.path.suffix == ".gguf":
            name = {"pretrained_model_name_or_path": str(self.path.parent), "gguf_file": self.path.name}
        else:
            name = {"pretrained_model_name_or_path": str(self.path)}
        return {**name, "trust_remote_code": False}

    @cached_property
    def config(self) -> Any:
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(**self._where)
        except Exception as error:  # a damaged file raises what it likes
            raise UsageError(f"{self.name}: can't read the model's configuration: {_first_line(error)}") from None

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(**self._where)
        except Exception as error:
            raise UsageError(f"{self.name}: can't read the model's tokenizer: {_first_line(error)}") from None

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """The settings in the model's generation_config.json; empty without such a file."""
        from transformers import GenerationConfig

        if not (self.path / "generation_config.json").is_file():
            return {}
        try:
            settings: dict[str, Any] = GenerationConfig.from_pretrained(str(self.path)).to_diff_dict()
        except Exception as error:
            raise UsageError(f"{self.name}: can't read generation_config.json: {_first_line(error)}") from None
        return settings

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
        ids: set[int] = set()
        for value in (
            getattr(self.config.get_text_config(), "eos_token_id", None),
            getattr(self.config, "eos_token_id", None),
            self.generation_config.get("eos_token_id"),
            self.tokenizer.eos_token_id,
        ):
            ids.update(value if isinstance(value, (list, tuple)) else () if value is None else (value,))
        return frozenset(ids)

    def check(self) -> None:
        """Refuse by name, before any weight is read, what can't be run."""
        text = self.config.get_text_config()
        reason = _NOT_DECODERS.get(self.config.model_type)
        if getattr(self.config, "is_encoder_decoder", False):
            reason = "an encoder and a decoder"
        other = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if other:
            reason = f"layers of type {', '.join(sorted(other))}"
        if reason:
            raise UsageError(f"{self.name}: models of type {self.config.model_type} ({reason}) are not supported")

    def fingerprint(self) -> dict[str, Any]:
        """Digests of the files that completions depend on, by file name.

        Of a large file 256 pieces of 4 KiB are read, evenly spread; a file of the Hub's cache is known by its hash.
        """
        files = [self.path] if self.path.is_file() else sorted(p for p in self.path.iterdir() if p.is_file())
        digests = {p.name: _digest(p) for p in files if p.suffix in _FINGERPRINTED}
        return {f"model {name}": digest for name, digest in digests.items()}

    def load(self, dtype: str, device: str, dummy: bool) -> Any:
        """The model in evaluation mode, its attention routed to cbatch. `dtype`: as torch names it."""
        import torch
        from safetensors import SafetensorError
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
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise Fatal(f"{self.name}: can't load the weights: {error}") from None
        return model.to(device).eval()  # to() does nothing where the weights are there already

    def _with_random_weights(self, device: str, **settings: Any) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(self.config, **settings, trust_remote_code=False)

    def _with_weights(self, device: str, **settings: Any) -> Any:
        """The model with the weights of its files; ValueError if some of them are missing."""
        from transformers import AutoModelForCausalLM, GgufConfig

        if self.path.suffix == ".gguf":
            settings["quantization_config"] = GgufConfig(dequantize=True)
        model, info = AutoModelForCausalLM.from_pretrained(
            **self._where,
            **settings,
            use_safetensors=True,
            device_map=None if device == "cpu" else {"": device},
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        unset = [*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])]
        if unset:  # transformers leaves them random
            raise ValueError(f"{len(unset)} are missing or of another shape, {min(unset)} among them")
        return model


def locate(name: str) -> ModelFiles:
    """Find a model on disk, or fetch it: a folder, a GGUF file, a built-in name, or the id of a Hub repository."""
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        if path.is_dir() and not (path / "config.json").is_file():
            raise UsageError(f"{name}: no config.json in this folder")
        return ModelFiles(name, path)
    if name in fetch.BUILT_IN:
        return ModelFiles(name, fetch.built_in(name))
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UsageError(f"{name}: no such model: neither a folder, nor a .gguf file, nor the id of a Hub repository")
    from huggingface_hub import snapshot_download

    try:
        return ModelFiles(name, Path(snapshot_download(name, allow_patterns=_HUB_FILES)))
    except Exception as error:
        raise UsageError(f"{name}: can't be fetched from the Hugging Face Hub: {_first_line(error)}") from None


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


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
