"""Parquet files and Hugging Face datasets -> rows of plain Python values, as `cbatch/rows/values.py` lists them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from typing import Any

from cbatch.errors import RowError, first_line
from cbatch.rows.moment import duration_text, is_moment, moment_text
from cbatch.rows.values import Parsed

_BATCH_ROWS = 256  # read at once


def parquet_rows(path: str) -> Iterator[Parsed]:
    """The rows of a Parquet file."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True)
    for batch in file.iter_batches(batch_size=_BATCH_ROWS):
        yield from rows_of_batch(batch)


def count_parquet_rows(path: str) -> int:
    """The number of rows of a Parquet file, from its footer."""
    import pyarrow.parquet as pq

    return int(pq.ParquetFile(path).metadata.num_rows)


def dataset_rows(dataset: Any, streamed: bool) -> Iterator[Parsed]:
    """The rows of a dataset."""
    if streamed:  # decoded row by row
        for row in dataset:
            yield Parsed({str(name): _plain(value) for name, value in row.items()})
        return
    for batch in dataset.with_format("arrow").iter(_BATCH_ROWS):  # as stored, whatever format was saved with it
        for column in batch.columns:
            _check_offsets(column)
        yield from rows_of_batch(batch)


def _check_offsets(column: Any) -> None:
    """ArrowInvalid if a column of a damaged file points out of its own data, which Arrow follows until the process dies."""
    import pyarrow as pa

    as_bytes = {
        pa.string(): pa.binary(),
        pa.large_string(): pa.large_binary(),
    }  # text that is not UTF-8 fails its row only
    for chunk in column.chunks:
        (chunk.view(as_bytes[chunk.type]) if chunk.type in as_bytes else chunk).validate(full=True)


def rows_of_batch(batch: Any) -> Iterator[Parsed]:
    """The rows of a record batch or a table. A value that can't be read is null and a problem of its row."""
    columns = [_values(column) for column in batch.columns]
    for index in range(batch.num_rows):
        row = {name: values[index] for name, values in zip(batch.schema.names, columns, strict=True)}
        faults = {name: value for name, value in row.items() if isinstance(value, Exception)}
        problem = None
        if faults:
            name, fault = next(iter(faults.items()))
            problem = RowError("invalid_value", f"column {name!r} can't be read: {first_line(fault)}")
        yield Parsed({**row, **dict.fromkeys(faults)}, problem)


def _values(column: Any) -> list[Any]:
    """The values of a column; an exception in the place of one that can't be read."""
    if _is_plain(column.type):
        try:
            values: list[Any] = column.to_pylist()
            return values
        except Exception:  # depends on the column's type, such as a text that is not UTF-8
            pass
    return [_value_or_exception(scalar) for scalar in column]


def _is_plain(kind: Any) -> bool:
    """Whether Arrow's own conversion makes values of this type that a row may hold."""
    import pyarrow as pa

    types = pa.types
    if types.is_map(kind) or types.is_union(kind):
        return False
    if types.is_struct(kind):
        return all(_is_plain(field.type) for field in kind)
    if types.is_nested(kind):
        return _is_plain(kind.value_type)
    if types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    number = types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    data = types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
    return bool(number or text or data or types.is_binary_view(kind) or types.is_null(kind))


def _value_or_exception(scalar: Any) -> Any:
    try:
        return _value(scalar)
    except Exception as error:  # depends on the column's type
        return error


def _value(scalar: Any) -> Any:
    """The value of an Arrow scalar of any type."""
    import pyarrow as pa

    kind, types = scalar.type, pa.types
    if not scalar.is_valid:
        return None
    if types.is_map(kind):
        return [[_value(pair[0]), _value(pair[1])] for pair in scalar.values]
    if types.is_struct(kind):
        return {name: _value(item) for name, item in scalar.items()}
    if types.is_nested(kind) and not types.is_union(kind):
        return [_value(item) for item in scalar.values]
    if types.is_dictionary(kind) or (isinstance(kind, pa.BaseExtensionType) and not _is_uuid(kind)):
        return _value(scalar.value)
    if is_moment(kind):
        return moment_text(scalar.value, kind)
    return _plain(scalar.as_py())


def _is_uuid(kind: Any) -> bool:
    return str(kind) == "extension<arrow.uuid>"


def _plain(value: Any) -> Any:
    """A Python object that Arrow or a dataset made, as a row may hold it."""
    if value is None or isinstance(value, (str, bool, int, float, bytes)):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, timedelta):
        return duration_text(value // timedelta(microseconds=1), 10**6)
    if isinstance(value, Decimal):
        return format(value, "f")
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
