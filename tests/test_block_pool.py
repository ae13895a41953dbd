from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.engine.block_pool import BlockPool
from cbatch.engine.sequence import Sequence
from tests.drive import make_request


def sequence(token_ids: list[int], max_len: int = 1000) -> Sequence:
    return Sequence(make_request(0, token_ids), max_len)


def compute(pool: BlockPool, seq: Sequence, num_tokens: int | None = None) -> None:
    """Pretend that the next `num_tokens` of `seq` went through the model."""
    seq.num_computed_tokens += seq.num_pending_tokens if num_tokens is None else num_tokens
    pool.remember(seq)


def admitted(pool: BlockPool, token_ids: list[int]) -> Sequence:
    seq = sequence(token_ids)
    assert pool.admit(seq, reserve=0)
    return seq


def after_one_run(pool: BlockPool, token_ids: list[int]) -> None:
    seq = admitted(pool, token_ids)
    compute(pool, seq)
    pool.release(seq)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_sequence_gets_as_many_blocks_as_its_tokens_need(num_tokens: int, num_blocks: int) -> None:
    pool = BlockPool(8, 4)
    seq = admitted(pool, list(range(num_tokens)))
    assert len(set(seq.block_table)) == pool.num_used_blocks == num_blocks
    pool.check([seq])


def test_admission_is_all_or_nothing() -> None:
    pool = BlockPool(4, 4)
    first = admitted(pool, list(range(8)))
    refused = sequence(list(range(100, 109)))
    assert not pool.admit(refused, reserve=0)
    assert refused.block_table == []
    assert pool.num_free_blocks == 2
    assert not pool.admit(sequence([50]), reserve=2)
    small = sequence([50])
    assert pool.admit(small, reserve=1)
    pool.check([first, small])


def test_growing_takes_a_block_only_at_its_edge_and_none_if_there_is_none() -> None:
    pool = BlockPool(2, 4)
    seq = admitted(pool, [1, 2, 3])
    for token, blocks in ((4, 1), (5, 2), (6, 2), (7, 2), (8, 2)):
        seq.token_ids.append(token)
        assert pool.grow(seq)
        assert len(seq.block_table) == blocks
    seq.token_ids.append(9)
    assert not pool.grow(seq)
    assert len(seq.block_table) == 2


