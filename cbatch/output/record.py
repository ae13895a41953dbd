"""The record that is written for a completion, and how to tell from a record which row it is of."""

from __future__ import annotations

import base64
import json
import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from cbatch.errors import RowError
from cbatch.rows import openai
from cbatch.rows.reader import digest_of
from cbatch.rows.request import Completion, Row

FIELDS = ("completion", "finish_reason", "prompt_tokens", "completion_tokens", "row", "source", "error", "error_kind")

# Valid inside a JSON string, but line breaks to many readers, or no characters at all.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class RecordKey(NamedTuple):
    """Which row a record is of, and whether that failed."""

    source: str
    row: int
    failed: bool


@dataclass(frozen=True)
class RecordShape:
    """The columns of records. `prefix` goes before the names that cbatch adds.

    With `openai`, rows in the format of OpenAI's batch API are answered in that format, under the name of the `model` that
    runs. `on_request`: columns added beside
    those that are always there.
    """

    prefix: str = ""
    openai: bool = True
    model: str = ""
    on_request: tuple[str, ...] = ()

    @property
    def added(self) -> tuple[str, ...]:
        """The names of the columns that cbatch adds, in order."""
        return tuple(self.prefix + name for name in (*FIELDS, *self.on_request))

    def check(self, row: Row) -> None:
        """RowError if the input has a column with a name that cbatch adds."""
        if self._is_openai(row):
            return
        if taken := [name for name in self.added if name in row.data]:
            raise RowError(
                "column_collision", f"{row.where}: the input has a column {taken[0]!r} already; choose a --prefix"
            )

    def record(self, completion: Completion) -> dict[str, Any]:
        """The record of a completion: all input columns and the generated ones, which win where names collide."""
        row = completion.row
        if self._is_openai(row):
            return openai.answer(completion, self.model, self.prefix)
        (output,) = completion.outputs
        values = {
            "completion": output.text,
            "finish_reason": output.finish_reason,
            "prompt_tokens": completion.num_prompt_tokens,
            "completion_tokens": len(output.token_ids),
            "row": row.index,
            "source": row.source,
            "error": str(output.error) if output.error else None,
            "error_kind": output.error.kind if output.error else None,
            "truncated_tokens": completion.num_truncated_tokens,
        }
        return {**row.data, **{self.prefix + name: values[name] for name in (*FIELDS, *self.on_request)}}

    def key(self, record: dict[str, Any]) -> RecordKey:
        """The row that a record is of; KeyError or TypeError if this is no record of this shape."""
        source, row = record[self.prefix + "source"], record[self.prefix + "row"]
        if not isinstance(source, str) or not isinstance(row, int):
            raise TypeError("source or row of the wrong type")
        error = self.prefix + "error"
        failed = record[error] is not None if error in record else openai.is_failure(record)
        return RecordKey(source, row, failed)

    def content_of_record(self, record: dict[str, Any]) -> int:
        """The checksum of what a record holds of its row: all of its columns, of an OpenAI request the custom_id."""
        return self._content(record, is_openai=self.prefix + "error_kind" not in record)

    def content_of_row(self, row: Row) -> int:
        """The checksum of what a record of this row would hold of it."""
        return self._content(row.data, self._is_openai(row))

    def _content(self, columns: dict[str, Any], is_openai: bool) -> int:
        kept = {"custom_id"} if is_openai else columns.keys() - set(self.added)
        return digest_of(dumps({name: value for name, value in columns.items() if name in kept}).encode())

    def _is_openai(self, row: Row) -> bool:
        return self.openai and openai.is_request(row)


def dumps(value: Any, keep_nan: bool = False) -> str:
    """JSON on one line, even for readers that know more line breaks than the newline; encodable as UTF-8.

    Bytes are base64, and NaN and infinities are null; with `keep_nan` they are the words that Python's own reader takes.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=keep_nan, default=_base64)
    except ValueError:
        text = json.dumps(_without_nan(value), ensure_ascii=False, default=_base64)
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list) else value
