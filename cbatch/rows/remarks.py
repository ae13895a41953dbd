"""What is worth knowing about rows that run all the same: said when it is first met, and counted."""

from __future__ import annotations

from collections.abc import Mapping

_REMARKS = {  # kind -> what the row is, for people
    "truncated": "shortened by --truncate",
}


def first(kind: str, where: str) -> str:
    """What is said about the first row of a kind. `where`: its file and line."""
    return f"{where} is the first row {_REMARKS[kind]}; all of them are counted"


def summary(counts: Mapping[str, int]) -> str:
    """What is said of all rows, by how many there are of each kind."""
    return "; ".join(f"{count:,} {_REMARKS[kind]}" for kind, count in sorted(counts.items()))
