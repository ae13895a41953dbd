"""Logits to tokens, each row by its own settings.

The random stream of a row depends on its seed, its identity and the position of the token, never on the batch: one
uniform number is drawn for each token, and the token is where the cumulative distribution, in vocabulary order,
passes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

import torch

from cbatch.model import ops
from cbatch.model.batch import to_device
from cbatch.rows.request import SamplingParams

if TYPE_CHECKING:
    from cbatch.engine.sequence import Sequence

INVALID_LOGITS = -1  # in place of a token: the row's logits are NaN or infinite

_SLACK = 1e-6  # how far float32 sums of probabilities may be from top_p


def sample(logits: torch.Tensor, sequences: SequenceOf[Sequence], eos_token_ids: SequenceOf[int]) -> torch.Tensor:
    """logits [n, vocabulary], one row for each sequence -> token ids [n] int64, or INVALID_LOGITS.

    On a GPU the draw is that of `kernels/sample.py`, whose random numbers are others, of the same streams.
    """
    if ops.uses_triton(logits):
        return _sample_on_device(logits, sequences, eos_token_ids)
    if all(seq.params.temperature == 0 and not _adjusts(seq) for seq in sequences):
        return ops.argmax(logits)
    logits = logits.float()
    valid = logits.amax(-1).isfinite()
    for row, seq in enumerate(sequences):
        _penalize(logits[row], seq, eos_token_ids)
    tokens = logits.argmax(-1)
    drawn = [row for row, seq in enumerate(sequences) if seq.params.temperature > 0]
    if drawn:
        params = [sequences[row].params for row in drawn]
        uniforms = [uniform(sequences[row].request.stream, sequences[row].num_completion_tokens) for row in drawn]
        probs = filtered_probs(logits[drawn].nan_to_num(), params)
        tokens[drawn] = _draw(probs, torch.tensor(uniforms, dtype=torch.float64, device=logits.device))
    return torch.where(valid, tokens, INVALID_LOGITS)


def _sample_on_device(
    logits: torch.Tensor, sequences: SequenceOf[Sequence], eos_token_ids: SequenceOf[int]
) -> torch.Tensor:
    """`sample` without a wait for the device."""
    from cbatch.kernels import sample as kernel

    logits = _adjusted(logits, sequences, eos_token_ids)
    params = [seq.params for seq in sequences]
    signed = [(seq.request.stream + 2**63) % 2**64 - 2**63 for seq in sequences]
    top_k = [max(0, min(p.top_k, logits.shape[-1])) for p in params]
    seeds, ks, at = to_device(logits.device, signed, top_k, [seq.num_completion_tokens for seq in sequences])
    temperature, top_p, min_p = _floats(params, ("temperature", "top_p", "min_p"), logits.device)
    return kernel.sample(logits, temperature, ks.int(), top_p, min_p, seeds, at.int())


def _adjusted(logits: torch.Tensor, sequences: SequenceOf[Sequence], eos_token_ids: SequenceOf[int]) -> torch.Tensor:
    """`logits` with what `_penalize` does to each row, for all rows that need it at once."""
    from cbatch.kernels.sample import penalize

    rows, barred = [], []  # of the pairs that may not be drawn
    for row, seq in enumerate(sequences):
        for token in _barred(seq, eos_token_ids, logits.shape[-1]):
            rows.append(row)
            barred.append(token)
    penalized = [row for row, seq in enumerate(sequences) if seq.params.has_penalties]
    if penalized:
        chosen = [sequences[row] for row in penalized]
        lengths = [len(seq.token_ids) for seq in chosen]
        padded = [token for seq in chosen for token in seq.token_ids + [0] * (max(lengths) - len(seq.token_ids))]
        index, history, length, prompt = to_device(
            logits.device, penalized, padded, lengths, [seq.num_prompt_tokens for seq in chosen]
        )
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        factors = _floats([seq.params for seq in chosen], names, logits.device)
        changed = logits.index_select(0, index).float()
        penalize(changed, history.view(len(chosen), -1), length, prompt, *factors)
        logits = logits.float().index_copy(0, index, changed)
    if rows:
        places = to_device(logits.device, rows, barred)
        logits = logits.index_put(places, torch.full((), -torch.inf, dtype=logits.dtype, device=logits.device))
    return logits


def _floats(params: SequenceOf[SamplingParams], names: SequenceOf[str], device: torch.device) -> torch.Tensor:
    """[names, params] float32, in a single transfer that the host does not wait for; rows aligned to 16 bytes."""
    padding = [0.0] * (-len(params) % 4)
    values = [[float(getattr(p, name)) for p in params] + padding for name in names]
    pinned = torch.tensor(values, dtype=torch.float32, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)[:, : len(params)]


def uniform(stream: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, the same for the same arguments everywhere."""
    key = stream.to_bytes(8, "little") + position.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") / 2**64 * (1 - 2**-53)


