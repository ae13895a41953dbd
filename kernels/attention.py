"""The attention ops as a protocol, and the types that they are called with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

_SCALE_BYTES = 4  # a float32 beside the keys, and one beside the values, of a head of a token in an int8 cache


class AttentionSpec(NamedTuple):
    """One attention layer of a model: the heads that it caches, and how it scores."""

    num_kv_heads: int
    key_size: int
    value_size: int
    scale: float  # of the scores
    window: int = 0  # how many tokens a token sees, itself included; 0: all
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0: they stay

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """The size of a token's keys and values in a cache of this dtype."""
        values = row_size(self.key_size, dtype) + row_size(self.value_size, dtype)
        return self.num_kv_heads * values * dtype.itemsize


class Rotary(NamedTuple):
    """The rotary embedding of T tokens; both halves of each row are equal."""

    cos: torch.Tensor  # [T, ROT]
    sin: torch.Tensor  # [T, ROT]


class Norm(NamedTuple):
    """An RMSNorm: x over the root of its mean square + eps, times (weight + weight_offset)."""

    weight: torch.Tensor
    eps: float
    weight_offset: float


class HeadNorms(NamedTuple):
    """The RMSNorms over each head of queries and keys, before they are rotated; without weights there are none."""

    q_weight: torch.Tensor | None = None  # [D]
    k_weight: torch.Tensor | None = None  # [D]
    eps: float = 0.0
    weight_offset: float = 0.0


NO_NORMS = HeadNorms()


class Layout(Protocol):
    """Where the T tokens of the S sequences of a step lie. Index tensors are int64; the Triton kernels take int32 too."""

    @property
    def slot_mapping(self) -> torch.Tensor:
        """[T] the place of each token in the cache, block * block_size + offset; -1: it is not stored."""

    @property
    def block_tables(self) -> torch.Tensor:
        """[S, max_blocks] the blocks of each sequence."""

    @property
    def cu_seqlens_q(self) -> torch.Tensor:
        """[S + 1] the first token of each sequence, and T."""

    @property
    def seq_lens(self) -> torch.Tensor:
        """[S] cached tokens of each sequence, those of this step included."""

    @property
    def spans(self) -> Sequence[tuple[int, int, int]]:
        """(cu_seqlens_q[s], cu_seqlens_q[s + 1], seq_lens[s]) of each sequence, on the host."""

    @property
    def tasks(self) -> torch.Tensor:
        """[n, 3] int64 on the host: a sequence, first and last + 1 of some of its tokens in this step.

        Together they are all the tokens; the task that takes longest comes first.
        """

    @property
    def max_seqlen_q(self) -> int:
        """The most tokens that a sequence has in this step, or more."""

    @property
    def max_seq_len(self) -> int:
        """The most cached tokens that a sequence has, or more."""


class AttentionOps(Protocol):
    """An implementation of the attention ops; `reference.py` says what they compute, for which shapes."""

    def store_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None: ...

    def rope_store_kv(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        rotary: Rotary,
        norms: HeadNorms = NO_NORMS,
    ) -> None: ...

    def paged_attention(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        layout: Layout,
        spec: AttentionSpec,
    ) -> torch.Tensor: ...


def row_size(size: int, dtype: torch.dtype) -> int:
    """How many values a cache holds for the `size` keys, or values, of a head of a token; in int8 a scale follows them."""
    return size + _SCALE_BYTES if dtype == torch.int8 else size
