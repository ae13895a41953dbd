"""How fast this machine moves bytes and multiplies: measured once, then kept in the user's cache."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from cbatch.model.fetch import cache_folder

_BYTES = 512 * 1024**2  # read; larger than any cache
_SIDE = {"cpu": 2048, "cuda": 8192}  # of the square matrices


@dataclass(frozen=True)
class Ceilings:
    bytes_per_second: float  # sequential read
    flops: float  # matrix multiplication, in operations a second


def ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """The ceilings of this device at `dtype`; measuring takes about a second."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    key = f"{name}|{device.type}|{dtype}|{torch.get_num_threads()} threads|torch {torch.__version__}"
    path = cache_folder() / "ceilings.json"
    known = _read(path)
    if key not in known:
        known[key] = asdict(_measure(device, dtype))
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{time.time_ns()}.tmp")
        scratch.write_text(json.dumps(known, indent=1))
        scratch.replace(path)
    return Ceilings(**known[key])


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


def _read(path: Path) -> dict[str, dict[str, float]]:
    try:
        known: dict[str, dict[str, float]] = json.loads(path.read_text())
    except (OSError, ValueError):  # none yet, or not readable: measure again
        return {}
    return known


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
