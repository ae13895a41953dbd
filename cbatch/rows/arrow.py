"""Parquet files and Hugging Face datasets -> rows as plain Python values that JSON can hold."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from typing import Any

from cbatch.errors import RowError, first_line

Columns = dict[str, Any]  # of one row: column name -> value

_BATCH_ROWS = 256  # read at once


def parquet_rows(path: str) -> Iterator[Columns | RowError]:
    """The rows of a Parquet file; RowError in the place of a row that Python can't hold."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
    for batch in file.iter_batches(batch_size=_BATCH_ROWS):
        yield from _rows_of_batch(batch)


def count_parquet_rows(path: str) -> int:
    """The number of rows of a Parquet file, from its footer."""
    import pyarrow.parquet as pq

    return int(pq.ParquetFile(path).metadata.num_rows)


def dataset_rows(dataset: Any, streamed: bool) -> Iterator[Columns | RowError]:
    """The rows of a dataset; RowError in the place of a row that Python can't hold."""
    if streamed:  # decoded row by row
        for row in dataset:
            yield json_value(row)
        return
    for batch in dataset.with_format("arrow").iter(_BATCH_ROWS):  # as stored, whatever format was saved with it
        yield from _rows_of_batch(batch)


def json_value(value: Any) -> Any:
    """An Arrow value as JSON can hold it: dates and decimals as text, bytes as base64, NaN and infinities as null."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def arrow_error() -> type[Exception]:
    """The base class of Arrow's exceptions, imported only when it is needed."""
    import pyarrow as pa

    error: type[Exception] = pa.ArrowException
    return error


def _rows_of_batch(batch: Any) -> Iterator[Columns | RowError]:
    try:
        rows = batch.to_pylist()
    except Exception:  # depends on the column's type, such as a text that is not UTF-8
        rows = [_row_of_batch(batch, index) for index in range(batch.num_rows)]
    for row in rows:
        yield row if isinstance(row, RowError) else json_value(row)


def _row_of_batch(batch: Any, index: int) -> Columns | RowError:
    """One row read value by value, to find the column that can't be read."""
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            columns[name] = column[index].as_py()
        except Exception as error:  # depends on the column's type
            return RowError("invalid_value", f"column {name!r} can't be read: {first_line(error)}")
    return columns
