"""How fast this machine moves bytes and multiplies: measured once, then kept in the user's cache."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cbatch.model.fetch import cache_folder

_BYTES = 512 * 1024**2  # read; larger than any cache
_SIDE = {"cpu": 2048, "cuda": 8192}  # of the square matrices


@dataclass(frozen=True)
class Ceilings:
    bytes_per_second: float  # sequential read
    flops: float  # matrix multiplication, in operations a second


def ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings | None:
    """The ceilings of this device at `dtype`; measuring takes about a second. None if there is no memory for that."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    key = f"{name}|{device.type}|{dtype}|{torch.get_num_threads()} threads|torch {torch.__version__}"
    known = _read()
    try:
        return Ceilings(**known[key])
    except (KeyError, TypeError):  # not measured yet, or not by this version
        pass
    try:
        measured = _measure(device, dtype)
    except (RuntimeError, MemoryError):
        return None
    _write({**known, key: asdict(measured)})
    return measured


def _measure(device: torch.device, dtype: torch.dtype) -> Ceilings:
    data = torch.ones(_BYTES // 8, dtype=torch.int64, device=device)
    reading = _fastest(lambda: data.sum(), device)
    side = _SIDE[device.type]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return Ceilings(_BYTES / reading, 2 * side**3 / _fastest(lambda: a @ b, device))


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
    return cache_folder() / "ceilings.json"


def _read() -> dict[str, Any]:
    try:
        known = json.loads(_file().read_text())
    except (OSError, ValueError, RuntimeError):  # none yet, or damaged, or no home folder
        return {}
    return known if isinstance(known, dict) else {}


def _write(known: dict[str, Any]) -> None:
    with suppress(OSError, RuntimeError):  # a cache that can't be written costs a second next time, not this job
        path = _file()
        scratch = path.with_suffix(f".{time.time_ns()}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(known, indent=1))
        scratch.replace(path)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
