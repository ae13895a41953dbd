"""One forward pass over a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cbatch.model.batch import Batch
from cbatch.model.kv_cache import KVCache
from cbatch.model.sampler import INVALID_LOGITS, sample

__all__ = ["INVALID_LOGITS", "Runner"]


class Runner:
    def __init__(self, model: Any, kv_cache: KVCache, eos_token_ids: Sequence[int]) -> None:
        self.model, self.kv_cache, self.eos_token_ids = model, kv_cache, tuple(eos_token_ids)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @torch.inference_mode()
    def forward(self, batch: Batch) -> list[int]:
        """The next token of each sequence of `batch.sampled`, in that order."""
        logits = self.model(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.logits_indices,
            batch=batch,
            kv_cache=self.kv_cache,
        ).logits[0]
        tokens: list[int] = sample(logits, batch.sampled, self.eos_token_ids).tolist()
        return tokens