@pytest.mark.parametrize(("num_tokens", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_a_repeated_prompt_finds_its_full_blocks_but_always_computes_a_token(num_tokens: int, cached: int) -> None:
    pool, tokens = BlockPool(8, 4), list(range(num_tokens))
    for time in range(3):
        seq = admitted(pool, tokens)
        assert seq.num_cached_tokens == seq.num_computed_tokens == (cached if time else 0)
        compute(pool, seq)
        pool.release(seq)
        pool.check([])


def test_running_sequences_share_the_blocks_of_a_common_prefix() -> None:
    pool = BlockPool(8, 4)
    first = admitted(pool, list(range(12)))
    compute(pool, first)
    second = admitted(pool, [*range(8), 90, 91])
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    pool.check([first, second])
    pool.release(first)
    pool.check([second])
    compute(pool, second)
    pool.release(second)
    pool.check([])


def test_blocks_that_are_not_computed_are_not_found() -> None:
    pool = BlockPool(8, 4)
    first = admitted(pool, list(range(12)))
    compute(pool, first, 6)
    second = admitted(pool, list(range(12)))
    assert second.num_cached_tokens == 4


def test_equal_blocks_behind_different_prefixes_are_different() -> None:
    pool = BlockPool(8, 4)
    after_one_run(pool, [1, 2, 3, 4, 5, 6, 7, 8, 0])
    assert admitted(pool, [9, 2, 3, 4, 5, 6, 7, 8, 0]).num_cached_tokens == 0
    assert admitted(pool, [5, 6, 7, 8, 0]).num_cached_tokens == 0


def test_behind_a_lost_block_nothing_counts_as_found() -> None:
    pool, tokens = BlockPool(4, 4), list(range(13))
    after_one_run(pool, tokens)
    other = admitted(pool, list(range(50, 58)))  # takes the blank block and the last of the idle ones
    pool.release(other)
    assert admitted(pool, tokens).num_cached_tokens == 8
    pool = BlockPool(4, 4)
    after_one_run(pool, tokens)
    first_block = pool._find(tokens)[0]
    pool._idle = {first_block: None, **{block: None for block in pool._idle if block != first_block}}
    taken = admitted(pool, [50, 51, 52, 53, 54])  # a blank block, then the first of the idle ones
    assert first_block in taken.block_table
    assert pool._find(tokens) == []


def test_idle_blocks_are_reused_end_first_and_least_recently_used_first() -> None:
    pool = BlockPool(6, 4)
    old, new = [*range(12), 0], [*range(20, 32), 0]
    after_one_run(pool, old[:12])
    after_one_run(pool, new[:12])
    seq = admitted(pool, [90] * 8)
    assert (len(pool._find(old)), len(pool._find(new))) == (1, 3)
    pool.release(seq)


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(8, 4, enable_prefix_caching=False)
    after_one_run(pool, list(range(12)))
    assert admitted(pool, list(range(12))).num_cached_tokens == 0
    assert len(pool._blank) == 5


def test_a_cached_prefix_held_by_others_still_leaves_room_for_the_reserve() -> None:
    pool = BlockPool(4, 4)
    after_one_run(pool, list(range(8)))
    seq = sequence([*range(8), 50, 51])  # 2 idle blocks found, 1 new, 1 left
    assert not pool.admit(seq, reserve=2)
    pool.check([])
    assert pool.admit(seq, reserve=1)
    assert pool.num_free_blocks == 1


@pytest.mark.parametrize(
    "damage",
    [
        "seq.block_table.pop()",
        "seq.block_table.append(seq.block_table[0])",
        "pool._blank.append(seq.block_table[0])",
        "pool._blank.append(pool._blank[0])",
        "pool._blank.pop()",
        "pool._key_of.clear()",
    ],
)
def test_check_notices_damage(damage: str) -> None:
    pool = BlockPool(4, 4)
    seq = admitted(pool, list(range(6)))
    compute(pool, seq)
    pool.check([seq])
    exec(damage, {"pool": pool, "seq": seq})
    with pytest.raises(AssertionError):
        pool.check([seq])


def test_a_fork_shares_full_blocks_and_gets_a_copy_of_the_last() -> None:
    pool = BlockPool(8, 4)
    seq = admitted(pool, list(range(11)))
    compute(pool, seq)
    child = sequence([*range(11), 90])
    assert pool.fork(seq, child) == [(seq.block_table[2], child.block_table[2])]
    assert child.block_table[:2] == seq.block_table[:2]
    assert child.block_table[2] != seq.block_table[2]
    assert (child.num_computed_tokens, pool.num_used_blocks) == (11, 4)
    pool.check([seq, child])
    for released, left in ((seq, [child]), (child, [])):
        pool.release(released)
        pool.check(left)
    assert pool.num_used_blocks == 0


@pytest.mark.parametrize(("num_tokens", "shared", "computed"), [(1, 0, 0), (3, 0, 2), (4, 0, 3), (5, 1, 4), (8, 1, 7)])
def test_a_fork_with_no_token_of_its_own_computes_the_last_one_again(
    num_tokens: int, shared: int, computed: int
) -> None:
    pool = BlockPool(8, 4)
    seq = admitted(pool, list(range(num_tokens)))
    compute(pool, seq)
    child = sequence(list(range(num_tokens)))
    copies = pool.fork(seq, child)
    assert copies is not None
    assert len(copies) == (computed % 4 > 0)
    assert child.num_computed_tokens == computed
    assert child.block_table[:shared] == seq.block_table[:shared]
    assert not set(child.block_table[shared:]) & set(seq.block_table)
    pool.check([seq, child])


def test_a_fork_for_which_there_is_no_block_changes_nothing() -> None:
    pool = BlockPool(2, 4)
    seq, child = admitted(pool, list(range(6))), sequence(list(range(7)))
    compute(pool, seq)
    assert pool.fork(seq, child) is None
    assert (child.block_table, child.num_computed_tokens) == ([], 0)
    pool.check([seq])
    even = sequence([*range(4), 90])
    seq.num_computed_tokens = 4
    assert pool.fork(seq, even) == []  # nothing to copy, so no block is needed
    pool.check([seq, even])


class FakeCache:
    """Sequences of random tokens over a pool, and a cache that holds for each slot the whole prefix that ends there."""

    def __init__(self, pool: BlockPool, rng: random.Random) -> None:
        self.pool, self.rng = pool, rng
        self.content: dict[int, tuple[int, ...]] = {}
        self.running: list[Sequence] = []

    def slot(self, seq: Sequence, position: int) -> int:
        size = self.pool.block_size
        return seq.block_table[position // size] * size + position % size

    def admit(self) -> None:
        seq = sequence([self.rng.randrange(2) for _ in range(self.rng.randint(1, 3 * self.pool.block_size + 1))])
        if self.pool.admit(seq, reserve=0):
            self.running.append(seq)
            assert seq.num_computed_tokens < len(seq.token_ids)

    def compute(self, seq: Sequence) -> None:
        """Let some tokens through the model, and give a sequence that has none left a new one."""
        if not self.pool.grow(seq):
            return
        last = min(len(seq.token_ids), seq.num_computed_tokens + self.rng.randint(1, 4))
        for position in range(seq.num_computed_tokens, last):
            self.content[self.slot(seq, position)] = tuple(seq.token_ids[: position + 1])
        seq.num_computed_tokens = last
        self.pool.remember(seq)
        if last == len(seq.token_ids):
            seq.token_ids.append(self.rng.randrange(2))

    def fork(self, seq: Sequence) -> None:
        child = sequence(list(seq.token_ids))
        if (copies := self.pool.fork(seq, child)) is None:
            assert self.pool.num_free_blocks == 0
            assert child.block_table == []
            return
        size = self.pool.block_size
        for source, target in copies:
            for offset in range(size):
                self.content[target * size + offset] = self.content.get(source * size + offset, ())
        assert child.num_computed_tokens == min(seq.num_computed_tokens, len(seq.token_ids) - 1)
        child.token_ids[-1] = self.rng.randrange(2)  # the two may differ from here on
        self.running.append(child)

    def check(self) -> None:
        for seq in self.running:
            for position in range(seq.num_computed_tokens):
                assert self.content[self.slot(seq, position)] == tuple(seq.token_ids[: position + 1])
        self.pool.check(self.running)


@settings(deadline=None, max_examples=300)
@given(
    num_blocks=st.integers(1, 12),
    block_size=st.integers(1, 5),
    caching=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_what_the_cache_finds_is_what_was_written_there(
    num_blocks: int, block_size: int, caching: bool, seed: int
) -> None:
    rng = random.Random(seed)
    cache = FakeCache(BlockPool(num_blocks, block_size, caching), rng)
    for _ in range(60):
        action = rng.random()
        if action < 0.3 or not cache.running:
            cache.admit()
        elif action < 0.45:
            cache.fork(rng.choice(cache.running))
        elif action < 0.8:
            cache.compute(rng.choice(cache.running))
        else:
            cache.pool.release(cache.running.pop(rng.randrange(len(cache.running))))
        cache.check()


def test_what_is_forgotten_is_not_found_again_though_others_hold_it() -> None:
    pool = BlockPool(8, 2)
    first, other = admitted(pool, [1, 2, 3, 4, 5]), sequence([1, 2, 9])
    compute(pool, first, 4)
    assert pool.admit(other, reserve=0)
    assert other.num_cached_tokens == 2
    pool.forget(first)
    pool.check([first, other])
    compute(pool, first)
    pool.release(first)
    again = admitted(pool, [1, 2, 3, 4, 5])
    assert again.num_cached_tokens == 0
    pool.check([again, other])
    pool.release(other)
    pool.check([again])
