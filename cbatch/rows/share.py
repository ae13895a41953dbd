"""Which rows are this task's, where several tasks complete one job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cbatch.errors import UsageError


@dataclass(frozen=True)
class Share:
    """Every `total`-th row, from the `index`-th. The same rows whenever and wherever it is asked."""

    index: int = 0
    total: int = 1

    @property
    def is_whole(self) -> bool:
        return self.total == 1

    @property
    def suffix(self) -> str:
        """What tells its files from those of other tasks."""
        return "" if self.is_whole else f"-{self.index}-of-{self.total}"

    def __str__(self) -> str:
        return f"shard {self.index} of {self.total}"

    def owns(self, source: Any, row: Any) -> Any:
        """Whether a row, by the index of its source and its position in that, is one of these; also of arrays."""
        return (source + row) % self.total == self.index

    def count(self, source: int, rows: range) -> int:
        """How many of these rows of a source it owns."""
        return len(rows[(self.index - source - rows.start) % self.total :: self.total])

    def inherits(self, other: Share) -> bool:
        """Whether it is for this task to publish what a task of `other` left, where the job was divided otherwise."""
        return other.total != self.total and other.index % self.total == self.index

    def times(self, other: Share) -> Share:
        """The `other` share of this one."""
        return Share(self.index * other.total + other.index, self.total * other.total)


WHOLE = Share()


def find_share(asked: str | None, environ: Mapping[str, str]) -> tuple[Share, str]:
    """The share of this process and who says so: `--shard`, else Slurm's array and step, or torchrun."""
    if asked == "none":
        return WHOLE, "--shard"
    if asked is not None:
        match = re.fullmatch(r"(\d+)/(\d+)", asked)
        if not match or int(match[1]) >= int(match[2]):
            raise UsageError(f"--shard {asked}: say i/n, with i from 0 to n-1, or none")
        return Share(int(match[1]), int(match[2])), "--shard"
    array, task, whose = _of_array(environ), WHOLE, "RANK"
    if "SLURM_STEP_NUM_TASKS" in environ:
        task, whose = _share(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), "SLURM_PROCID"
    elif "SLURM_NTASKS" in environ and "SLURM_JOB_ID" not in environ:  # in a job's script it says what srun would start
        task, whose = _share(environ, "SLURM_PROCID", "SLURM_NTASKS"), "SLURM_PROCID"
    elif "RANK" in environ and "WORLD_SIZE" in environ:
        task = _share(environ, "RANK", "WORLD_SIZE")
    found = {"SLURM_ARRAY_TASK_ID": array, whose: task}
    return array.times(task), " and ".join(name for name, share in found.items() if not share.is_whole)


def _of_array(environ: Mapping[str, str]) -> Share:
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
    return Share((ident - first) // step, count)


def _share(environ: Mapping[str, str], index: str, total: str) -> Share:
    share = Share(_number(environ, index), _number(environ, total))
    if share.index >= share.total:
        raise UsageError(
            f"{index}={share.index} and {total}={share.total} contradict each other; say --shard i/n, or none"
        )
    return share


def _number(environ: Mapping[str, str], name: str) -> int:
    if not environ.get(name, "").isdecimal():
        raise UsageError(
            f"{name}={environ.get(name, '')}: not a number; say which rows are this task's with --shard i/n, or none"
        )
    return int(environ[name])
