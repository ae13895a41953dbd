"""How a run went: what was in the batch and how many tokens came, piece by piece of its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from cbatch.bench.contender import Outcome

_PIECES = 120  # at most


@dataclass(frozen=True)
class Piece:
    start: float  # seconds since the first step
    end: float
    occupancy: float  # sequences at work in a step, on average
    tokens_per_second: float  # generated


def timeline(outcome: Outcome) -> list[Piece]:
    """The pieces of a run of cbatch, from the counters that it told as they grew. In each at least one step began."""
    figures = outcome.figures
    marks = [_mark(one, one["seconds"] - one["to_first_step"]) for one in outcome.marks]
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
    """Counters of a run, `seconds` after its first step began."""

    seconds: float
    steps: float
    occupancy: float
    tokens: float


def _mark(counters: Mapping[str, float], seconds: float) -> _Mark:
    return _Mark(seconds, counters["steps"], counters["occupancy"], counters["generated_tokens"])


def _piece(before: _Mark, after: _Mark) -> Piece:
    at_once = (after.occupancy - before.occupancy) / (after.steps - before.steps)
    return Piece(
        before.seconds, after.seconds, at_once, (after.tokens - before.tokens) / (after.seconds - before.seconds)
    )
