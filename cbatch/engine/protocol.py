"""The face of an engine, whether there is one or many, and the messages to and from one in another process.

Plain values only, without torch.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

from cbatch.rows.request import Completion, Request
from cbatch.watch.stats import EngineStats


class Requests(Protocol):
    """A source of requests."""

    @property
    def ended(self) -> bool:
        """Whether no request will come any more."""

    def take(self, wait: bool) -> Request | None:
        """The next request; None if there is none now. With `wait`, a request has a moment to come."""


class Until(Protocol):
    """A time limit, asked before each step."""

    @property
    def is_near(self) -> bool:
        """Whether no more sequences may start."""

    @property
    def is_past(self) -> bool:
        """Whether not one more step may start."""


@dataclass(frozen=True)
class Facts:
    """Properties of an engine, or of each of several equal ones."""

    device: str  # as torch names it: cpu, cuda:1
    dtype: str  # of the model, as torch names it: bfloat16
    max_num_seqs: int
    capacity: int  # tokens that the KV cache holds
    max_model_len: int
    has_eos: bool  # the model names an end-of-sequence token
    notes: tuple[str, ...]  # for the user: features that this engine lacks, and why
    num_replicas: int = 1

    @property
    def device_type(self) -> str:
        """The device without its index: cpu, cuda."""
        return self.device.partition(":")[0]

    @property
    def longest_row(self) -> int:
        """The most tokens that a row can have, prompt and completion together."""
        return min(self.capacity, self.max_model_len)


class AnyEngine(Protocol):
    """One engine or many: turns requests into completions."""

    @property
    def facts(self) -> Facts: ...

    @property
    def has_unfinished(self) -> bool:
        """Whether a request that was taken has no completion yet."""

    def generate(self, requests: Requests, until: Until) -> Generator[Completion, None, None]:
        """Yield a completion for each request, or only for those that finish in time, in the order of finishing."""


@dataclass(frozen=True, slots=True)
class Orders:
    """A message to a replica: requests to run, and how much time is left (see `Until`)."""

    requests: list[Request]
    is_near: bool = False
    is_past: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """A message from a replica, after a step."""

    completions: list[Completion]
    num_running: int  # sequences
    stats: EngineStats | None = None  # of all steps so far; now and then
