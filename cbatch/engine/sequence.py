"""A sequence: a request that is being generated, with its tokens and its blocks.

A sequence has no status field: whether the scheduler has it waiting, running or not at all is its status.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cbatch.config import SamplingParams
from cbatch.engine.detokenizer import StopFinder
from cbatch.rows.request import Request

UNKNOWN = -1  # stands for a token that a launched step is still computing


@dataclass(eq=False, slots=True)
class Sequence:
    """A request being generated. Lengths in tokens; times in seconds of `time.perf_counter`."""

    request: Request
    max_len: int  # prompt and completion together
    stop_finder: StopFinder | None = None
    token_ids: list[int] = field(default_factory=list)  # prompt, then completion
    num_computed_tokens: int = 0  # leading tokens whose keys and values are in the cache
    block_table: list[int] = field(default_factory=list)
    num_hashed_blocks: int = 0  # leading blocks that have been filed in the prefix cache
    prefix_uid: int = 0  # uid of the last of these in the prefix cache
    num_cached_tokens: int | None = None  # found in the prefix cache when first admitted
    num_unknown_tokens: int = 0  # trailing tokens that a launched step is still computing
    first_output: int | None = None  # from this token on, the logits of every token are wanted; None: only the last
    added_at: float = 0.0
    last_token_at: float | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.token_ids)

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def completion_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_known_tokens(self) -> int:
        return len(self.token_ids) - self.num_unknown_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens whose keys and values are still to be computed: one when the sequence decodes, many when it prefills.

        The very last token needs none, because no token comes after it.
        """
        return 0 if len(self.token_ids) == self.max_len else len(self.token_ids) - self.num_computed_tokens

    def num_outputs(self, num_tokens: int, reaches_end: bool) -> int:
        """How many of the next `num_tokens` have logits that are wanted. They are the last ones."""
        if self.first_output is None:
            return int(reaches_end)
        stop = self.num_computed_tokens + num_tokens
        return max(int(reaches_end), stop - max(self.num_computed_tokens, self.first_output))

    def launch(self, num_tokens: int, samples: bool) -> None:
        """Record a launched step that computes `num_tokens` and, if it `samples`, draws one token that is not known yet."""
        self.num_computed_tokens += num_tokens
        if samples:
            self.token_ids.append(UNKNOWN)
            self.num_unknown_tokens += 1

    def learn(self, token: int) -> None:
        """Set the oldest unknown token."""
        self.token_ids[self.num_known_tokens] = token
        self.num_unknown_tokens -= 1

    def end(self) -> None:
        """Drop the tokens that are still unknown, because the sequence ended before them."""
        del self.token_ids[self.num_known_tokens :]
        self.num_unknown_tokens = 0
