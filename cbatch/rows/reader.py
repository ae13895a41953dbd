"""Sources -> a lazy stream of rows.

Memory does not grow with the input: lines are read one by one, tables in small batches. A row that can't be read
becomes a `Row` with a `problem`; only an input that can't be opened at all ends the job.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from cbatch.errors import RowError, UsageError, first_line
from cbatch.rows.arrow import count_parquet_rows, dataset_rows, parquet_rows
from cbatch.rows.json_object import parse_object
from cbatch.rows.lines import COMPRESSED_SUFFIXES, count_lines, decoded, numbered_lines
from cbatch.rows.request import Row
from cbatch.rows.values import Parsed

UNKNOWN_DIGEST = 1  # of a row whose content was not recorded
BROKEN_DIGEST = 2  # of the row that stands for the unreadable rest of a source

_LINE_SUFFIXES = (".jsonl", ".ndjson", ".txt")
SUFFIXES = (*(a + b for a in _LINE_SUFFIXES for b in ("", *COMPRESSED_SUFFIXES)), ".parquet")


@dataclass(frozen=True)
class Source:
    """One input: a file, standard input (`-`), or a dataset."""

    name: str  # as it appears in the output
    kind: str  # jsonl, text, parquet or dataset
    size: int | None = None  # bytes, or rows of a dataset; None if unknown
    dataset: Any = field(default=None, repr=False, compare=False)

    def rows(self) -> Iterator[Row]:
        """All rows in order. If the reading ends early, as in a file cut short, the last row has that as its problem."""
        num_rows = 0
        try:
            for row in self._rows():
                yield row
                num_rows = row.index + 1
            self._check_size()
        except UsageError:  # standard input is no rows at all
            raise
        except Exception as error:  # files, Arrow and the Hub's streams raise what they like
            problem = RowError("read_error", f"{self.name}: can't be read on from here: {first_line(error)}")
            yield Row(self.name, num_rows, self.name, {}, BROKEN_DIGEST, problem)

    def count(self) -> int | None:
        """The number of rows if it can be told without parsing them; blank lines are counted."""
        if self.kind == "dataset":
            return self.size
        return count_parquet_rows(self.name) if self.kind == "parquet" else count_lines(self.name)

    def _rows(self) -> Iterator[Row]:
        if self.kind == "jsonl":
            return self._rows_of_lines(parse_object)
        if self.kind == "text":
            return self._rows_of_lines(_text_line)
        if self.kind == "parquet":
            return self._rows_of_table(parquet_rows(self.name))
        return self._rows_of_table(dataset_rows(self.dataset, streamed=self.size is None))

    def _rows_of_lines(self, parse: Callable[[str], Parsed]) -> Iterator[Row]:
        for index, (number, line) in enumerate(numbered_lines(self.name, self.kind)):
            text, problem = decoded(line)
            columns, other = parse(text)
            yield self._row(index, f"{self.name}:{number}", Parsed(columns, problem or other), line)

    def _rows_of_table(self, rows: Iterable[Parsed]) -> Iterator[Row]:
        for index, parsed in enumerate(rows):
            content = repr(parsed.columns).encode("utf-8", "replace")
            yield replace(self._row(index, f"{self.name} row {index}", parsed, content), is_padded=True)

    def _row(self, index: int, where: str, parsed: Parsed, content: bytes) -> Row:
        problem = parsed.problem.at(where) if parsed.problem else None
        return Row(self.name, index, where, parsed.columns, digest_of(content), problem)

    def _check_size(self) -> None:
        """OSError if the file was cut short while it was read: the end that was met is not the input's end."""
        path = Path(self.name)
        if self.kind != "dataset" and self.size is not None and path.exists() and path.stat().st_size < self.size:
            raise OSError("the file became shorter while it was read")


def read(
    sources: Sequence[Source], skip: int = 0, limit: int | None = None, passed: Callable[[Row], None] | None = None
) -> Iterator[Row]:
    """The rows of all sources, one after the other; the first `skip` go to `passed` instead.

    The row that says that a source can't be read on is yielded wherever it stands.
    """
    rows = (row for source in sources for row in source.rows())
    for index, row in enumerate(islice(rows, None if limit is None else skip + limit)):
        if index >= skip or row.digest == BROKEN_DIGEST:
            yield row
        elif passed:
            passed(row)


def spans(counts: Sequence[int], skip: int, limit: int | None) -> list[range]:
    """For sources with `counts` rows: which rows of each `read` yields."""
    ends = list(accumulate(counts))
    stop = sum(counts) if limit is None else skip + limit
    return [
        range(count)[max(0, skip - end + count) : max(0, stop - end + count)]
        for count, end in zip(counts, ends, strict=True)
    ]


def _text_line(text: str) -> Parsed:
    """The prompt that a line of text is. A NUL is no text: damage or another encoding than UTF-8 left it there."""
    place = text.find("\0")
    problem = RowError("invalid_utf8", f"a NUL at character {place + 1}; that is no text") if place >= 0 else None
    return Parsed({"prompt": text}, problem)


def digest_of(content: bytes) -> int:
    """A checksum above the reserved values."""
    return max(zlib.crc32(content), BROKEN_DIGEST + 1)
