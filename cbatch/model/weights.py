"""How many weights a checkpoint has, from the headers of its files; nothing else of them is read."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path


def num_weights(path: Path) -> int:
    """The number of weights in a folder's safetensors files or in a GGUF file; 0 if there are none to be read."""
    try:
        if path.suffix == ".gguf":
            return _num_in_gguf(path)
        files = sorted(path.glob("model*.safetensors")) or sorted(path.glob("*.safetensors"))
        return sum(map(_num_in_safetensors, files))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # a damaged file; loading it will say more
        return 0


def _num_in_safetensors(path: Path) -> int:
    """A file begins with the length of its header, 8 bytes, little-endian; the header is a JSON object of tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path}: not a safetensors file")
        header = json.loads(file.read(length))
    return sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def _num_in_gguf(path: Path) -> int:
    from gguf import GGUFReader

    return sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors)
