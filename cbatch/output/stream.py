"""Standard output, as JSONL: each record as its row finishes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, BinaryIO

from cbatch.errors import Fatal
from cbatch.output.index import Done
from cbatch.output.journal import Settings
from cbatch.output.lines import to_lines
from cbatch.output.record import RecordShape
from cbatch.rows.request import Completion


class ReaderGone(Exception):
    """Whoever read standard output has closed it."""


class StreamSink:
    """Writes records to a stream. No earlier run is known, so every job starts at its first row."""

    resumable = False

    def __init__(self, stream: BinaryIO, shape: RecordShape) -> None:
        self._stream, self._shape = stream, shape

    def open(self, settings: Settings, _drawn: Collection[str] = (), /) -> tuple[Settings, Done]:
        return settings, Done()

    def write(self, completions: Sequence[Completion]) -> None:
        """Write and flush. ReaderGone or Fatal if the stream takes no more."""
        try:
            self._stream.writelines(to_lines(map(self._shape.record, completions)))
            self._stream.flush()
        except BrokenPipeError:
            raise ReaderGone from None
        except OSError as error:
            raise Fatal(f"standard output: can't write: {error.strerror}") from None

    def sync(self) -> None:
        """Nothing: a stream can't be made durable."""

    def finish(self, _rows: Sequence[range], /) -> int:
        return 0

    def write_summary(self, figures: dict[str, Any]) -> None:
        """Nothing: there is no folder beside a stream."""

    def close(self) -> None:
        """Nothing: standard output belongs to the process."""
