"""What a column of a row may hold, and how prompts see it.

A row's `data` holds plain Python values only: None, bool, int, float (NaN and infinities too), str, bytes, and lists and
dicts of these, the keys of dicts being text. Dates, times, durations and decimals of a table are text with all their
digits (`cbatch/rows/moment.py`), a map is a list of pairs. Conversions are made where a value leaves:

    prompts and templates   `as_text` here: bytes are the text that they spell in UTF-8, NaN and infinities are null
    JSON                    `dumps` in cbatch/output/record.py: bytes are base64, NaN and infinities are null
    Parquet                 cbatch/output/parquet.py: a column has the type that it had in the input
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from cbatch.errors import RowError

Columns = dict[str, Any]  # of one row: column name -> value


class Parsed(NamedTuple):
    """The columns of a row as they were read. With a `problem`, what could be read of them."""

    columns: Columns
    problem: RowError | None = None


class NotText(bytes):
    """Bytes that are not valid UTF-8. ValueError wherever they would be printed into a prompt."""

    def __str__(self) -> str:
        raise ValueError("a value to be shown is bytes that are not UTF-8 text")

    def __format__(self, _spec: str) -> str:
        return str(self)


def as_text(value: Any) -> Any:
    """A value with text in place of all its bytes, for prompts, and null in that of NaN and infinities.

    Bytes that are no text become `NotText`.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return NotText(value)
    if isinstance(value, dict):
        return {key: as_text(item) for key, item in value.items()}
    return [as_text(item) for item in value] if isinstance(value, list) else value
