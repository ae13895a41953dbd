"""The tensors that a checkpoint stores, from the headers of its files; nothing else of them is read."""

from __future__ import annotations

import json
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import NamedTuple

from cbatch.errors import UsageError, first_line
from cbatch.model.gguf import GgufHeader, is_gguf

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Stored(NamedTuple):
    """A tensor in a file: its type as the format names it (BF16, F8_E4M3, Q4_K), and its shape in torch's order."""

    dtype: str
    shape: tuple[int, ...]


def stored_tensors(path: Path) -> dict[str, Stored]:
    """The tensors in a folder's safetensors files or in a GGUF file, by name; UsageError if they can't be read."""
    if is_gguf(path):
        return {tensor.name: Stored(tensor.dtype, tensor.shape) for tensor in GgufHeader.read(path).tensors}
    tensors: dict[str, Stored] = {}
    for file in weight_files(path):
        tensors.update(_in_safetensors(file))
    return tensors


def num_weights(path: Path) -> int:
    """The number of weights in a folder's safetensors files or in a GGUF file; 0 if there are none to be read."""
    with suppress(UsageError, OSError):  # loading it says more
        return sum(prod(tensor.shape) for tensor in stored_tensors(path).values())
    return 0


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up a folder's weights; UsageError says what is there instead."""
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if (folder / _INDEX).is_file():
        return _indexed(folder)
    there = sorted(path.name for path in folder.iterdir() if path.is_file())
    if ggufs := [name for name in there if name.endswith(".gguf")]:
        raise UsageError(
            f"no {_SINGLE} in this folder, but GGUF files ({len(ggufs)}); name one: -m {folder / ggufs[0]}"
        )
    if pickled := [name for name in there if name.endswith(_PICKLED)]:
        raise UsageError(
            f"its weights are in {pickled[0]}, a pickle, which can run code when it is read; cbatch reads {_SINGLE} "
            "only. Load it with transformers where you trust it, and save_pretrained it"
        )
    raise UsageError(f"no weights: neither {_SINGLE} nor {_INDEX} is in this folder")


def _indexed(folder: Path) -> list[Path]:
    """The files that an index names."""
    try:
        index = json.loads((folder / _INDEX).read_bytes())
        names = sorted({str(name) for name in index["weight_map"].values()})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(f"{_INDEX} is damaged: {first_line(error)}") from None
    if strange := [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]:
        raise UsageError(f"{_INDEX} names {strange[0]!r:.80}, which is no safetensors file of this folder")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise UsageError(
            f"{len(missing)} of {len(names)} files that {_INDEX} names are missing, {missing[0]} among them"
        )
    if not names:
        raise UsageError(f"{_INDEX} names no file")
    return [folder / name for name in names]


def _in_safetensors(file: Path) -> dict[str, Stored]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 no mapping
            return {name: Stored(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise UsageError(f"{file.name} is damaged or cut short: {first_line(error)}") from None
