"""How a run went: what was in the batch and how many tokens came, piece by piece of its time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from cbatch.bench.contender import Outcome

_PIECES = 120  # at most


@dataclass(frozen=True)
class Piece:
    start: float  # seconds since the first step
    end: float
    occupancy: float  # sequences at work in a step, on average
    tokens_per_second: float  # generated


def timeline(outcome: Outcome) -> list[Piece]:
    """The pieces of a run of cbatch, from the counters that it told as they grew."""
    return list(_pieces(outcome))


def _pieces(outcome: Outcome) -> Iterator[Piece]:
    figures = outcome.figures
    marks = [_mark(one, one["seconds"] - one["to_first_step"]) for one in outcome.marks]
    last = {
        "steps": figures["steps"],
        "occupancy": figures["mean_batch_occupancy"] * figures["steps"],
        "generated_tokens": figures["tokens"]["completion"],
    }
    end = _mark(last, outcome.generation)
    kept = [mark for mark in marks if mark[0] < outcome.generation]
    kept = kept[:: len(kept) // _PIECES + 1]
    for (start, steps, occupancy, tokens), after in pairwise([(0.0, 0, 0, 0), *kept, end]):
        seconds, count = after[0] - start, after[1] - steps
        if seconds > 0:
            at_once = (after[2] - occupancy) / count if count else 0.0
            yield Piece(start, after[0], at_once, (after[3] - tokens) / seconds)


def _mark(counters: dict[str, float], seconds: float) -> tuple[float, float, float, float]:
    return seconds, counters["steps"], counters["occupancy"], counters["generated_tokens"]
