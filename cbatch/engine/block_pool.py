"""The blocks of the KV cache: which sequences hold them, and which can be found again by the tokens in them."""

from __future__ import annotations

from collections import Counter

from cbatch.engine.sequence import Sequence

_ROOT = 0  # the uid of the empty prefix

_Key = tuple[int, tuple[int, ...]]  # uid of the block before, this block's tokens


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens, counted by reference.

    A block is blank (free, holds nothing), idle (free, holds a cached prefix), or held by one or more block tables.
    The prefix cache is a chain: a full block is filed under the uid of the block before it and its own tokens, so that
    a hit compares all tokens of the whole prefix, never just a hash of them. Idle blocks are reused least recently used
    first, the end of a sequence before its beginning.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._blank = list(range(num_blocks))[::-1]
        self._idle: dict[int, None] = {}  # in order of release
        self._num_refs = [0] * num_blocks
        self._block_of: dict[_Key, int] = {}
        self._key_of: dict[int, _Key] = {}
        self._uid_of: dict[int, int] = {}
        self._last_uid = _ROOT

    @property
    def num_free_blocks(self) -> int:
        return len(self._blank) + len(self._idle)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def admit(self, seq: Sequence, reserve: int, max_tokens: int = 0) -> bool:
        """Give `seq` blocks for all its tokens (or `max_tokens`), cached blocks first, if `reserve` more stay free.

        Returns whether they did. Sets `num_computed_tokens` to the cached tokens; one token is always left to compute.
        """
        cached = self._find(seq.token_ids[:-1])
        missing = self.blocks_for(max(len(seq.token_ids), max_tokens)) - len(cached)
        idle_hits = sum(block in self._idle for block in cached)
        if missing + reserve > self.num_free_blocks - idle_hits:
            return False
        for block in cached:
            self._idle.pop(block, None)
            self._num_refs[block] += 1
        seq.block_table = cached + [self._take() for _ in range(missing)]
        seq.num_computed_tokens = len(cached) * self.block_size
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens
        seq.num_hashed_blocks = len(cached)
        seq.prefix_uid = self._uid_of[cached[-1]] if cached else _ROOT
        return True

    def grow(self, seq: Sequence) -> bool:
        """Extend the block table to hold all tokens of `seq`; False, and no change, if there are not enough blocks."""
        missing = self.blocks_for(len(seq.token_ids)) - len(seq.block_table)
        if missing > self.num_free_blocks:
            return False
        seq.block_table.extend(self._take() for _ in range(missing))
        return True

    def fork(self, seq: Sequence, child: Sequence) -> list[tuple[int, int]] | None:
        """Let `child`, whose tokens begin with those of `seq`, start from what is computed of `seq`.

        Full blocks are shared. A last block that is only partly full must be copied: returns its id and the id of the
        block of `child` to copy it to, in a list, or an empty list. One token of `child` is always left to compute.
        None, and no change, if there is no free block for the copy.
        """
        num_tokens = min(seq.num_computed_tokens, len(child.token_ids) - 1)
        num_full, rest = divmod(num_tokens, self.block_size)
        if rest and not self.num_free_blocks:
            return None
        for block in seq.block_table[:num_full]:
            self._num_refs[block] += 1
        child.block_table = seq.block_table[:num_full]
        child.num_computed_tokens = num_tokens
        child.num_cached_tokens = child.num_hashed_blocks = 0
        child.prefix_uid = _ROOT
        if not rest:
            return []
        child.block_table.append(self._take())
        return [(seq.block_table[num_full], child.block_table[-1])]

    def remember(self, seq: Sequence) -> None:
        """File the full and computed blocks of `seq` in the prefix cache."""
        if not self.enable_prefix_caching:
            return
        size = self.block_size
        for index in range(seq.num_hashed_blocks, min(seq.num_computed_tokens, seq.num_known_tokens) // size):
            key = (seq.prefix_uid, tuple(seq.token_ids[index * size : (index + 1) * size]))
            block = self._block_of.get(key, seq.block_table[index])
            if block not in self._key_of:  # else a fork has filed it, possibly when the block before it had another uid
                self._last_uid += 1
                self._block_of[key], self._key_of[block], self._uid_of[block] = block, key, self._last_uid
            seq.prefix_uid = self._uid_of[block]
            seq.num_hashed_blocks = index + 1

    def forget(self, seq: Sequence) -> None:
        """Take every block of the tokens of `seq` out of the prefix cache, and have none of it found again."""
        for block in self._find(seq.token_ids):
            del self._block_of[self._key_of.pop(block)], self._uid_of[block]
            if block in self._idle:
                del self._idle[block]
                self._blank.append(block)
        self._last_uid += 1
        seq.prefix_uid = self._last_uid  # that of no block: what is filed behind it can't be found

    def release(self, seq: Sequence) -> None:
        """Give back the blocks of `seq`. They stay in the prefix cache until they are reused."""
        for block in reversed(seq.block_table):
            self._num_refs[block] -= 1
            if self._num_refs[block] == 0:
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    self._blank.append(block)
        seq.block_table = []
        seq.num_computed_tokens = seq.num_hashed_blocks = 0

    def check(self, sequences: list[Sequence]) -> None:
        """Raise AssertionError if a block is leaked, owned twice, or filed under what it does not hold."""
        held = Counter(block for seq in sequences for block in seq.block_table)
        assert all(self._num_refs[block] == held[block] for block in range(self.num_blocks)), "wrong reference count"
        free = [*self._blank, *self._idle]
        assert len(set(free)) == len(free), "block free twice"
        assert set(free) | set(held) == set(range(self.num_blocks)), "block leaked"
        assert not set(free) & set(held), "block free and held"
        assert {block: key for key, block in self._block_of.items()} == self._key_of, "prefix cache out of step"
        assert set(self._idle) <= set(self._key_of), "idle block that can't be found"

    def _find(self, token_ids: list[int]) -> list[int]:
        """The cached blocks of the longest known prefix of these tokens."""
        found: list[int] = []
        if not self.enable_prefix_caching:
            return found
        uid, size = _ROOT, self.block_size
        for start in range(0, len(token_ids) // size * size, size):
            block = self._block_of.get((uid, tuple(token_ids[start : start + size])))
            if block is None:
                break
            found.append(block)
            uid = self._uid_of[block]
        return found

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block = next(iter(self._idle))
            del self._idle[block]
            del self._block_of[self._key_of.pop(block)]
            del self._uid_of[block]
        self._num_refs[block] = 1
        return block
