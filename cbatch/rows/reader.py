"""Sources -> a lazy stream of rows.

Memory does not grow with the input: lines are read one by one, Parquet in small batches. A row that can't be read
becomes a `Row` with a `problem`; only an input that can't be opened at all is fatal.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import math
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from cbatch.errors import RowError
from cbatch.rows.request import Row

UNKNOWN_DIGEST = 1  # of a row whose content was not recorded
BROKEN_DIGEST = 2  # of the row that stands for the unreadable rest of a source

_MAX_LINE = 256 * 1024**2  # bytes
_MAX_NESTING = 200  # levels; far from where Python's recursion limit would end the job, in whichever thread
_PARQUET_BATCH = 256  # rows
_LINE_SUFFIXES = (".jsonl", ".ndjson", ".txt")
_COMPRESSED = ("", ".gz", ".zst")
SUFFIXES = (*(a + b for a in _LINE_SUFFIXES for b in _COMPRESSED), ".parquet")


@dataclass(frozen=True)
class Source:
    """One input: a file, standard input (`-`), or a dataset."""

    name: str  # as it appears in the output
    kind: str  # jsonl, text, parquet or dataset
    size: int | None = None  # bytes, or rows of a dataset; None if unknown
    dataset: Any = field(default=None, repr=False, compare=False)

    def rows(self) -> Iterator[Row]:
        """All rows in order. What ends the reading early, such as a file cut short, becomes the last row."""
        number = 0
        try:
            for row in _READERS[self.kind](self):
                yield row
                number = row.index + 1
            self._check_size()
        except Exception as error:  # files, Arrow and the Hub's streams raise what they like
            problem = RowError("read_error", f"{self.name}: can't be read on from here: {one_line(error)}")
            yield Row(self.name, number, self.name, {}, BROKEN_DIGEST, problem)

    def _check_size(self) -> None:
        """OSError if the file was cut short while it was read: its end was not that of the input."""
        path = Path(self.name)
        if self.kind != "dataset" and self.size is not None and path.exists() and path.stat().st_size < self.size:
            raise OSError("the file became shorter while it was read")

    def count(self) -> int | None:
        """The number of rows if it can be told without parsing them; blank lines are counted."""
        if self.kind == "dataset":
            return self.size
        if self.kind == "parquet":
            import pyarrow.parquet as pq

            return int(pq.ParquetFile(self.name).metadata.num_rows)
        if self.name == "-" or self.name.endswith(_COMPRESSED[1:]):
            return None
        with Path(self.name).open("rb") as file:
            chunks, last, lines = iter(lambda: file.read(1 << 20), b""), b"\n", 0
            for chunk in chunks:
                lines, last = lines + chunk.count(b"\n"), chunk[-1:]
        return lines + (last != b"\n")


def read(
    sources: Sequence[Source], skip: int = 0, limit: int | None = None, passed: Callable[[Row], None] | None = None
) -> Iterator[Row]:
    """The rows of all sources, one after the other, without the first `skip`, which go to `passed`.

    That a source can't be read on is told wherever it happens.
    """
    rows = (row for source in sources for row in source.rows())
    for index, row in enumerate(islice(rows, None if limit is None else skip + limit)):
        if index >= skip or row.digest == BROKEN_DIGEST:
            yield row
        elif passed:
            passed(row)


def spans(counts: Sequence[int], skip: int, limit: int | None) -> list[range]:
    """The rows of sources with these numbers of rows that `read` yields."""
    ends = list(accumulate(counts))
    stop = sum(counts) if limit is None else skip + limit
    return [
        range(count)[max(0, skip - end + count) : max(0, stop - end + count)]
        for count, end in zip(counts, ends, strict=True)
    ]


def _open(source: Source) -> IO[bytes] | gzip.GzipFile:
    if source.name == "-":
        # Detached, because the interpreter crashes at its end if it closes sys.stdin while a thread waits for it.
        return cast(Any, sys.stdin).detach()  # type: ignore[no-any-return]
    if source.name.endswith(".gz"):
        return gzip.open(source.name)
    if source.name.endswith(".zst"):
        import pyarrow as pa

        return io.BufferedReader(pa.input_stream(source.name, compression="zstd"))
    return Path(source.name).open("rb")


def _numbered_lines(source: Source) -> Iterator[tuple[int, bytes]]:
    """Non-blank lines with their numbers, from 1. A record ends at 0x0A and nowhere else."""
    with _open(source) as file:
        number = 0
        while line := file.readline(_MAX_LINE + 1):
            number += 1
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if len(line) > _MAX_LINE:  # kept short: the parser refuses it
                while not line.endswith(b"\n") and (more := file.readline(_MAX_LINE)):
                    line = line[:1] + more[-1:]
                line = b""
                yield number, _TOO_LONG
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            if line.strip():
                yield number, line


_TOO_LONG = b"\n"  # no line can hold this


def _jsonl_rows(source: Source) -> Iterator[Row]:
    for index, (number, line) in enumerate(_numbered_lines(source)):
        where, data, problem = f"{source.name}:{number}", {}, None
        try:
            data = parse_object(line)
        except RowError as error:
            problem = RowError(error.kind, f"{where}: {error}")
        yield Row(source.name, index, where, data, _digest(line), problem)


def _text_rows(source: Source) -> Iterator[Row]:
    for index, (number, line) in enumerate(_numbered_lines(source)):
        where, data, problem = f"{source.name}:{number}", {}, None
        try:
            data = {"prompt": _decoded(line)}
        except RowError as error:
            problem = RowError(error.kind, f"{where}: {error}")
        yield Row(source.name, index, where, data, _digest(line), problem)


def _parquet_rows(source: Source) -> Iterator[Row]:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(source.name, buffer_size=1 << 20, pre_buffer=False)
    batches = file.iter_batches(batch_size=_PARQUET_BATCH)
    return _plain_rows(source, (values for batch in batches for values in _values(batch)))


def _values(batch: Any) -> Iterator[dict[str, Any] | RowError]:
    """The rows of a batch; a RowError for one that Python can't hold, such as a text that is not UTF-8."""
    try:
        rows = batch.to_pylist()
    except Exception:  # what is raised depends on the column's type
        rows = [_values_of_row(batch, index) for index in range(batch.num_rows)]
    yield from rows


