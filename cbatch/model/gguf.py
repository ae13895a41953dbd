"""What a GGUF file says of itself: its metadata and its tensors, read without the tensors' data.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from cbatch.errors import UsageError

_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3 = {"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Ways to split text that are GPT-2's, or differ in digits only, which the vocabularies made with them have one by one
_LIKE_GPT2 = [
    "default",
    "gpt-2",
    "gpt2",
    "mpt",
    "olmo",
    "jais",
    "smollm",
    "starcoder",
    "refact",
    "command-r",
    "codeshell",
]
_LIKE_GPT2 += ["exaone", "minerva-7b", "phi-2", "roberta-bpe"]
_MOST_DIMENSIONS = 4  # of a tensor in ggml
_LONGEST_ARRAY = 4096  # numbers; what is longer is passed over, as are all arrays of text


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file, by its ending."""
    return path.suffix.lower() == ".gguf"


class GgufTensor(NamedTuple):
    name: str
    dtype: str  # as ggml names it: F16, Q4_K
    shape: tuple[int, ...]  # in torch's order
    start: int  # of its data in the file
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """The metadata of a GGUF file, long arrays left out, and its tensors."""

    metadata: dict[str, Any]
    tensors: list[GgufTensor]

    @classmethod
    def read(cls, path: Path) -> GgufHeader:
        """UsageError if the file is damaged. What a damaged one claims to hold is never allocated."""
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Parser(content).header()
        except (struct.error, ValueError, KeyError, IndexError, OverflowError) as error:
            raise UsageError(f"{path.name} is damaged, or no GGUF file: {error}") from None

    def check_size(self) -> None:
        """ValueError if the metadata claims more layers than there are tensors: a model of that size is never made."""
        kind = self.metadata.get("general.architecture")
        num_layers = self.metadata.get(f"{kind}.block_count")
        if not isinstance(num_layers, int) or num_layers > len(self.tensors):
            raise ValueError(f"{kind}.block_count is {num_layers!r:.80}, and there are {len(self.tensors)} tensors")


def check_gguf(header: GgufHeader, config: Any, model: Any) -> None:
    """UsageError if transformers passes over something in a GGUF file: `config` and `model` are what it makes of it.

    It maps the metadata that it knows, and drops tensors that it has no name for.
    """
    kind, text = header.metadata.get("general.architecture"), config.get_text_config()
    for key, value in header.metadata.items():
        part, _, setting = key.partition(".")
        if part == kind and (known := _as_read(setting, text)) is not _NOT_ARITHMETIC and not _same(value, known):
            raise UsageError(
                f"its {key} is {value!r:.80}, which transformers reads as {known!r:.80}; name the model's folder instead"
            )
    _check_splits(header)
    stored = sum(prod(tensor.shape) for tensor in header.tensors if tensor.name != _ROPE_FACTORS)
    needed = sum(weight.numel() for weight in model.parameters())
    if stored != needed:
        names = ", ".join(tensor.name for tensor in header.tensors if "." not in tensor.name.removesuffix(".weight"))
        raise UsageError(
            f"it holds {stored:,} weights and {type(model).__name__} takes {needed:,}, so it is not read as what it is "
            f"(tensors outside of layers: {names:.200}); name the model's folder instead"
        )


