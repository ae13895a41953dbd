"""Facts about the machine and about the part of it that this process may use: CPUs, memory, NUMA nodes, GPUs.

`root` is the folder under which /proc and /sys lie; only tests name another one. Imports no torch by itself.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

from cbatch import __version__
from cbatch.errors import UsageError

_ROOT = Path("/")


def versions() -> dict[str, str]:
    """The versions of what completions depend on beside a job's settings."""
    packages = ("torch", "transformers", "tokenizers", "jinja2")
    found = {name: version(name) for name in packages}
    return {"cbatch": __version__, "python": platform.python_version(), **found}


# CPUs


def allowed_cpus() -> list[int]:
    """The CPUs that this process may run on; empty where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def num_cpus(root: Path = _ROOT) -> int:
    """How many CPUs this process may keep busy: those it may run on, within the quotas of its cgroups."""
    return max(1, min([len(allowed_cpus()) or os.cpu_count() or 1, *_cpu_quotas(root)]))


def numa_nodes(root: Path = _ROOT) -> list[list[int]]:
    """The CPUs that this process may run on, node by node, those of a core side by side; one node if none is known."""
    system, allowed = root / "sys/devices/system", allowed_cpus()
    nodes = []
    for path in sorted(system.glob("node/node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:])):
        cpus = [cpu for cpu in _cpu_list(path.read_text()) if cpu in allowed]
        nodes.append(sorted(cpus, key=lambda cpu: (_first_of_core(system, cpu), cpu)))
    return [node for node in nodes if node] or [allowed]


def cpu_name(root: Path = _ROOT) -> str:
    """The manufacturer's name for this CPU, as far as the system knows it."""
    lines = _lines(root / "proc/cpuinfo")
    if not lines:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def cpu_has_bfloat16(root: Path = _ROOT) -> bool:
    """Whether this CPU multiplies bfloat16 (AVX512-BF16, AMX, or Arm's bf16)."""
    words = {word for line in _lines(root / "proc/cpuinfo") for word in line.split()}
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(words)


def _first_of_core(system: Path, cpu: int) -> int:
    """The first of the CPUs (hardware threads) that share a core with this one."""
    siblings = "".join(_lines(system / f"cpu/cpu{cpu}/topology/thread_siblings_list"))
    return _cpu_list(siblings)[0] if siblings else cpu


def _cpu_list(text: str) -> list[int]:
    """0-3,8 -> 0, 1, 2, 3, 8."""
    bounds = [span.split("-") for span in text.strip().split(",") if span]
    return [cpu for span in bounds for cpu in range(int(span[0]), int(span[-1]) + 1)]


# Memory


def available_memory(root: Path = _ROOT) -> int:
    """Bytes of memory this process may still take: what the machine has free, within the limits of its cgroups."""
    lines = _lines(root / "proc/meminfo")
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    if free is None:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return min([free, *_memory_left(root)])


# Cgroups, with which Slurm, systemd and containers limit what a process may use. Version 2 has one tree for everything,
# version 1 a tree for each controller. https://docs.kernel.org/admin-guide/cgroup-v2.html


def _cgroups(controller: str, root: Path) -> list[Path]:
    """Folders of this process's cgroups with this controller, each followed by its ancestors up to the root's.

    A container may see its own cgroup as the root, and a path that is none of its own: folders need not exist.
    """
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        folder = base / path.lstrip("/")
        found += [place for place in (folder, *folder.parents) if place.is_relative_to(base)]
    return found


def _cpu_quotas(root: Path) -> list[int]:
    """CPUs' worth of time, rounded up, that each cgroup from this process's up to the root grants."""
    quotas = []
    for folder in _cgroups("cpu", root):
        words = " ".join(_lines(folder / "cpu.max")).split()  # quota and period in microseconds, or max and period
        if not words:
            words = [*_lines(folder / "cpu.cfs_quota_us"), *_lines(folder / "cpu.cfs_period_us")]
        if len(words) == 2 and words[0] != "max" and int(words[0]) > 0:  # -1: no quota, in version 1
            quotas.append(-(-int(words[0]) // int(words[1])))
    return quotas


def _memory_left(root: Path) -> list[int]:
    """Bytes left under each memory limit from this process's cgroup up to the root."""
    left = []
    for folder in _cgroups("memory", root):
        values = [*_lines(folder / "memory.max"), *_lines(folder / "memory.current")]
        if not values:
            values = [*_lines(folder / "memory.limit_in_bytes"), *_lines(folder / "memory.usage_in_bytes")]
        if len(values) == 2 and values[0] != "max":
            stat = _lines(folder / "memory.stat")
            droppable = sum(int(line.split()[1]) for line in stat if line.startswith("inactive_file "))
            left.append(max(0, int(values[0]) - int(values[1]) + droppable))
    return left


# GPUs


def resolve_device(device: str) -> str:
    """auto -> cuda if there is a GPU, else cpu; UsageError if this machine has no such device, or it is too old."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"--device must be auto, cpu or cuda, not {device!r}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"--device {device}: torch sees no GPU on this machine")
    if device.startswith("cuda") and not torch.version.hip and torch.cuda.get_device_capability(device) < (8, 0):
        raise UsageError(
            f"{device_name(device)}: has no matrix units for bfloat16, which need compute capability 8.0; "
            "use --device cpu"
        )
    return device


def device_name(device: str) -> str:
    """The manufacturer's name for a device: cpu, cuda or cuda:N."""
    import torch

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu_name()


def num_gpus() -> int:
    """GPUs that this process sees."""
    import torch

    return torch.cuda.device_count()


def gpu_memory(device: str) -> tuple[int, int]:
    """Bytes of a GPU's memory: free, and in all."""
    import torch

    return torch.cuda.mem_get_info(device)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not on this system
        return []
