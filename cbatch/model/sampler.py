"""Logits to tokens, each row by its own settings.

The random numbers of a row depend on its random key and the position of the token, never on the batch: one uniform
number is drawn for each token, and the token is where the cumulative distribution, in the order of the vocabulary, passes
that number. On a GPU the draw is that of `kernels/gpu/sample.py`, with other random numbers of the same keys.
"""

from __future__ import annotations

import hashlib

import torch

from cbatch.model.batch import Penalties, SamplingBatch, StepOutput
from cbatch.model.ops import Backend

INVALID_LOGITS = -1  # in place of a token: the row's logits are NaN or infinite

_SLACK = 1e-6  # how far float32 sums of probabilities may be from top_p


def sample(logits: torch.Tensor, sampling: SamplingBatch, backend: Backend) -> StepOutput:
    """logits [num_outputs, vocabulary] -> the next token of each row of `sampling`. May change `logits`.

    Order: barred tokens, penalties, temperature, top-k, top-p, min-p. Penalised rows are drawn from float32.
    """
    if sampling.logits_rows is not None:
        logits = logits[sampling.logits_rows]
    if backend.draws_on_device:
        return StepOutput(_draw_on_gpu(logits, sampling))
    return StepOutput(_draw_on_cpu(logits, sampling, backend))


def _draw_on_gpu(logits: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
    """Token ids [n], without a wait for the device."""
    from cbatch.kernels.gpu import sample as kernel

    logits = _adjusted_on_gpu(logits, sampling)
    temperature, top_p, min_p = (column.float() for column in (sampling.temperature, sampling.top_p, sampling.min_p))
    top_k, positions = sampling.top_k.int(), sampling.positions.int()
    return kernel.sample(logits, temperature, top_k, top_p, min_p, sampling.random_keys, positions)


def _adjusted_on_gpu(logits: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
    """`logits` after penalties, and without what is barred."""
    from cbatch.kernels.gpu.sample import penalize

    if (penalties := sampling.penalties) is not None:
        changed = logits.index_select(0, penalties.rows).float()
        factors = (factor.float() for factor in (penalties.repetition, penalties.presence, penalties.frequency))
        penalize(changed, penalties.history, penalties.lengths, penalties.prompt_lengths, *factors)
        logits = logits.float().index_copy(0, penalties.rows, changed)
    if sampling.barred is not None:
        logits = logits.index_put(sampling.barred, torch.full((), -torch.inf, dtype=logits.dtype, device=logits.device))
    return logits


def _draw_on_cpu(logits: torch.Tensor, sampling: SamplingBatch, backend: Backend) -> torch.Tensor:
    """Token ids [n]; what is barred becomes -inf in `logits`."""
    if sampling.barred is not None:
        logits[sampling.barred] = -torch.inf
    if (penalties := sampling.penalties) is None:
        return _next(logits, torch.arange(len(sampling)), sampling, backend)
    token_ids = torch.empty(len(sampling), dtype=torch.int64)
    changed = logits[penalties.rows].float()
    _penalize(changed, penalties)
    token_ids[penalties.rows] = _next(changed, torch.arange(len(changed)), sampling.select(penalties.rows), backend)
    is_other = torch.ones(len(sampling), dtype=torch.bool)
    is_other[penalties.rows] = False
    others = is_other.nonzero()[:, 0]
    token_ids[others] = _next(logits, others, sampling.select(others), backend)
    return token_ids


def _next(logits: torch.Tensor, rows: torch.Tensor, sampling: SamplingBatch, backend: Backend) -> torch.Tensor:
    """Token ids [n], drawn from the `rows` [n] of `logits`."""
    if sampling.is_greedy and len(rows) == len(logits):
        return backend.argmax(logits)
    keys, positions = sampling.random_keys.tolist(), sampling.positions.tolist()
    uniforms = torch.tensor(
        [uniform(key % 2**64, position) for key, position in zip(keys, positions, strict=True)], dtype=torch.float64
    )
    if backend.can_draw(logits):
        top_k = torch.where(sampling.top_k == 0, logits.shape[-1], sampling.top_k)
        columns = rows, sampling.temperature, top_k, sampling.top_p, sampling.min_p, uniforms
        return backend.draw(logits, torch.stack([column.double() for column in columns], 1))
    logits = logits[rows].float()
    token_ids = backend.argmax(logits)
    drawn = (sampling.temperature > 0).nonzero()[:, 0]
    if len(drawn):
        probs = filtered_probs(logits[drawn].nan_to_num(), sampling.select(drawn))
        found = _quantile(probs, uniforms[drawn])
        token_ids[drawn] = torch.where(token_ids[drawn] == INVALID_LOGITS, INVALID_LOGITS, found)
    return token_ids


def uniform(random_key: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, the same for the same arguments everywhere."""
    key = random_key.to_bytes(8, "little") + position.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") / 2**64 * (1 - 2**-53)


def filtered_probs(logits: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
    """Probabilities [n, vocabulary] float32 after temperature, top-k, top-p and min-p; not normalised.

    top-p keeps the smallest set that reaches it, and at least one token. Equal tokens: the lower id comes first.
    """
    temperature, min_p = sampling.temperature.float()[:, None], sampling.min_p.float()[:, None]
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature.clamp(min=1e-10)
    probs = scaled.softmax(-1)
    cut = ((sampling.top_k > 0) | (sampling.top_p < 1)).nonzero()[:, 0]
    if len(cut):
        probs[cut] = _top(probs[cut], sampling.top_k[cut], sampling.top_p.float()[cut])
    return probs.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), 0)


def _top(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """`probs` with everything outside top-k, then outside top-p of what is left, set to 0."""
    ranked, order = probs.sort(stable=True, dim=-1, descending=True)
    size = probs.shape[-1]
    num_kept, top_p = torch.where(top_k == 0, size, top_k)[:, None], top_p[:, None]
    rank = torch.arange(size, device=probs.device)
    ranked = ranked.masked_fill(rank >= num_kept, 0)
    ranked = ranked / ranked.sum(-1, keepdim=True)
    before = ranked.cumsum(-1) - ranked
    ranked = ranked.masked_fill((before >= top_p - _SLACK) & (rank > 0) & (top_p < 1), 0)
    return torch.zeros_like(probs).scatter_(-1, order, ranked)


def _quantile(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first token at which the running sum of `probs` [n, vocabulary] exceeds `uniforms` [n] of the total."""
    sums = probs.double().cumsum(-1)
    return torch.searchsorted(sums, uniforms[:, None] * sums[:, -1:], right=True)[:, 0]


def _penalize(logits: torch.Tensor, penalties: Penalties) -> None:
    """Apply penalties to logits [m, vocabulary] float32, in place: to the tokens that were seen, and to no other."""
    columns = penalties.lengths, penalties.prompt_lengths, penalties.repetition, penalties.presence, penalties.frequency
    for scores, history, *row in zip(logits, penalties.history, *(column.tolist() for column in columns), strict=True):
        length, prompt_length, repetition, presence, frequency = row
        if repetition != 1:
            seen = history[:length].unique()
            chosen = scores[seen]
            scores[seen] = torch.where(chosen < 0, chosen * repetition, chosen / repetition)
        if (presence or frequency) and length > prompt_length:
            generated, counts = history[prompt_length:length].unique(return_counts=True)
            scores[generated] -= presence + frequency * counts