def _check_splits(header: GgufHeader) -> None:
    """UsageError if transformers would split text in another way than the vocabulary was made for."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as SPLITS
    except ImportError:  # an older version
        return
    split = header.metadata.get("tokenizer.ggml.pre")
    if header.metadata.get("tokenizer.ggml.model") == "gpt2" and split and split not in {*_LIKE_GPT2, *SPLITS}:
        raise UsageError(
            f"its tokenizer.ggml.pre is {split!r:.80}, a way to split text that transformers does not know for GGUF files; "
            "name the model's folder instead"
        )


def set_rope_factors(header: GgufHeader, path: Path, config: Any) -> None:
    """Give a configuration the scaling of Llama 3.1 and later, which a GGUF file holds as a tensor of factors.

    transformers passes over it. UsageError if no such scaling explains the factors.
    """
    import numpy as np

    found = next((tensor for tensor in header.tensors if tensor.name == _ROPE_FACTORS), None)
    if found is None:
        return
    factors = np.fromfile(path, dtype="<f4", count=prod(found.shape), offset=found.start)
    parameters = {**config.rope_parameters, **_LLAMA3, "rope_type": "llama3", "factor": float(factors.max())}
    theta, size = parameters["rope_theta"], 2 * len(factors)
    turns = _LLAMA3["original_max_position_embeddings"] * theta ** (-np.arange(0, size, 2) / size) / (2 * math.pi)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    scaled = ((turns - low) / (high - low)).clip(0, 1)
    expected = 1 / ((1 - scaled) / parameters["factor"] + scaled)
    if found.dtype != "F32" or size != config.head_dim or not np.allclose(factors, expected, rtol=1e-3):
        raise UsageError(f"its {_ROPE_FACTORS} is no scaling of Llama 3.1 or later; name the model's folder instead")
    config.rope_parameters = parameters


def _as_read(setting: str, text: Any) -> Any:
    """The value of a setting of llama.cpp in a configuration of transformers; _NOT_ARITHMETIC where it does not matter."""
    heads = getattr(text, "num_attention_heads", None) or 1
    head_size = getattr(text, "head_dim", None) or getattr(text, "hidden_size", 0) // heads
    rope = getattr(text, "rope_parameters", None) or {}
    if setting.startswith("rope.scaling."):
        neutral = {"type": "none", "finetuned": False, "factor": 1.0, "attn_factor": 1.0}
        return neutral.get(setting.removeprefix("rope.scaling."))
    return {
        "attention.key_length": head_size,
        "attention.value_length": getattr(text, "v_head_dim", None) or head_size,
        "attention.sliding_window": getattr(text, "sliding_window", None),
        "attention.scale": None,
        "attention.clamp_kqv": None,
        "attention.max_alibi_bias": None,
        "attention.causal": True,
        "attn_logit_softcapping": getattr(text, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(text, "final_logit_softcapping", None),
        "router_logit_softcapping": None,
        "logit_scale": None,
        "embedding_scale": None,
        "residual_scale": None,
        "pooling_type": 0,
        "expert_count": getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None),
        "expert_used_count": getattr(text, "num_experts_per_tok", None),
        "rope.freq_base": rope.get("rope_theta", _NOT_ARITHMETIC),
        "rope.dimension_count": int(head_size * rope.get("partial_rotary_factor", 1.0)) if rope else _NOT_ARITHMETIC,
    }.get(setting, _NOT_ARITHMETIC)


def _same(value: Any, known: Any) -> bool:
    if isinstance(value, (int, float)) and isinstance(known, (int, float)):
        return math.isclose(value, known, rel_tol=1e-5)
    return bool(value == known or (not value and not known))


_NOT_ARITHMETIC = object()


class _Parser:
    """Reads one value after another. The file's own size bounds every loop."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._at = content, 0

    def header(self) -> GgufHeader:
        if self._content[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version, num_tensors, num_values = self._take("I"), self._take("Q"), self._take("Q")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}; 2 and 3 can be read")
        metadata = {}
        for _ in range(num_values):
            key = self._string()
            metadata[key] = self._value(self._take("I"))
        found = [self._tensor() for _ in range(num_tensors)]
        return GgufHeader(metadata, self._placed(found, metadata.get("general.alignment", 32)))

    def _take(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self._content, self._at)
        self._at += struct.calcsize(f"<{kind}")
        return value

    def _string(self, keep: bool = True) -> str:
        length = self._take("Q")
        end = self._at + length
        if end > len(self._content):
            raise ValueError("a text in it does not end")
        text = self._content[self._at : end].decode("utf-8", "replace") if keep else ""
        self._at = end
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._take(_FORMATS[kind])
        kind, length = self._take("I"), self._take("Q")
        if kind == _STRING:
            for _ in range(length):
                self._string(keep=False)
            return None
        size = struct.calcsize(f"<{_FORMATS[kind]}") * length
        if self._at + size > len(self._content):
            raise ValueError("an array in it does not end")
        if length > _LONGEST_ARRAY:
            self._at += size
            return None
        return [self._take(_FORMATS[kind]) for _ in range(length)]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, ggml's number of the type, and where the data is, from the end of the header."""
        name, num_dimensions = self._string(), self._take("I")
        if num_dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name!r:.80} has {num_dimensions} dimensions")
        shape = tuple(reversed([self._take("Q") for _ in range(num_dimensions)]))
        return name, shape, self._take("I"), self._take("Q")

    def _placed(self, found: list[tuple[str, tuple[int, ...], int, int]], alignment: Any) -> list[GgufTensor]:
        """The tensors with their places in the file; ValueError if the file ends before one of them."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its alignment is {alignment!r:.80}")
        start, tensors = -(-self._at // alignment) * alignment, []
        for name, shape, kind, offset in found:
            dtype = GGMLQuantizationType(kind)
            block, block_bytes = GGML_QUANT_SIZES[dtype]
            size = prod(shape) // block * block_bytes
            if start + offset + size > len(self._content):
                raise ValueError(f"it ends before tensor {name!r:.80} does: the file is cut short")
            tensors.append(GgufTensor(name, dtype.name, shape, start + offset, size))
        return tensors
