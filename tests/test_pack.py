"""Lists become tensors in one place."""

from __future__ import annotations

import torch

from cbatch.engine.pack import pack, pack_sampling
from cbatch.engine.scheduler import ScheduledChunk
from cbatch.engine.sequence import UNKNOWN, Sequence
from tests.drive import make_request

CPU = torch.device("cpu")


def sequence(number: int, prompt: list[int], num_computed: int, blocks: list[int], **params: object) -> Sequence:
    seq = Sequence(make_request(number, prompt, 1000 + number, **params), 100)
    seq.num_computed_tokens, seq.block_table = num_computed, blocks
    return seq


def test_tokens_lie_back_to_back_with_their_slots_and_outputs() -> None:
    decode = sequence(0, [5, 6, 7, 8, 9], 4, [7, 2])
    prefill = sequence(1, list(range(10, 20)), 2, [0, 4, 1])
    scored = sequence(2, [30, 31, 32], 0, [5])
    chunks = [
        ScheduledChunk(decode, 1, 1, True),
        ScheduledChunk(prefill, 3, 0, False),
        ScheduledChunk(scored, 3, 2, True),
    ]
    batch = pack(chunks, 4, CPU)
    assert batch.input_ids.tolist() == [9, 12, 13, 14, 30, 31, 32]
    assert batch.positions.tolist() == [4, 2, 3, 4, 0, 1, 2]
    assert batch.slot_mapping.tolist() == [2 * 4, 2, 3, 4 * 4, 20, 21, 22]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 4, 7]
    assert batch.seq_lens.tolist() == [5, 5, 3]
    assert batch.block_tables.tolist() == [[7, 2], [0, 4], [5, 0]]
    assert batch.spans == ((0, 1, 5), (1, 4, 5), (4, 7, 3))
    assert batch.logits_indices.tolist() == [0, 5, 6]
    assert batch.carried is None
    sampling = pack_sampling(chunks, (2,), 50, CPU)
    assert len(sampling) == 2
    assert sampling.logits_rows is not None
    assert sampling.logits_rows.tolist() == [0, 2]
    assert sampling.random_keys.tolist() == [1000, 1002]
    assert sampling.positions.tolist() == [0, 0]
    assert (sampling.is_greedy, sampling.barred, sampling.penalties) == (True, None, None)


def test_a_token_that_is_still_being_drawn_is_taken_from_the_step_before() -> None:
    first, second = sequence(0, [5, 6], 2, [0]), sequence(1, [7], 1, [1])
    for seq in (first, second):
        seq.token_ids.append(UNKNOWN)
        seq.num_unknown_tokens = 1
    batch = pack([ScheduledChunk(second, 1, 1, True)], 4, CPU, before=[first, second])
    assert batch.carried is not None
    places, drawn = batch.carried
    assert (places.tolist(), drawn.tolist()) == ([0], [1])


def test_the_outputs_of_a_prompt_are_all_its_tokens_from_the_first_that_is_wanted() -> None:
    seq = sequence(0, list(range(10)), 0, [0, 1, 2])
    assert [seq.num_outputs(4, False), seq.num_outputs(10, True)] == [0, 1]
    seq.first_output = 3
    outputs: list[int] = []
    for num_tokens in (2, 2, 5, 1):
        reaches_end = seq.num_computed_tokens + num_tokens == 10
        count = seq.num_outputs(num_tokens, reaches_end)
        seq.num_computed_tokens += num_tokens
        outputs += range(seq.num_computed_tokens - count, seq.num_computed_tokens)
    assert outputs == list(range(3, 10))


def test_what_is_barred_and_penalised_is_named_by_row() -> None:
    plain = sequence(0, [5], 0, [0], temperature=0.5, top_k=10**30, top_p=0.9, min_p=0.1)
    ends = sequence(1, [5], 0, [0], min_tokens=1, stop_token_ids=[3, 77])
    penalised = sequence(2, [5, 6], 0, [0], frequency_penalty=0.5, repetition_penalty=2.0)
    penalised.token_ids += [8, 8]
    sampling = pack_sampling([ScheduledChunk(seq, 1, 1, True) for seq in (plain, ends, penalised)], (2, 60), 50, CPU)
    assert sampling.logits_rows is None
    assert not sampling.is_greedy
    assert sampling.temperature.tolist() == [0.5, 0, 0]
    assert sampling.top_k.tolist() == [50, 0, 0]
    assert (sampling.top_p[0].item(), sampling.min_p[0].item()) == (0.9, 0.1)
    assert sampling.barred is not None
    assert [index.tolist() for index in sampling.barred] == [[1, 1], [3, 2]]
    penalties = sampling.penalties
    assert penalties is not None
    assert penalties.rows.tolist() == [2]
    assert penalties.history.tolist() == [[5, 6, 8, 8]]
    assert (penalties.lengths.tolist(), penalties.prompt_lengths.tolist()) == ([4], [2])
    assert (penalties.repetition.item(), penalties.presence.item(), penalties.frequency.item()) == (2.0, 0.0, 0.5)
