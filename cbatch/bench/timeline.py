"""The timeline of a run: sequences in the batch and tokens a second, for each piece of its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from cbatch.bench.contender import Outcome

_PIECES = 120  # at most


@dataclass(frozen=True)
class Piece:
    """A stretch of a run's time in which at least one step began."""

    start: float  # seconds since the first step
    end: float
    occupancy: float  # mean number of sequences in a step
    tokens_per_second: float  # output tokens


def timeline(outcome: Outcome) -> list[Piece]:
    """The pieces of a run of cbatch, from the counters in its progress lines."""
    figures = outcome.figures
    marks = [_mark(counters, counters["seconds"] - counters["to_first_step"]) for counters in outcome.marks]
    last = {
        "steps": figures["steps"],
        "occupancy": figures["mean_batch_occupancy"] * figures["steps"],
        "generated_tokens": figures["tokens"]["completion"],
    }
    kept = [_Mark(0.0, 0, 0, 0)]
    for mark in marks:
        if mark.steps > kept[-1].steps and mark.seconds - kept[-1].seconds >= outcome.generation / _PIECES:
            kept.append(mark)
    while kept[-1].steps >= last["steps"]:
        kept.pop()
    return [_piece(before, after) for before, after in pairwise([*kept, _mark(last, outcome.generation)])]


class _Mark(NamedTuple):
    """The counters of a run `seconds` after its first step began."""

    seconds: float
    steps: float
    occupancy: float  # sequences, summed over the steps
    tokens: float


def _mark(counters: Mapping[str, float], seconds: float) -> _Mark:
    return _Mark(seconds, counters["steps"], counters["occupancy"], counters["generated_tokens"])


def _piece(before: _Mark, after: _Mark) -> Piece:
    occupancy = (after.occupancy - before.occupancy) / (after.steps - before.steps)
    rate = (after.tokens - before.tokens) / (after.seconds - before.seconds)
    return Piece(before.seconds, after.seconds, occupancy, rate)
