"""Logits to tokens, each row by its own settings.

The random stream of a row depends on its seed, its identity and the position of the token, never on the batch: one
uniform number is drawn for each token, and the token is where the cumulative distribution, in vocabulary order,
passes it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

import torch

from cbatch.config import SamplingParams
from cbatch.model import ops
from cbatch.model.batch import to_device

if TYPE_CHECKING:
    from cbatch.engine.sequence import Sequence

INVALID_LOGITS = -1  # in place of a token: the row's logits are NaN or infinite

_SLACK = 1e-6  # how far float32 sums of probabilities may be from top_p


def sample(logits: torch.Tensor, sequences: SequenceOf[Sequence], eos_token_ids: SequenceOf[int]) -> torch.Tensor:
    """logits [n, vocabulary], one row for each sequence -> token ids [n] int64, or INVALID_LOGITS.

    On a GPU the draw is that of `kernels/gpu/sample.py`, whose random numbers are others, of the same streams. On a CPU
    what may not be drawn becomes -inf in `logits`.
    """
    if ops.uses_triton(logits):
        return _sample_on_device(logits, sequences, eos_token_ids)
    barred = _barred(sequences, eos_token_ids, logits.shape[-1])
    if barred[0]:
        logits[barred] = -torch.inf
    penalized = {row: seq for row, seq in enumerate(sequences) if seq.params.has_penalties}
    if not penalized:
        return _next(logits, dict(enumerate(sequences)))
    tokens = torch.empty(len(sequences), dtype=torch.int64, device=logits.device)
    changed = logits[list(penalized)].float()
    for scores, seq in zip(changed, penalized.values(), strict=True):
        _penalize(scores, seq)
    tokens[list(penalized)] = _next(changed, dict(enumerate(penalized.values())))
    others = {row: seq for row, seq in enumerate(sequences) if row not in penalized}
    tokens[list(others)] = _next(logits, others)
    return tokens


def _next(logits: torch.Tensor, sequences: Mapping[int, Sequence]) -> torch.Tensor:
    """The next token of each of `sequences`, whose keys are their rows in `logits`."""
    params = [seq.params for seq in sequences.values()]
    if len(sequences) == len(logits) and all(p.temperature == 0 for p in params):
        return ops.argmax(logits)
    uniforms = [uniform(seq.request.random_key, seq.num_completion_tokens) for seq in sequences.values()]
    if (c := ops.c_sampler(logits)) is not None:
        size = logits.shape[-1]
        draws = [
            (row, p.temperature, p.top_k if 0 < p.top_k < size else size, p.top_p, p.min_p, number)
            for row, p, number in zip(sequences, params, uniforms, strict=True)
        ]
        return c.sample(logits, torch.tensor(draws, dtype=torch.float64).view(-1, 6))
    logits = logits[list(sequences)].float()
    tokens = ops.argmax(logits)
    drawn = [at for at, p in enumerate(params) if p.temperature > 0]
    if drawn:
        probs = filtered_probs(logits[drawn].nan_to_num(), [params[at] for at in drawn])
        chosen = _draw(probs, torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[drawn])
        tokens[drawn] = torch.where(tokens[drawn] == INVALID_LOGITS, INVALID_LOGITS, chosen)
    return tokens


def _sample_on_device(
    logits: torch.Tensor, sequences: SequenceOf[Sequence], eos_token_ids: SequenceOf[int]
) -> torch.Tensor:
    """`sample` without a wait for the device."""
    from cbatch.kernels.gpu import sample as kernel

    logits = _adjusted(logits, sequences, eos_token_ids)
    params = [seq.params for seq in sequences]
    signed = [(seq.request.random_key + 2**63) % 2**64 - 2**63 for seq in sequences]
    top_k = [max(0, min(p.top_k, logits.shape[-1])) for p in params]
    seeds, ks, at = to_device(logits.device, signed, top_k, [seq.num_completion_tokens for seq in sequences])
    temperature, top_p, min_p = _floats(params, ("temperature", "top_p", "min_p"), logits.device)
    return kernel.sample(logits, temperature, ks.int(), top_p, min_p, seeds, at.int())


def _adjusted(logits: torch.Tensor, sequences: SequenceOf[Sequence], eos_token_ids: SequenceOf[int]) -> torch.Tensor:
    """`logits` without what may not be drawn, and with what `_penalize` does to a row for all that need it at once."""
    from cbatch.kernels.gpu.sample import penalize

    rows, barred = _barred(sequences, eos_token_ids, logits.shape[-1])
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


def _penalize(logits: torch.Tensor, seq: Sequence) -> None:
    """Apply a row's penalties to `logits` [vocabulary] float32, in place."""
    params = seq.params
    if params.repetition_penalty != 1:
        seen = torch.tensor(list(set(seq.token_ids)), device=logits.device)
        scores = logits[seen]
        logits[seen] = torch.where(scores < 0, scores * params.repetition_penalty, scores / params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and seq.num_completion_tokens:
        counts = Counter(seq.completion_ids)
        times = torch.tensor(list(counts.values()), device=logits.device)
        logits[list(counts)] -= params.presence_penalty + params.frequency_penalty * times


def _barred(
    sequences: SequenceOf[Sequence], eos_token_ids: SequenceOf[int], vocabulary: int
) -> tuple[list[int], list[int]]:
    """Rows and tokens of the pairs that may not be drawn: those that would end a row before its `min_tokens`."""
    rows: list[int] = []
    tokens: list[int] = []
    for row, seq in enumerate(sequences):
        if seq.num_completion_tokens < seq.params.min_tokens:
            ends = [*seq.params.stop_token_ids, *([] if seq.params.ignore_eos else eos_token_ids)]
            tokens += [token for token in ends if token < vocabulary]
            rows += [row] * (len(tokens) - len(rows))
    return rows, tokens
