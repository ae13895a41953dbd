"""How fast this machine moves bytes and multiplies: measured once, then kept in the user's cache.

python -m cbatch.model.ceilings DEVICE DTYPE THREADS     measures again, and prints the result as JSON
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from cbatch.errors import UsageError
from cbatch.machine import device_name
from cbatch.model.cache import code_folder

_BYTES = 512 * 1024**2  # read; larger than any cache
_BLOCK = 16 * 1024  # bytes that lie together in a KV cache
_SIDE = 8192  # of the square matrices on a GPU
_STEP = 256  # tokens in a step on a CPU
_WIDTHS = ((1536, 576), (2048, 2048), (4096, 4096))  # of weights: to, from
_UNBELIEVABLE = 1e18  # bytes or operations a second
_WEIGHT_BYTES = 64 * 1024**2  # more than caches hold


@dataclass(frozen=True)
class Ceilings:
    bytes_per_second: float  # sequential read
    block_bytes_per_second: float  # blocks of 16 KiB, in random order
    flops: float  # matrix multiplication, in operations a second


def ceilings(device: str, dtype: str, anew: bool = False) -> Ceilings | None:
    """The ceilings of a device at a precision, both by torch's names for them; None if there is no memory to measure in.

    Measuring takes about two seconds.
    """
    kind = torch.device(device).type
    key = f"{device_name(device)}|{kind}|torch.{dtype}|{torch.get_num_threads()} threads|torch {torch.__version__}"
    known = _read()
    if not anew and (found := _as_ceilings(known.get(key))):
        return found
    try:
        measured = _measure(torch.device(device), getattr(torch, dtype))
    except (RuntimeError, MemoryError):
        return None
    _write({**known, key: asdict(measured)})
    return measured


def _as_ceilings(entry: Any) -> Ceilings | None:
    """An entry of the file; None if it is not there, of another version, or holds what can't be measured."""
    names = {field.name for field in fields(Ceilings)}
    if not isinstance(entry, dict) or entry.keys() != names:
        return None
    if not all(type(value) in (int, float) and 0 < value < _UNBELIEVABLE for value in entry.values()):
        return None
    return Ceilings(**entry)


def _measure(device: torch.device, dtype: torch.dtype) -> Ceilings:
    on_gpu = device.type == "cuda"
    flops = _square(device, dtype) if on_gpu else max(_linear(n, k, dtype) for n, k in _WIDTHS)
    return Ceilings(*_reading(device), flops)


def _reading(device: torch.device) -> tuple[float, float]:
    """Bytes a second: in order, and by blocks in random order."""
    blocks = torch.ones(_BYTES // _BLOCK, _BLOCK // 4, device=device)
    order = torch.randperm(len(blocks), device=device)
    in_order = _BYTES / _fastest(lambda: blocks.sum(), device)
    if device.type == "cuda":  # writes as much as it reads
        return in_order, 2 * _BYTES / _fastest(lambda: blocks.index_select(0, order), device)
    bags = torch.arange(0, len(blocks), 128)  # each is summed into one block, so that almost nothing is written
    return in_order, _BYTES / _fastest(lambda: functional.embedding_bag(order, blocks, bags, mode="sum"), device)


def _square(device: torch.device, dtype: torch.dtype) -> float:
    a, b = (torch.randn(_SIDE, _SIDE, device=device).to(dtype) for _ in range(2))
    return 2 * _SIDE**3 / _fastest(lambda: a @ b, device)


@torch.inference_mode()
def _linear(n: int, k: int, dtype: torch.dtype) -> float:
    """Operations a second of linear layers [n, k] on a step's tokens, their weights packed where oneDNN can do that."""
    x = torch.randn(_STEP, k).to(dtype)
    weights = [torch.randn(n, k).to(dtype) for _ in range(-(-_WEIGHT_BYTES // (n * k * dtype.itemsize)))]
    work = 2 * _STEP * n * k * len(weights)
    rate = work / _fastest(lambda: [functional.linear(x, w) for w in weights], x.device)
    with suppress(AttributeError, RuntimeError):  # not built in, or not for this type on this CPU
        mkldnn = torch.ops.mkldnn
        packed = [mkldnn._reorder_linear_weight(w, _STEP) for w in weights]
        seconds = _fastest(lambda: [mkldnn._linear_pointwise(x, w, None, "none", [], "") for w in packed], x.device)
        rate = max(rate, work / seconds)
    return rate


def _fastest(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of several calls."""
    times = []
    for _ in range(6):
        started_at = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started_at)
    return min(times)


def _file() -> Path:
    return code_folder() / "ceilings.json"


def _read() -> dict[str, Any]:
    try:
        known = json.loads(_file().read_text())
    except (OSError, ValueError, RecursionError, UsageError):  # none yet, or damaged, or no place for it
        return {}
    return known if isinstance(known, dict) else {}


def _write(known: dict[str, Any]) -> None:
    with suppress(OSError, UsageError):  # a cache that can't be written costs a second next time, not this job
        path = _file()
        scratch = path.with_suffix(f".{time.time_ns()}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(known, indent=1))
        scratch.replace(path)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]))
    found = ceilings(sys.argv[1], sys.argv[2], anew=True)
    print(json.dumps(asdict(found) if found else {}))
