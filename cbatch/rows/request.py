"""The nouns that cross the border between the user's data and the engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args, get_origin, get_type_hints

from cbatch.errors import RowError


def _option(default: Any, help: str, low: float | None = None, high: float | None = None) -> Any:
    return field(default=default, metadata={"help": help, "low": low, "high": high})


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one row are chosen. Invalid values raise ValueError.

    Order of the filters: penalties, temperature, top-k, top-p, min-p.
    """

    max_tokens: int = _option(256, "Most tokens in a completion.", low=1)
    temperature: float = _option(0.0, "0 always takes the likeliest token.", low=0)
    top_p: float = _option(1.0, "Sample from the smallest set of tokens whose probabilities sum to P.", low=0, high=1)
    top_k: int = _option(0, "Sample from the K likeliest tokens; 0 or -1 for all.", low=-1)
    min_p: float = _option(0.0, "Leave out tokens less likely than P times the likeliest.", low=0, high=1)
    repetition_penalty: float = _option(1.0, "Divide the scores of tokens already seen, prompt included.", low=1e-6)
    presence_penalty: float = _option(0.0, "Subtract from the score of a token already generated.", low=-2, high=2)
    frequency_penalty: float = _option(0.0, "The same, for each time it was generated.", low=-2, high=2)
    stop: tuple[str, ...] = _option((), "End a completion at this text, which is left out (repeatable).")
    stop_token_id: tuple[int, ...] = _option(
        (), "End a completion at this token, which is left out (repeatable).", low=0
    )
    ignore_eos: bool = _option(False, "Go on after the model's end-of-sequence token.")
    min_tokens: int = _option(0, "Do not end a completion before this many tokens.", low=0)
    seed: int | None = _option(None, "Seed of the random draws; chosen and recorded if not given.")

    def __post_init__(self) -> None:
        hints = get_type_hints(SamplingParams)
        for spec in fields(self):
            object.__setattr__(
                self,
                spec.name,
                _checked(
                    spec.name, getattr(self, spec.name), hints[spec.name], spec.metadata["low"], spec.metadata["high"]
                ),
            )
        if "" in self.stop:
            raise ValueError("stop must not hold an empty text")

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def override(self, values: Mapping[str, Any]) -> SamplingParams:
        """These settings with some replaced; null leaves one as it is. Unknown names raise ValueError."""
        known = {spec.name for spec in fields(self)}
        if unknown := [name for name in values if name not in known]:
            raise ValueError(f"unknown sampling parameter {unknown[0]!r}")
        return replace(self, **{name: value for name, value in values.items() if value is not None})


def _checked(name: str, value: Any, hint: Any, low: float | None, high: float | None) -> Any:
    """`value` as the type that `hint` asks for and within its bounds, or ValueError."""
    if get_origin(hint) is tuple:
        items = value if isinstance(value, (list, tuple)) else (value,)
        return tuple(_checked(name, item, get_args(hint)[0], low, high) for item in items)
    if type(None) in get_args(hint):
        if value is None:
            return None
        hint = get_args(hint)[0]
    if hint is float and type(value) is int:
        value = float(value) if abs(value) < 2**64 else math.inf
    if type(value) is not hint:
        raise ValueError(f"{name} must be {_TYPE_NAMES[hint]}, not {value!r:.80}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be finite, not {value}")
    if (low is not None and value < low) or (high is not None and value > high):
        raise ValueError(f"{name} must be {_bounds(low, high)}, not {value!r:.80}")
    return value


_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _bounds(low: float | None, high: float | None) -> str:
    return f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"


@dataclass(frozen=True, slots=True)
class Row:
    """One input row as it was read. `data` holds all its columns, untouched."""

    source: str
    index: int  # position among its source's rows, from 0
    where: str  # for people: file and line
    data: dict[str, Any]
    digest: int  # checksum of the row's content, never 0
    problem: RowError | None = None  # the row could not be read


@dataclass(frozen=True, slots=True)
class Request:
    """A row ready to be generated."""

    row: Row
    token_ids: list[int]  # the prompt
    params: SamplingParams
    random_key: int  # key of the row's random stream, 64 bits
    chat: bool = True


@dataclass(frozen=True, slots=True)
class Output:
    """A generated text. One that failed has an `error`, no text, and the tokens it got before."""

    text: str | None = None
    token_ids: tuple[int, ...] = ()  # without the end-of-sequence token
    finish_reason: str = "error"  # or stop, or length
    error: RowError | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The outcome of a row: one `Output` for each text that was asked for. Lengths in tokens."""

    row: Row
    outputs: tuple[Output, ...]
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    chat: bool = True  # the prompt was a conversation

    @classmethod
    def failed(cls, row: Row, error: RowError, num_prompt_tokens: int = 0, chat: bool = True) -> Completion:
        """The outcome of a row for which nothing was generated."""
        return cls(row, (Output(error=error),), num_prompt_tokens, chat=chat)

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def error(self) -> RowError | None:
        """The error of the first output that failed."""
        return next((output.error for output in self.outputs if output.error), None)
