"""What is worth knowing about rows that run all the same: said when it is first met, and counted."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache

from cbatch.config import SamplingParams
from cbatch.settings import field_names

_REMARKS = {  # kind -> what the row is, for people
    "continued": "ending with a turn of the assistant's, which is continued",
    "other_model": "naming another model than the one that runs",
    "setting_as_column": "with a column named like a sampling setting; a row's own settings go into an object `params`",
    "special_tokens": "spelling a special token of the model in its text; see --special-tokens-in-text",
    "truncated": "shortened by --truncate",
}

_SETTINGS = [
    *field_names(SamplingParams),
    *("params", "sampling_params", "extra_body", "max_completion_tokens", "max_new_tokens"),
]
_ALIKE = 0.85  # of difflib's ratio: `temprature` is `temperature`


def first(kind: str, where: str) -> str:
    """What is said about the first row of a kind. `where`: its file and line."""
    return f"{where} is the first row {_REMARKS[kind]}; all of them are counted"


def summary(counts: Mapping[str, int]) -> str:
    """What is said of all rows, by how many there are of each kind."""
    return "; ".join(f"{count:,} {_REMARKS[kind]}" for kind, count in sorted(counts.items()))


@lru_cache(1000)
def is_like_a_setting(column: str) -> bool:
    """Whether a column's name is that of a sampling setting, or nearly so, so that its user may expect it to be one."""
    return column != "params" and bool(get_close_matches(column.lower().replace("-", "_"), _SETTINGS, 1, _ALIKE))
