"""The rows that a benchmark computes: token ids, and how many tokens each must yield."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from cbatch.errors import UsageError
from cbatch.rows.inputs import resolve
from cbatch.rows.reader import read

_TEXTS = ("argparse", "inspect", "tarfile", "typing")
_SEED = 0


@dataclass(frozen=True)
class Item:
    """A row. It must yield exactly `max_tokens` tokens, chosen greedily, past any end-of-sequence token."""

    token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Work:
    """The least work that a workload can cost. All are numbers of tokens."""

    computed: int  # through the layers; a beginning that prompts share counts once
    sampled: int  # through the LM head
    read: int  # whose keys and values are read, summed over the tokens that attend to them


@dataclass(frozen=True)
class Workload:
    """Rows to be computed."""

    name: str
    items: list[Item]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.items)

    @property
    def output_tokens(self) -> int:
        return sum(item.max_tokens for item in self.items)

    @property
    def longest(self) -> int:
        """Tokens of the longest row, prompt and output together."""
        return max(len(item.token_ids) + item.max_tokens for item in self.items)

    @cached_property
    def work(self) -> Work:
        prompts = sorted(item.token_ids for item in self.items)
        shared = sum(_num_shared(a, b) for a, b in pairwise(prompts))
        decoded = self.output_tokens - len(self.items)  # a row's first token comes from its prompt
        read = sum(_num_read(len(item.token_ids), item.max_tokens) for item in self.items)
        return Work(self.prompt_tokens - shared + decoded, self.output_tokens, read)

    def lines(self) -> str:
        """The rows as JSONL that `cbatch run` reads."""
        rows = ({"token_ids": item.token_ids, "params": {"max_tokens": item.max_tokens}} for item in self.items)
        return "".join(json.dumps(row) + "\n" for row in rows)

    def about(self) -> dict[str, Any]:
        """Name, sizes and checksum, for the record. Workloads of equal checksums have equal rows."""
        return {
            "name": self.name,
            "rows": len(self.items),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "sha256": hashlib.sha256(self.lines().encode()).hexdigest(),
        }


def make(kind: str, num_rows: int, tokenizer: Any, context: int) -> Workload:
    """A workload made of the text of Python's own library: one Python and one tokenizer always give equal rows.

    ragged: lengths with a heavy tail, as real ones have. fixed: 128 in, 128 out. prefix: 512 tokens that all rows
    share, and a few of their own. Lengths are cut where the context (in tokens) is too short.
    """
    draw = random.Random(f"{kind} {_SEED}")
    text = "\n".join((Path(os.__file__).parent / f"{name}.py").read_text(encoding="utf-8") for name in _TEXTS)
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def lengths(median: float, spread: float, least: int, most: int) -> Callable[[], int]:
        return lambda: int(min(max(draw.lognormvariate(math.log(median), spread), least), most))

    def piece(length: int) -> list[int]:
        start = draw.randrange(len(ids) - length)
        return ids[start : start + length]

    half, quarter = context // 2, context // 4
    if kind == "ragged":
        prefix, own, out = [], lengths(120, 0.7, 8, min(1024, half)), lengths(75, 0.9, 4, min(768, half - 1))
    elif kind == "prefix":
        prefix = piece(min(512, half))
        own, out = lengths(33, 0.5, 8, min(128, quarter)), lengths(45, 0.6, 4, min(256, quarter - 1))
    else:
        prefix, own, out = [], lambda: min(128, half), lambda: min(128, half - 1)
    return Workload(kind, [Item(prefix + piece(own()), out()) for _ in range(num_rows)])


def read_file(name: str, limit: int | None, context: int) -> Workload:
    """A workload of the rows of a file, which has the columns `token_ids` and `params`; only its `max_tokens` counts."""
    items = []
    for row in read(resolve([name]), limit=limit):
        if row.problem:
            raise UsageError(str(row.problem))
        ids, params = row.data.get("token_ids"), row.data.get("params")
        max_tokens = params.get("max_tokens") if isinstance(params, dict) else None
        if not isinstance(ids, list) or not ids or type(max_tokens) is not int or max_tokens < 1:
            raise UsageError(f"{row.where}: a workload's rows have token_ids, a list, and params with max_tokens")
        if len(ids) + max_tokens > context:
            raise UsageError(
                f"{row.where}: {len(ids)} tokens and max_tokens {max_tokens} exceed the model's context of {context}"
            )
        items.append(Item(ids, max_tokens))
    if not items:
        raise UsageError(f"{name}: has no rows")
    return Workload(name, items)


def _num_shared(a: list[int], b: list[int]) -> int:
    """The number of tokens that `a` and `b` have in common at their beginning."""
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _num_read(num_prompt_tokens: int, num_output_tokens: int) -> int:
    """Tokens whose keys and values are read while a row is generated: for each output token, all tokens before it."""
    return num_output_tokens * num_prompt_tokens + num_output_tokens * (num_output_tokens - 1) // 2
