"""Where the replicas of a run are: on which GPUs, or on which CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from cbatch.config import EngineConfig
from cbatch.errors import UsageError
from cbatch.machine import num_cpus, num_gpus, numa_nodes, resolve_device

_T = TypeVar("_T")


@dataclass(frozen=True)
class Place:
    """Where a replica runs: on a GPU, or on a set of CPUs."""

    device: str  # as torch names it: cpu, cuda, cuda:1
    num_threads: int  # for work on CPUs
    cpus: tuple[int, ...] = ()  # that it keeps to; none: wherever the system puts it

    def __str__(self) -> str:
        return self.device if not self.cpus else f"CPU {', '.join(_spans(self.cpus))}"


def find_places(config: EngineConfig) -> list[Place]:
    """A place for each of the replicas that --data-parallel-size asks for; UsageError if there are too few GPUs."""
    device, asked = resolve_device(config.device), config.data_parallel_size
    num_threads = config.threads or num_cpus()
    if asked == "1":
        return [Place(device, num_threads)]
    if device.startswith("cuda"):
        return _on_gpus(config.device, device, num_threads, asked)
    return _on_cpus(num_threads, asked)


def _on_gpus(asked_device: str, device: str, num_threads: int, asked: str) -> list[Place]:
    gpus = [device] if ":" in device else [f"{device}:{index}" for index in range(num_gpus())]
    count = len(gpus) if asked == "auto" else int(asked)
    if count > len(gpus):
        raise UsageError(f"--data-parallel-size {count}: --device {asked_device} is {len(gpus)} GPU(s)")
    return [Place(gpu, max(1, num_threads // count)) for gpu in gpus[:count]]


def _on_cpus(num_threads: int, asked: str) -> list[Place]:
    nodes = numa_nodes()
    count = len(nodes) if asked == "auto" else int(asked)
    num_known = sum(map(len, nodes))
    places = []
    for cpus in share_cpus(nodes, count):
        share = num_threads * len(cpus) // num_known if num_known else num_threads // count
        places.append(Place("cpu", max(1, share), cpus))
    return places


def share_cpus(nodes: Sequence[Sequence[int]], count: int) -> list[tuple[int, ...]]:
    """`count` shares of the CPUs of NUMA nodes, within one node each if that comes out even; empty ones if too few."""
    if count % len(nodes) == 0:
        return [tuple(part) for node in nodes for part in split(node, count // len(nodes))]
    return [tuple(part) for part in split([cpu for node in nodes for cpu in node], count)]


def split(items: Sequence[_T], count: int) -> list[Sequence[_T]]:
    """`count` parts of about the same length, in order."""
    edges = [index * len(items) // count for index in range(count + 1)]
    return [items[start:end] for start, end in pairwise(edges)]


def _spans(cpus: Sequence[int]) -> list[str]:
    """0, 1, 2, 3, 8 -> 0-3, 8."""
    cpus = sorted(cpus)
    starts = [cpu for cpu in cpus if cpu - 1 not in cpus]
    ends = [cpu for cpu in cpus if cpu + 1 not in cpus]
    return [f"{start}-{end}" if start < end else str(start) for start, end in zip(starts, ends, strict=True)]
