"""Records as Parquet, under a schema that is fixed before the first row is generated.

A column of a Parquet input keeps its type. A column of a JSONL input whose values are all booleans, all integers, all
floats or all text has that type (null allowed); one that is nested or mixed holds JSON text. Where inputs differ, a
column has the type that holds the values of all of them exactly, or else JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cbatch.errors import UsageError
from cbatch.output.column_types import arrow_value, common_type, output_type
from cbatch.output.record import RecordShape, dumps
from cbatch.rows.arrow import rows_of_batch
from cbatch.rows.reader import Source

_BATCH = 1000  # rows
_JSON = {b"cbatch": b"json"}  # metadata of a field that holds JSON text
_EXACT = pa.int32()  # stands for the kind of integers that a float64 holds exactly, so that a column may have both
_ADDED = dict.fromkeys(("prompt_tokens", "completion_tokens", "row", "truncated_tokens"), pa.int64())


def schema_of(sources: Sequence[Source], shape: RecordShape) -> pa.Schema:
    """The columns of all sources, then those that cbatch adds. Reads JSONL files once, from end to end."""
    fields: dict[str, pa.Field] = {}
    for source in sources:
        for field in _fields(source):
            known = fields.setdefault(field.name, field)
            fields[field.name] = _widened(known, field)
    for name in shape.added:
        if name in fields:
            raise UsageError(f"the input has a column {name!r} already; choose a --prefix")
        fields[name] = pa.field(name, _ADDED.get(name.removeprefix(shape.prefix), pa.string()))
    return pa.schema([field if field.type != pa.null() else field.with_type(pa.string()) for field in fields.values()])


def write(path: Path, records: Iterable[dict[str, Any]], schema: pa.Schema) -> None:
    """Write all `records` to a new Parquet file."""
    rest = iter(records)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while rows := list(islice(rest, _BATCH)):
            writer.write_batch(pa.record_batch([_column(rows, field) for field in schema], schema=schema))


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file that `write` made."""
    file = pq.ParquetFile(path)
    texts = [field.name for field in file.schema_arrow if field.metadata == _JSON]
    for batch in file.iter_batches(batch_size=_BATCH):
        for record, _ in rows_of_batch(batch):
            for name in texts:
                record[name] = None if record[name] is None else json.loads(record[name])
            yield record


def _column(rows: list[dict[str, Any]], field: pa.Field) -> pa.Array:
    values = [row.get(field.name) for row in rows]
    if field.metadata == _JSON:
        values = [None if value is None else dumps(value) for value in values]
    return pa.array([arrow_value(value, field.type) for value in values], field.type)


def _fields(source: Source) -> list[pa.Field]:
    if source.kind == "text":
        return [pa.field("prompt", pa.string())]
    if source.kind == "parquet":
        return [_field(column.name, output_type(column.type)) for column in pq.ParquetFile(source.name).schema_arrow]
    if source.kind == "dataset":
        features = source.dataset.features
        if features is None:
            raise UsageError(f"{source.name}: its columns are not known beforehand; write JSONL instead of Parquet")
        return [_field(column.name, output_type(column.type)) for column in features.arrow_schema]
    if source.name == "-":
        raise UsageError("standard input can't be looked through beforehand, which Parquet needs; write JSONL instead")
    return _fields_of_json(row.data for row in source.rows())


def _fields_of_json(rows: Iterable[dict[str, Any]]) -> list[pa.Field]:
    kinds: dict[str, set[Any]] = {}
    for row in rows:
        for name, value in row.items():
            kinds.setdefault(name, set()).add(_kind(value))
    fields = []
    for name, seen in kinds.items():
        found = seen - {pa.null()}
        if found == {_EXACT, pa.float64()}:
            found = {pa.float64()}
        elif _EXACT in found:
            found = (found - {_EXACT}) | {pa.int64()}
        fields.append(_field(name, found.pop() if len(found) == 1 else (None if found else pa.null())))
    return fields


def _field(name: str, kind: pa.DataType | None) -> pa.Field:
    return pa.field(name, pa.string(), metadata=_JSON) if kind is None else pa.field(name, kind)


def _kind(value: Any) -> pa.DataType | None:
    """The Arrow type of a JSON value; None if only JSON text can hold it."""
    if type(value) is int:
        if -(2**53) <= value <= 2**53:
            return _EXACT
        return pa.int64() if -(2**63) <= value < 2**63 else None
    return {bool: pa.bool_(), float: pa.float64(), str: pa.string(), type(None): pa.null()}.get(type(value))


def _widened(a: pa.Field, b: pa.Field) -> pa.Field:
    """A field of the output that holds the values of both."""
    return _field(a.name, None if _JSON in (a.metadata, b.metadata) else common_type(a.type, b.type))
