"""CUDA graphs of whole steps: recorded once for each size, then replayed in one launch.

A step is padded to a bucket of tokens. A padding token has slot -1, so it is written nowhere, and belongs to no
sequence, so attention neither reads nor writes for it; its row of the output is garbage that nobody looks at.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch

from cbatch.model.batch import Batch

Forward = Callable[[Batch], torch.Tensor]


_LARGEST = 1024  # tokens; a larger step computes longer than its launch takes, and padding would cost more


class StepGraphs:
    """Runs `forward` (batch -> logits of `batch.logits_indices`) through graphs, recorded when first needed."""

    def __init__(
        self,
        forward: Forward,
        max_num_tokens: int,
        max_num_seqs: int,
        max_blocks: int,
        max_seq_len: int,
        device: torch.device,
    ) -> None:
        self._forward, self._max_seq_len, self._device = forward, max_seq_len, device
        self._max_num_seqs = max_num_seqs
        self._decode_buckets = buckets(max_num_seqs)
        self._mixed_buckets = [size for size in buckets(min(max_num_tokens, _LARGEST)) if size >= 64] or [
            max_num_tokens
        ]

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        tokens = max(self._decode_buckets[-1], self._mixed_buckets[-1])
        self._ids, self._positions, self._slots = zeros(tokens), zeros(tokens), zeros(tokens)
        self._tables = zeros(max_num_seqs, max_blocks)
        self._cu_seqlens_q, self._seq_lens, self._indices = (
            zeros(max_num_seqs + 1),
            zeros(max_num_seqs),
            zeros(max_num_seqs),
        )
        self._logits: torch.Tensor | None = None  # [max_num_seqs, vocabulary], of all graphs
        self._recorded: dict[tuple[int, bool], Any] = {}
        self._pool: Any = None
        self._stream: Any = torch.cuda.Stream() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.out_of_memory = False

    def run(self, batch: Batch) -> torch.Tensor:
        """The logits [num_outputs, vocabulary] of a step; valid until the next run."""
        decode = batch.max_seqlen_q == 1
        too_long = not decode and len(batch.input_ids) > self._mixed_buckets[-1]
        if too_long or len(batch.logits_indices) > self._max_num_seqs:
            return self._forward(batch)
        sizes = self._decode_buckets if decode else self._mixed_buckets
        size = sizes[bisect_left(sizes, len(batch.input_ids))]
        self._fill(batch, size)
        if (size, decode) not in self._recorded:
            if self.out_of_memory:
                return self._forward(batch)
            try:
                self._recorded[size, decode] = self._record(size, decode)
            except torch.OutOfMemoryError:  # the recorded graphs stay in use; other sizes run without
                self.out_of_memory = True
                return self._forward(batch)
        self._recorded[size, decode].replay()
        assert self._logits is not None
        return self._logits[: len(batch.logits_indices)]

    def _fill(self, batch: Batch, size: int) -> None:
        """Copy a batch into the buffers that the graphs read, and pad it."""
        num_tokens, num_seqs = len(batch.input_ids), len(batch.seq_lens)
        for buffer, values, padding in (
            (self._ids[:size], batch.input_ids, 0),
            (self._positions[:size], batch.positions, 0),
            (self._slots[:size], batch.slot_mapping, -1),
            (self._seq_lens, batch.seq_lens, 0),
            (self._indices, batch.logits_indices, 0),
            (self._cu_seqlens_q, batch.cu_seqlens_q, num_tokens if num_seqs else 0),
        ):
            buffer[: len(values)].copy_(values)
            buffer[len(values) :].fill_(padding)
        self._tables[:num_seqs, : batch.block_tables.shape[1]].copy_(batch.block_tables)

    def _record(self, size: int, decode: bool) -> Any:
        batch = self._static_batch(size, decode)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # a run outside the graph compiles kernels and fills libraries' caches
            self._step(batch)
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            self._step(batch)
        self._pool = self._pool or graph.pool()
        return graph

    def _step(self, batch: Batch) -> None:
        """Compute a step from the static buffers into the static logits."""
        logits = self._forward(batch)
        if self._logits is None:
            self._logits = logits.new_empty(self._max_num_seqs, logits.shape[1])
        self._logits[: len(logits)].copy_(logits)

    def _static_batch(self, size: int, decode: bool) -> Batch:
        num_seqs = min(size, self._max_num_seqs)
        longest = (0, 1 if decode else size, self._max_seq_len)
        return Batch(
            self._ids[:size],
            self._positions[:size],
            self._slots[:size],
            self._tables[:num_seqs],
            self._cu_seqlens_q[: num_seqs + 1],
            self._seq_lens[:num_seqs],
            self._indices[:num_seqs],
            (longest,),
        )


def buckets(largest: int) -> list[int]:
    """The sizes that steps are padded to: 1, 2, 4, then multiples of 8 up to 64, then each about an eighth larger."""
    sizes = [1, 2, 4, *range(8, 65, 8)]
    while sizes[-1] < largest:
        sizes.append(sizes[-1] + max(16, 1 << (sizes[-1].bit_length() - 3)))
    return [size for size in sizes if size < largest] + [largest]
