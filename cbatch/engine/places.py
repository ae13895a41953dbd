"""Where the engines of a run are to be: on which GPUs, or on which CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

from cbatch.config import EngineConfig
from cbatch.errors import UsageError
from cbatch.machine import num_cpus, num_gpus, numa_nodes, resolve_device

_T = TypeVar("_T")


@dataclass(frozen=True)
class Place:
    """One of the `engines` places of a run."""

    config: EngineConfig  # with the device and the threads of this one
    cpus: tuple[int, ...] = ()  # that it keeps to; none: wherever the system puts it
    engines: int = 1

    def __str__(self) -> str:
        return self.config.device if not self.cpus else f"CPU {', '.join(_spans(self.cpus))}"


def find_places(config: EngineConfig) -> list[Place]:
    """As many as --data-parallel-size says; UsageError if there are not so many GPUs."""
    if config.data_parallel_size == "1":
        return [Place(config)]
    device, asked = resolve_device(config.device), config.data_parallel_size
    return _on_gpus(config, device, asked) if device.startswith("cuda") else _on_cpus(config, asked)


def _on_gpus(config: EngineConfig, device: str, asked: str) -> list[Place]:
    gpus = [device] if ":" in device else [f"{device}:{index}" for index in range(num_gpus())]
    count = len(gpus) if asked == "auto" else int(asked)
    if count > len(gpus):
        raise UsageError(f"--data-parallel-size {count}: --device {config.device} is {len(gpus)} GPU(s)")
    threads = max(1, (config.threads or num_cpus()) // count)
    return [Place(replace(config, device=gpu, threads=threads), engines=count) for gpu in gpus[:count]]


def _on_cpus(config: EngineConfig, asked: str) -> list[Place]:
    nodes = numa_nodes()
    count = len(nodes) if asked == "auto" else int(asked)
    threads, num_known = config.threads or num_cpus(), sum(map(len, nodes))
    places = []
    for cpus in share_cpus(nodes, count):
        share = max(1, threads * len(cpus) // num_known) if num_known else max(1, threads // count)
        places.append(Place(replace(config, device="cpu", threads=share), cpus, count))
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
