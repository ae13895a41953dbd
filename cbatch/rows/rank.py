"""Which rows are this task's, where several tasks complete one job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cbatch.errors import UsageError


@dataclass(frozen=True)
class Rank:
    """Every `num_ranks`-th row, from the `index`-th. The same rows whenever and wherever it is asked."""

    index: int = 0
    num_ranks: int = 1
    whose: str = field(default="", compare=False)  # who says so

    @property
    def is_whole(self) -> bool:
        return self.num_ranks == 1

    @property
    def suffix(self) -> str:
        """What tells its files from those of other tasks."""
        return "" if self.is_whole else f"-{self.index}-of-{self.num_ranks}"

    def __str__(self) -> str:
        return "" if self.is_whole else f"shard {self.index} of {self.num_ranks} ({self.whose})"

    def owns(self, source: Any, row: Any) -> Any:
        """Whether a row, by the index of its source and its position in that, is one of these; also of arrays."""
        return (source + row) % self.num_ranks == self.index

    def count(self, source: int, rows: range) -> int:
        """How many of these rows of a source it owns."""
        return len(rows[(self.index - source - rows.start) % self.num_ranks :: self.num_ranks])

    def inherits(self, other: Rank) -> bool:
        """Whether it is for this task to publish what a task of `other` left, where the job was divided otherwise."""
        return other.num_ranks != self.num_ranks and other.index % self.num_ranks == self.index

    def times(self, other: Rank) -> Rank:
        """The `other` share of this one."""
        whose = " and ".join(filter(None, (self.whose, other.whose)))
        return Rank(self.index * other.num_ranks + other.index, self.num_ranks * other.num_ranks, whose)


WHOLE = Rank()


def find_rank(asked: str | None, environ: Mapping[str, str]) -> Rank:
    """The share of this process: of `--shard`, else of Slurm's array and step, or of torchrun."""
    if asked == "none":
        return WHOLE
    if asked is not None:
        match = re.fullmatch(r"(\d+)/(\d+)", asked)
        if not match or int(match[1]) >= int(match[2]):
            raise UsageError(f"--shard {asked}: say i/n, with i from 0 to n-1, or none")
        return Rank(int(match[1]), int(match[2]), "--shard")
    return _of_array(environ).times(_of_step(environ))


def _of_array(environ: Mapping[str, str]) -> Rank:
    """The ids of an array need not begin at 0, but they must be evenly spaced."""
    if "SLURM_ARRAY_TASK_ID" not in environ:
        return WHOLE
    ident, first, last, count = (_number(environ, f"SLURM_ARRAY_TASK_{name}") for name in ("ID", "MIN", "MAX", "COUNT"))
    if count == 1:
        return WHOLE
    step, rest = divmod(last - first, count - 1)
    if rest or (ident - first) % step:
        raise UsageError(
            f"SLURM_ARRAY_TASK_ID={ident} of {count} ids from {first} to {last}, unevenly spaced: which shard that is can't "
            "be told; say --shard i/n, or none"
        )
    return Rank((ident - first) // step, count, "SLURM_ARRAY_TASK_ID")


def _of_step(environ: Mapping[str, str]) -> Rank:
    """In the script of a Slurm job, SLURM_NTASKS only says how many tasks srun would start."""
    if "SLURM_STEP_NUM_TASKS" in environ:
        return _of_rank(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    if "SLURM_NTASKS" in environ and "SLURM_JOB_ID" not in environ:
        return _of_rank(environ, "SLURM_PROCID", "SLURM_NTASKS")
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _of_rank(environ, "RANK", "WORLD_SIZE")
    return WHOLE


def _of_rank(environ: Mapping[str, str], name: str, name_of_total: str) -> Rank:
    index, num_ranks = _number(environ, name), _number(environ, name_of_total)
    if index >= num_ranks:
        raise UsageError(
            f"{name}={index} and {name_of_total}={num_ranks} contradict each other; say --shard i/n, or none"
        )
    return WHOLE if num_ranks == 1 else Rank(index, num_ranks, name)


def _number(environ: Mapping[str, str], name: str) -> int:
    if not environ.get(name, "").isdecimal():
        raise UsageError(
            f"{name}={environ.get(name, '')}: not a number; say which rows are this task's with --shard i/n, or none"
        )
    return int(environ[name])
