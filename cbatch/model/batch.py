"""The tensors of a step: where its tokens lie, and how the next tokens are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch

_TASK_TOKENS = 32  # tokens of a sequence that one CPU thread attends with at a time


@dataclass(frozen=True)
class Batch:
    """T tokens of S sequences, back to back; no pad token.

    Index tensors are int64 on the model's device. `spans` is `cu_seqlens_q` and `seq_lens` on the host.
    """

    input_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    slot_mapping: torch.Tensor  # [T] block * block_size + offset of each token
    block_tables: torch.Tensor  # [S, max_blocks], unused entries 0
    cu_seqlens_q: torch.Tensor  # [S + 1]
    seq_lens: torch.Tensor  # [S] cached tokens, this step's included
    logits_indices: torch.Tensor  # [num_outputs] the tokens whose logits are wanted
    spans: tuple[tuple[int, int, int], ...]  # (first token, last token + 1, seq_len) of each sequence
    carried: tuple[torch.Tensor, torch.Tensor] | None = None  # input tokens that the step before is still drawing:
    # their places in `input_ids`, and which of its drawn tokens they are; [n] each

    @cached_property
    def max_seqlen_q(self) -> int:
        return max(stop - start for start, stop, _ in self.spans)

    @cached_property
    def max_seq_len(self) -> int:
        return max(seq_len for _, _, seq_len in self.spans)

    @cached_property
    def tasks(self) -> torch.Tensor:
        """[n, 3] on the host: a sequence, first and last + 1 of up to `_TASK_TOKENS` of its tokens in this step.

        Together they are all the tokens; the task that attends to the most comes first.
        """
        tasks = []
        for s, (start, stop, seq_len) in enumerate(self.spans):
            before = seq_len - (stop - start)
            for first in range(0, stop - start, _TASK_TOKENS):
                last = min(first + _TASK_TOKENS, stop - start)
                tasks.append(((last - first) * (before + last), s, first, last))
        return torch.tensor([task[1:] for task in sorted(tasks, reverse=True)])


@dataclass(frozen=True)
class Penalties:
    """Rows of a `SamplingBatch` whose logits depend on the tokens before: m of n, L the longest of them.

    Factors have the dtype of the other sampling parameters, all else is int64.
    """

    rows: torch.Tensor  # [m] into the rows of the batch
    history: torch.Tensor  # [m, L] prompt, then completion, then anything
    lengths: torch.Tensor  # [m] of prompt and completion together
    prompt_lengths: torch.Tensor  # [m]
    repetition: torch.Tensor  # [m]
    presence: torch.Tensor  # [m]
    frequency: torch.Tensor  # [m]


@dataclass(frozen=True)
class SamplingBatch:
    """How the next token of each of n sequences is drawn.

    Tensors [n] on the model's device: parameters in float64 on a CPU and float32 on a GPU, as the samplers there compute;
    whole numbers in int64.
    """

    temperature: torch.Tensor  # 0: the likeliest token
    top_k: torch.Tensor  # 0: all
    top_p: torch.Tensor
    min_p: torch.Tensor
    random_keys: torch.Tensor  # 64 bits each, as signed numbers
    positions: torch.Tensor  # of the token to be drawn in its completion
    is_greedy: bool  # all temperatures are 0
    barred: tuple[torch.Tensor, torch.Tensor] | None = None  # rows and token ids of what must not be drawn
    penalties: Penalties | None = None
    logits_rows: torch.Tensor | None = None  # the rows of the step's logits that are drawn from; None: all n

    def __len__(self) -> int:
        return len(self.temperature)

    def select(self, rows: torch.Tensor) -> SamplingBatch:
        """The parameters of some rows [m], without what is barred or penalised."""
        return SamplingBatch(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.random_keys[rows],
            self.positions[rows],
            self.is_greedy,
        )


@dataclass(frozen=True)
class StepOutput:
    """What a step yields for the n rows of its `SamplingBatch`."""

    token_ids: torch.Tensor  # [n] int64, or INVALID_LOGITS


def single(first: int, stop: int, num_blocks: int, block_size: int, device: torch.device) -> Batch:
    """Tokens first:stop of one sequence, all zero, whose blocks lie in the cache from back to front."""
    table = torch.arange(num_blocks - 1, -1, -1, device=device)
    positions = torch.arange(first, stop, device=device)
    count = stop - first
    return Batch(
        torch.zeros_like(positions),
        positions,
        table[positions // block_size] * block_size + positions % block_size,
        table[None],
        torch.tensor([0, count], device=device),
        torch.tensor([stop], device=device),
        torch.arange(count, device=device),
        ((0, count, stop),),
    )


def nothing(device: torch.device) -> Batch:
    """A step of one padding token, which is written nowhere and belongs to no sequence."""
    (zero, slot, empty) = to_device(device, [0], [-1], [])
    return Batch(zero, zero, slot, empty.view(0, 0), zero, empty, zero, ((0, 1, 1),))


def to_device(device: torch.device, *lists: list[int]) -> tuple[torch.Tensor, ...]:
    """Lists of whole numbers as int64 tensors, in a single transfer that the host does not wait for.

    Each begins at a multiple of 16 bytes: Triton compiles a kernel anew for a pointer that does not.
    """
    even = [numbers if len(numbers) % 2 == 0 else [*numbers, 0] for numbers in lists]
    flat = torch.tensor(list(chain.from_iterable(even)), dtype=torch.int64, pin_memory=device.type == "cuda")
    parts = torch.split(flat.to(device, non_blocking=True), [len(numbers) for numbers in even])
    return tuple(part[: len(numbers)] for part, numbers in zip(parts, lists, strict=True))


def floats_to_device(device: torch.device, *lists: list[float]) -> tuple[torch.Tensor, ...]:
    """Lists of n numbers each as tensors [n], float64 on a CPU and float32 on a GPU, in a single transfer.

    Each begins at a multiple of 16 bytes, see `to_device`.
    """
    on_gpu = device.type == "cuda"
    padding = [0.0] * (-len(lists[0]) % 4)
    dtype = torch.float32 if on_gpu else torch.float64
    rows = torch.tensor([[*numbers, *padding] for numbers in lists], dtype=dtype, pin_memory=on_gpu)
    return tuple(row[: len(lists[0])] for row in rows.to(device, non_blocking=True))