def filtered_probs(logits: torch.Tensor, params: SequenceOf[SamplingParams]) -> torch.Tensor:
    """Probabilities [n, vocabulary] float32 after temperature, top-k, top-p and min-p; not normalised.

    top-p keeps the smallest set that reaches it, and at least one token. Equal tokens: the lower id comes first.
    """

    def column(name: str) -> torch.Tensor:
        return torch.tensor([[float(getattr(p, name))] for p in params], device=logits.device)

    scaled = (logits - logits.amax(-1, keepdim=True)) / column("temperature").clamp(min=1e-10)
    probs = scaled.softmax(-1)
    cut = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if cut:
        probs[cut] = _top(probs[cut], [params[row] for row in cut])
    return probs.masked_fill(probs < column("min_p") * probs.amax(-1, keepdim=True), 0)


def _top(probs: torch.Tensor, params: SequenceOf[SamplingParams]) -> torch.Tensor:
    """`probs` with everything outside top-k, then outside top-p of what is left, set to 0."""
    ranked, order = probs.sort(stable=True, dim=-1, descending=True)
    size = probs.shape[-1]
    top_k = torch.tensor([[min(p.top_k, size) if p.top_k > 0 else size] for p in params], device=probs.device)
    top_p = torch.tensor([[p.top_p] for p in params], device=probs.device)
    rank = torch.arange(size, device=probs.device)
    ranked = ranked.masked_fill(rank >= top_k, 0)
    ranked = ranked / ranked.sum(-1, keepdim=True)
    before = ranked.cumsum(-1) - ranked
    ranked = ranked.masked_fill((before >= top_p - _SLACK) & (rank > 0) & (top_p < 1), 0)
    return torch.zeros_like(probs).scatter_(-1, order, ranked)


def _draw(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first token at which the running sum of `probs` [n, vocabulary] exceeds `uniforms` [n] of the total."""
    sums = probs.double().cumsum(-1)
    return torch.searchsorted(sums, uniforms[:, None] * sums[:, -1:], right=True)[:, 0]


def _penalize(logits: torch.Tensor, seq: Sequence, eos_token_ids: SequenceOf[int]) -> None:
    """Apply a row's penalties and its `min_tokens` to `logits` [vocabulary], in place."""
    params = seq.params
    if barred := _barred(seq, eos_token_ids, len(logits)):
        logits[barred] = -torch.inf
    if params.repetition_penalty != 1:
        seen = torch.unique(torch.tensor(seq.token_ids, device=logits.device))
        scores = logits[seen]
        logits[seen] = torch.where(scores < 0, scores * params.repetition_penalty, scores / params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and seq.num_completion_tokens:
        generated = torch.tensor(seq.completion_ids, device=logits.device)
        tokens, counts = torch.unique(generated, return_counts=True)
        logits[tokens] -= params.presence_penalty + params.frequency_penalty * counts


def _adjusts(seq: Sequence) -> bool:
    """Whether `_penalize` changes anything in this row now."""
    return seq.params.has_penalties or seq.num_completion_tokens < seq.params.min_tokens


def _barred(seq: Sequence, eos_token_ids: SequenceOf[int], vocabulary: int) -> list[int]:
    """The tokens that would end a row before its `min_tokens`."""
    if seq.num_completion_tokens >= seq.params.min_tokens:
        return []
    ends = [*seq.params.stop_token_id, *([] if seq.params.ignore_eos else eos_token_ids)]
    return [token for token in ends if token < vocabulary]
