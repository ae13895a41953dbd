"""The division of a job's rows among several tasks, each of which has a rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cbatch.errors import UsageError


@dataclass(frozen=True)
class Rank:
    """One of `num_ranks` tasks. It completes every `num_ranks`-th row, beginning with row number `index`."""

    index: int = 0
    num_ranks: int = 1
    told_by: str = field(default="", compare=False)  # the flag or environment variable that says so

    @property
    def is_whole(self) -> bool:
        """Whether this task has all rows of the job."""
        return self.num_ranks == 1

    @property
    def suffix(self) -> str:
        """The part of a file's name that says which rank wrote it; empty for a task that has all rows."""
        return "" if self.is_whole else f"-{self.index}-of-{self.num_ranks}"

    def __str__(self) -> str:
        return "" if self.is_whole else f"shard {self.index} of {self.num_ranks} ({self.told_by})"

    def owns(self, source: Any, row: Any) -> Any:
        """Whether a row belongs to this rank. `source`: index of its input, `row`: position in that; or arrays of both."""
        return (source + row) % self.num_ranks == self.index

    def count(self, source: int, rows: range) -> int:
        """How many of these rows of a source belong to this rank."""
        return len(rows[(self.index - source - rows.start) % self.num_ranks :: self.num_ranks])

    def inherits(self, other: Rank) -> bool:
        """Whether this rank publishes the unfinished shard of `other`, a rank of another division of the job."""
        return other.num_ranks != self.num_ranks and other.index % self.num_ranks == self.index

    def times(self, other: Rank) -> Rank:
        """The rank of a task that has rank `other` among the tasks that share the rows of this rank."""
        told_by = " and ".join(filter(None, (self.told_by, other.told_by)))
        return Rank(self.index * other.num_ranks + other.index, self.num_ranks * other.num_ranks, told_by)


WHOLE = Rank()


def find_rank(asked: str | None, environ: Mapping[str, str]) -> Rank:
    """The rank of this process: from `asked` (`--shard`), else from Slurm's array and step, or from torchrun."""
    if asked == "none":
        return WHOLE
    if asked is not None:
        match = re.fullmatch(r"(\d+)/(\d+)", asked)
        if not match or int(match[1]) >= int(match[2]):
            raise UsageError(f"--shard {asked}: say i/n, with i from 0 to n-1, or none")
        return Rank(int(match[1]), int(match[2]), "--shard")
    return _rank_in_array(environ).times(_rank_in_step(environ))


def _rank_in_array(environ: Mapping[str, str]) -> Rank:
    """The rank of a task of a Slurm array. The ids of an array need not begin at 0, but must be evenly spaced."""
    if "SLURM_ARRAY_TASK_ID" not in environ:
        return WHOLE
    task_id, first, last, count = (
        _number(environ, f"SLURM_ARRAY_TASK_{name}") for name in ("ID", "MIN", "MAX", "COUNT")
    )
    if count == 1:
        return WHOLE
    step, rest = divmod(last - first, count - 1)
    if rest or (task_id - first) % step:
        raise UsageError(
            f"SLURM_ARRAY_TASK_ID={task_id} of {count} ids from {first} to {last}, unevenly spaced: which shard that is can't "
            "be told; say --shard i/n, or none"
        )
    return Rank((task_id - first) // step, count, "SLURM_ARRAY_TASK_ID")


def _rank_in_step(environ: Mapping[str, str]) -> Rank:
    """The rank of a task that srun or torchrun started.

    In the script of a Slurm job, SLURM_NTASKS only says how many tasks srun would start.
    """
    if "SLURM_STEP_NUM_TASKS" in environ:
        return _read_rank(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    if "SLURM_NTASKS" in environ and "SLURM_JOB_ID" not in environ:
        return _read_rank(environ, "SLURM_PROCID", "SLURM_NTASKS")
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _read_rank(environ, "RANK", "WORLD_SIZE")
    return WHOLE


def _read_rank(environ: Mapping[str, str], name: str, name_of_total: str) -> Rank:
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
