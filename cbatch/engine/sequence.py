"""A request being generated. The only mutable noun: where it stands (waiting, running, gone) is its status."""

from __future__ import annotations

from dataclasses import dataclass, field

from cbatch.engine.detokenizer import StopFinder
from cbatch.rows.request import Request, SamplingParams


@dataclass(eq=False, slots=True)
class Sequence:
    """Lengths in tokens; times in seconds of `time.perf_counter`."""

    request: Request
    max_len: int  # prompt and completion together
    stop_finder: StopFinder | None = None
    token_ids: list[int] = field(default_factory=list)  # prompt, then completion
    num_computed_tokens: int = 0  # leading tokens whose keys and values are in the cache
    block_table: list[int] = field(default_factory=list)
    num_hashed_blocks: int = 0  # leading blocks that the prefix cache has seen
    prefix_uid: int = 0  # what the prefix cache calls the last of them
    num_cached_tokens: int | None = None  # found in the prefix cache when first admitted
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
    def num_pending_tokens(self) -> int:
        """Tokens that still owe their keys and values: one when it decodes, many when it prefills."""
        return len(self.token_ids) - self.num_computed_tokens
