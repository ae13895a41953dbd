"""One forward pass over a batch."""

from __future__ import annotations

from typing import Any

import torch

from cbatch.model.batch import Batch, SamplingBatch, StepOutput, nothing
from cbatch.model.kv_cache import KVCache
from cbatch.model.sampler import sample


class LaunchedStep:
    """A step that may still be running, its output on the way to the host."""

    def __init__(self, output: StepOutput) -> None:
        token_ids = output.token_ids
        self._done: Any = torch.cuda.Event() if token_ids.is_cuda else None  # type: ignore[no-untyped-call]
        self._output = output
        if self._done is not None:
            on_host = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
            self._output = StepOutput(on_host.copy_(token_ids, non_blocking=True))
            self._done.record()

    def wait(self) -> StepOutput:
        """The output, on the host, once the step has ended."""
        if self._done is not None:
            self._done.synchronize()
        return self._output


class Runner:
    """Launches forward passes, each with the tokens of the one before still on the device."""

    def __init__(self, model: Any, kv_cache: KVCache) -> None:
        self.model, self.kv_cache = model, kv_cache
        self._run = self.forward
        self.notes: list[str] = []  # what the runner does without, and why; for the user
        self._last_token_ids = torch.zeros(0, dtype=torch.int64)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def vocab_size(self) -> int:
        """The width of the logits."""
        return int(self.model.config.get_text_config().vocab_size)

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
    def launch(self, batch: Batch, sampling: SamplingBatch) -> LaunchedStep:
        """Start a step, which draws a token for each row of `sampling`."""
        if batch.carried is not None:
            places, drawn = batch.carried
            batch.input_ids.index_copy_(0, places, self._last_token_ids[drawn].clamp(min=0))
        output = sample(self._run(batch), sampling, self.kv_cache.backend)
        self._last_token_ids = output.token_ids
        return LaunchedStep(output)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The logits [num_outputs, vocabulary] of `batch.logits_indices`."""
        logits: torch.Tensor = self.model(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.logits_indices,
            batch=batch,
            kv_cache=self.kv_cache,
        ).logits[0]
        return logits
