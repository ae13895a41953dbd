"""The names of shards: which files of a folder are the output of a job."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from cbatch.rows.rank import Rank

_NAME = re.compile(r"part(?:-(\d+)-of-(\d+))?-(\d{5,})\.(?:jsonl|parquet)")


class Shard(NamedTuple):
    """One file of an output, by its number among the files of the rank that writes it."""

    rank: Rank
    number: int

    @property
    def name(self) -> str:
        """The name of the file without its suffix."""
        return f"part{self.rank.suffix}-{self.number:05d}"


def find_shards(folder: Path, suffix: str = "") -> dict[Shard, Path]:
    """The shards in a folder, in the order of their ranks and numbers."""
    matches = [(match, path) for path in folder.glob(f"part-*{suffix}") if (match := _NAME.fullmatch(path.name))]
    found = {Shard(Rank(int(m[1] or 0), int(m[2] or 1)), int(m[3])): path for m, path in matches}
    return dict(sorted(found.items(), key=lambda item: (item[0].rank.num_ranks, item[0].rank.index, item[0].number)))
