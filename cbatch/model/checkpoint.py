"""What a checkpoint says of itself, read completely before any weight is: what cbatch does not understand is refused.

transformers loads what it knows of a checkpoint and passes over the rest; text that is silently wrong comes of that.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cbatch.errors import Fatal, UsageError

FILES = (".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken")  # that a folder's completions depend on
_LFS = b"version https://git-lfs.github.com/spec/"
_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_EMBEDS = ("modules.json", "config_sentence_transformers.json")  # of sentence-transformers
_QUANTIZED = ("quantization_config", "compression_config", "quantization")  # keys of config.json; the last is MLX's
_QUANTIZED_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")  # modelopt, GPTQ, AWQ
_SCHEME = ("quant_method", "quant_algo", "quant_type")
_DTYPES = ("None", "float64", "float32", "float16", "bfloat16")  # that weights are plain numbers of
_SIZES = (  # that cbatch itself calculates with
    *(
        "hidden_size",
        "intermediate_size",
        "head_dim",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    ),
    *("max_position_embeddings", "original_max_position_embeddings"),
    *("num_experts_per_tok", "num_experts", "num_local_experts"),
)
_MOST_LAYERS = 2_000  # of a model that is believed
# Settings that change a model's arithmetic where its type knows them. One that it does not know would be passed over.
_ARITHMETIC = re.compile(
    r"softcap|^(embedding|attention|residual|logits|lm_head|key|mlp)_multipliers?$|logits?_scal|^query_pre_attn_scalar$|"
    r"^(embedding|residual)_scale$|alibi|^rotary_(dim|pct|percent|emb|ndims)|^partial_rotary_factor$|"
    r"^rope_(theta|scaling|ratio|pct|percent|factor|interleave)|clip_qkv|no_rope|nope_layer|att(entio)?n_sink|"
    r"^transformers_weights$|^sliding_window$"
)


@contextmanager
def about(name: str) -> Iterator[None]:
    """Put the model's name before the message of a UsageError."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None


@contextmanager
def reading(what: str, hint: str = "") -> Iterator[None]:
    """Whatever a damaged file raises becomes a UsageError of one line; tokenizers panics with a BaseException."""
    try:
        yield
    except (Fatal, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"can't read the model's {what}: {reason:.400}{hint}") from None


def check_files(path: Path) -> None:
    """UsageError if files of a checkpoint are not there yet, or say that it is no language model of its own."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    for file in files:
        if file.suffix in (*FILES, ".gguf") and _begins_with(file, _LFS):
            raise UsageError(f"{file.name} is a Git LFS pointer, not the file itself: run git lfs pull")
    there = {file.name for file in files}
    if (part := re.search(r"-\d{5}-of-(\d{5})\.gguf$", path.name)) and int(part[1]) > 1:
        raise UsageError(
            f"is one of {int(part[1])} parts of a GGUF file; join them: llama-gguf-split --merge FIRST OUT"
        )
    if adapters := [file for file in _ADAPTERS if file in there]:
        raise UsageError(
            f"holds an adapter ({adapters[0]}), which cbatch does not apply. Merge it into its base model "
            "(merge_and_unload in peft), or remove it to run the base alone"
        )
    if embeds := [file for file in _EMBEDS if file in there]:
        raise UsageError(f"is an embedding model ({embeds[0]}), which generates no text")
    if quantized := [file for file in _QUANTIZED_FILES if file in there]:
        raise UsageError(_is_quantized(read_json(path / quantized[0]), quantized[0]))


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as it is written; UsageError if it can't be believed."""
    config = read_json(folder / "config.json")
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key, value in part.items():
            if "layer" in key and isinstance(value, (int, float)) and value > _MOST_LAYERS:
                raise UsageError(f"can't read the model's configuration: {key} is {value}")
    return config


def check_config(config: dict[str, Any], unsupported: Collection[str]) -> None:
    """UsageError if config.json tells of no language model, or of quantized weights of a type that is not `unsupported`."""
    check_architecture(config)
    if str(config.get("model_type")) not in unsupported:  # else there is a better reason
        check_quantization(config)


def check_quantization(config: dict[str, Any]) -> None:
    """UsageError if config.json names a scheme that the weights are quantized by, for all of a model or a part of it."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in _QUANTIZED:
            if part.get(key):
                raise UsageError(_is_quantized(part[key], f"{key} in config.json"))


def believe(config: Any) -> None:
    """ValueError if a configuration, as transformers reads it, can't be true of a model; a pad token that is none is dropped.

    Nothing is padded here, and transformers would look up a pad token outside of the vocabulary.
    """
    vocab_size = config.get_text_config().vocab_size
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ValueError(f"vocab_size is {vocab_size!r:.80}")
    for key in _SIZES:
        value = getattr(config.get_text_config(), key, None)
        if not all(type(number) in (int, type(None)) for number in (value if isinstance(value, list) else [value])):
            raise ValueError(f"{key} is {value!r:.80}")
    for part in (config, config.get_text_config()):
        if str(getattr(part, "dtype", None)).removeprefix("torch.") not in _DTYPES:
            raise ValueError(f"dtype is {part.dtype!s:.80}")
        if not 0 <= (getattr(part, "pad_token_id", None) or 0) < vocab_size:
            part.pad_token_id = None


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint."""
    with reading("configuration" if file.name == "config.json" else file.name):
        content = json.loads(file.read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"{file.name} holds no JSON object")
        return content