def _values_of_row(batch: Any, index: int) -> dict[str, Any] | RowError:
    values = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            values[name] = column[index].as_py()
        except Exception as error:
            return RowError("invalid_value", f"column {name!r} can't be read: {one_line(error)}")
    return values


def _dataset_rows(source: Source) -> Iterator[Row]:
    if source.size is None:  # streamed, and decoded row by row
        return _plain_rows(source, iter(source.dataset))
    batches = source.dataset.with_format("arrow").iter(_PARQUET_BATCH)  # as stored, whatever format was saved with it
    return _plain_rows(source, (values for batch in batches for values in _values(batch)))


def _plain_rows(source: Source, rows: Iterator[dict[str, Any] | RowError]) -> Iterator[Row]:
    for index, values in enumerate(rows):
        where, data, problem = f"{source.name} row {index}", {}, None
        if isinstance(values, RowError):
            problem = RowError(values.kind, f"{where}: {values}")
        else:
            data = plain(values)
        yield Row(source.name, index, where, data, _digest(repr(data).encode("utf-8", "replace")), problem)


_READERS = {"jsonl": _jsonl_rows, "text": _text_rows, "parquet": _parquet_rows, "dataset": _dataset_rows}


def parse_object(line: bytes) -> dict[str, Any]:
    """One line of JSONL; RowError if it is not strict JSON in UTF-8, or not an object.

    A lone surrogate escape becomes U+FFFD: many readers refuse a whole file that holds one.
    """
    text = _decoded(line)
    try:
        data = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_whole)
        if text.count("[") + text.count("{") > _MAX_NESTING and _is_deep(data):
            raise RecursionError
    except RecursionError:
        raise RowError("invalid_json", f"nested more than {_MAX_NESTING} levels deep") from None
    except ValueError as error:
        raise RowError("invalid_json", f"not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise RowError("not_an_object", f"a row must be a JSON object, not {_json_type(data)}")
    return _without_surrogates(data) if _SURROGATE_ESCAPE.search(text) else data


def _is_deep(value: Any) -> bool:
    """Whether it is nested too deeply for what comes after the reader; looked through level by level."""
    level = [value]
    for _ in range(_MAX_NESTING):
        lists = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list)))
        level = [item for items in lists for item in items]
    return bool(level)


_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def _decoded(line: bytes) -> str:
    if line == _TOO_LONG:
        raise RowError("line_too_long", f"a line may hold {_MAX_LINE // 1024**2} MiB")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise RowError("invalid_utf8", f"not valid UTF-8 at byte {error.start}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text:.40} is too large for a number")
    return value


def _whole(text: str) -> int:
    """An integer; one that no float can hold makes other readers refuse the line."""
    _finite(text)
    return int(text)


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return [_without_surrogates(item) for item in value] if isinstance(value, list) else value


def plain(value: Any) -> Any:
    """A value from Arrow as JSON can hold it: dates and decimals as text, bytes as base64, NaN and infinities as null."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _digest(content: bytes) -> int:
    return max(zlib.crc32(content), BROKEN_DIGEST + 1)


def arrow_error() -> type[Exception]:
    import pyarrow as pa

    error: type[Exception] = pa.ArrowException
    return error


def one_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
