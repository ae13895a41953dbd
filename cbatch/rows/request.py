"""The nouns that cross the border between the user's data and the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cbatch.config import SamplingParams
from cbatch.errors import RowError


@dataclass(frozen=True, slots=True)
class Row:
    """One input row as it was read.

    `data` holds all its columns, untouched, as the plain Python values that `cbatch/rows/values.py` lists; bytes and NaN
    are among them. Prompts are made of `as_text` of it. A row with a `problem` has what could be read of its columns.
    """

    source: str
    index: int  # position among its source's rows, from 0
    where: str  # for people: file and line
    data: dict[str, Any]
    digest: int  # checksum of the row's content, never 0
    problem: RowError | None = None  # the row could not be read
    is_padded: bool = False  # it comes from a table, whose objects have null for the keys that only other rows have


@dataclass(frozen=True, slots=True)
class Request:
    """A row ready to be generated."""

    row: Row
    token_ids: list[int]  # the prompt
    params: SamplingParams
    random_key: int  # key of the row's random stream, 64 bits
    chat: bool = True
    num_truncated_tokens: int | None = 0  # that the prompt lost; None: so many that they were not counted
    remarks: tuple[str, ...] = ()  # kinds in `rows.remarks`

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine runs for this request."""
        return 1

    def longest(self, max_model_len: int) -> int:
        """The most tokens that a sequence may come to, prompt and completion together."""
        return min(len(self.token_ids) + self.params.max_tokens, max_model_len)


@dataclass(frozen=True, slots=True)
class Output:
    """A generated text. One that failed has an `error`, no text, and the tokens it got before."""

    text: str | None = None
    token_ids: tuple[int, ...] = ()  # without the token, or those of the stop text, that ended it
    finish_reason: str = "error"  # or stop, or length
    error: RowError | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The outcome of a row: one `Output` for each text that was asked for. Lengths in tokens."""

    row: Row
    outputs: tuple[Output, ...]
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    num_truncated_tokens: int | None = 0  # that the prompt lost; None: so many that they were not counted
    chat: bool = True  # the prompt was a conversation

    @classmethod
    def failed(cls, row: Row, error: RowError) -> Completion:
        """The outcome of a row that could not become a request."""
        return cls(row, (Output(error=error),))

    @classmethod
    def of(cls, request: Request, *outputs: Output, num_cached_tokens: int = 0) -> Completion:
        """The outcome of a request."""
        num_prompt_tokens, num_truncated = len(request.token_ids), request.num_truncated_tokens
        return cls(request.row, outputs, num_prompt_tokens, num_cached_tokens, num_truncated, request.chat)

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def error(self) -> RowError | None:
        """The error of the first output that failed."""
        return next((output.error for output in self.outputs if output.error), None)