def token_ids(value: Any, name: str) -> list[int]:
    """The ids in a setting that holds one, several or none."""
    ids = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
    if not all(type(token) is int for token in ids):
        raise UsageError(f"can't read the model's configuration: {name} is {value!r:.80}, not a token id")
    return list(ids)


def check_architecture(config: dict[str, Any]) -> None:
    """UsageError if config.json names something else than the language model of its type in transformers.

    A classifier or an embedding model has the same weights but for its head; with tied embeddings none would be missing.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    said, model_type = config.get("architectures") or [], config.get("model_type")
    if not isinstance(said, list):
        raise UsageError(f"can't read the model's configuration: architectures is {said!r:.80}, not a list")
    if not isinstance(model_type, str):
        return  # transformers says what is wrong with it
    known = KNOWN.get(model_type)
    if known is None:
        of_it = "an encoder and a decoder" if config.get("is_encoder_decoder") else ", ".join(map(str, said))
        code = "; custom code that comes with a checkpoint is never run" if config.get("auto_map") else ""
        raise UsageError(f"models of type {model_type} ({of_it:.200}) are no language models of transformers{code}")
    if not said or known in said or any(_names(architecture, model_type) for architecture in said):
        return
    raise UsageError(
        f"its architecture is {', '.join(map(str, said)):.200}, which is not the language model of type "
        f"{model_type} ({known}); a classifier, reward or embedding model generates no text"
    )


def _names(architecture: Any, model_type: str) -> bool:
    """Whether an architecture is the language model of a type in another spelling, as LLaMAForCausalLM is of llama.

    A model for images, too, has its text part in transformers if its type is known as that of a language model.
    """
    named = re.fullmatch(r"(\w+?)(?:ForCausalLM|LMHeadModel|ForConditionalGeneration)", str(architecture))
    return named is not None and _plain(named[1]) == _plain(model_type)


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def check_settings(config: dict[str, Any], known: Any) -> None:
    """UsageError if config.json has a setting of the arithmetic that transformers passes over for this type of model.

    `known`: the configuration as transformers read it. It knows a setting if the code of this type mentions it.
    """
    for part, of_part in ((config, known), (config.get("text_config"), known.get_text_config())):
        if not isinstance(part, dict):
            continue
        scaling = part.get("rope_scaling") or part.get("rope_parameters")
        settings = {key: value for key, value in part.items() if _ARITHMETIC.search(key)}
        if not _slides(part):
            settings.pop("sliding_window", None)
        settings |= {key: scaling[key] for key in scaling if key != "finetuned"} if isinstance(scaling, dict) else {}
        for key in _unmentioned(settings, of_part):
            raise UsageError(
                f"{key} = {settings[key]!r:.80} in config.json changes what a model computes, but models of "
                f"type {known.model_type} in transformers do not know it"
            )


def _slides(config: dict[str, Any]) -> bool:
    """Whether config.json asks for a sliding window that a text can be longer than."""
    window, context = config.get("sliding_window"), config.get("max_position_embeddings")
    is_short = isinstance(window, int) and not (isinstance(context, int) and window >= context)
    return is_short and config.get("use_sliding_window") is not False


def _unmentioned(settings: dict[str, Any], known: Any) -> list[str]:
    """Settings with a value that matters and a name that is nowhere in transformers' code of this type of model."""
    kinds = [kind.__module__ for kind in type(known).__mro__ if kind.__module__.startswith("transformers.mod")]
    files = {Path(str(sys.modules[module].__file__)) for module in kinds}  # the type's own, and that of all rotations
    files |= {file.with_name(file.name.replace("configuration_", "modeling_", 1)) for file in files}
    code = "".join(file.read_text(encoding="utf-8") for file in sorted(files) if file.is_file())
    return [
        key
        for key, value in settings.items()
        if value and (value is True or value != 1) and not re.search(rf"\b{re.escape(key)}\b", code)
    ]


def _is_quantized(settings: Any, where: str) -> str:
    found = settings.get("quantization", settings) if isinstance(settings, dict) else {}
    found = {**settings, **found} if isinstance(found, dict) and isinstance(settings, dict) else {}
    scheme = next((str(found[key]) for key in _SCHEME if found.get(key)), "")
    if not scheme and any(str(key).startswith("load_in_") for key in found):
        scheme = "bitsandbytes"
    return (
        f"its weights are quantized{f' by {scheme:.40}' if scheme else ''} ({where}), which cbatch can't read. Name "
        "the model that it was made from, or a GGUF file of it; --quantization int8 quantizes when a model is loaded"
    )


def _begins_with(file: Path, start: bytes) -> bool:
    with file.open("rb") as content:
        return content.read(len(start)) == start
