"""One forward pass over a batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from cbatch.model.batch import Batch, nothing
from cbatch.model.kv_cache import KVCache
from cbatch.model.sampler import INVALID_LOGITS, sample

if TYPE_CHECKING:
    from cbatch.engine.sequence import Sequence

__all__ = ["INVALID_LOGITS", "Launched", "Runner"]


class Launched:
    """The tokens of a step that may still be running, on their way to the host."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._done: Any = torch.cuda.Event() if tokens.is_cuda else None  # type: ignore[no-untyped-call]
        if self._done is None:
            self._tokens = tokens
            return
        self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        self._tokens.copy_(tokens, non_blocking=True)
        self._done.record()

    def tokens(self) -> list[int]:
        """Wait for them."""
        if self._done is not None:
            self._done.synchronize()
        tokens: list[int] = self._tokens.tolist()
        return tokens


class Runner:
    """Launches forward passes, each with the tokens of the one before still on the device."""

    def __init__(self, model: Any, kv_cache: KVCache, eos_token_ids: Iterable[int]) -> None:
        self.model, self.kv_cache, self.eos_token_ids = model, kv_cache, tuple(eos_token_ids)
        self._run = self.forward
        self.notes: list[str] = []  # what it does without, and why; for the user
        self.sampled: tuple[Sequence, ...] = ()  # by the last step, whose tokens are still on the device
        self._last_tokens = torch.zeros(0, dtype=torch.int64)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @torch.inference_mode()
    def record(self, max_num_tokens: int, max_num_seqs: int, max_blocks: int, max_seq_len: int) -> bool:
        """Run steps through CUDA graphs from now on; False if the model does something that can't be recorded."""
        from cbatch.model.graphs import StepGraphs

        sizes = max_num_tokens, max_num_seqs, max_blocks, max_seq_len
        graphs = StepGraphs(self.forward, *sizes, self.device)
        try:
            graphs.run(nothing(self.device))
        except Exception as error:  # such as a wait for the device
            torch.cuda.synchronize(self.device)
            self.notes.append(f"without CUDA graphs: {(str(error).splitlines() or [type(error).__name__])[0]}")
            return False
        self._run = graphs.run
        return True

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """Start a step: the next token of each sequence of `batch.sampled`, in that order, when it is done."""
        if batch.carried is not None:
            where, which = batch.carried
            batch.input_ids.index_copy_(0, where, self._last_tokens[which].clamp(min=0))
        tokens = sample(self._run(batch), batch.sampled, self.eos_token_ids)
        self._last_tokens, self.sampled = tokens, batch.sampled
        return Launched(tokens)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The logits [num_sampled, vocabulary] of `batch.logits_indices`."""
        logits: torch.Tensor = self.model(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.logits_indices,
            batch=batch,
            kv_cache=self.kv_cache,
        ).logits[0]
        return logits
