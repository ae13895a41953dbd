from __future__ import annotations

import errno
import io
import json
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from cbatch.config import OutputConfig
from cbatch.errors import Fatal, RowError
from cbatch.output.record import RecordShape
from cbatch.output.sink import Sink, make_sink
from cbatch.output.stream import ReaderGone, StreamSink
from cbatch.output.target import Target
from cbatch.output.writer import Writer
from cbatch.rows.rank import WHOLE
from cbatch.rows.reader import Source
from cbatch.rows.request import Completion, Output, Row


def completion(number: int, error: RowError | None = None) -> Completion:
    row = Row("in.jsonl", number, f"in.jsonl:{number + 1}", {"id": number, "prompt": "a\u2028\nb"}, 5)
    return Completion.failed(row, error) if error else Completion(row, (Output(f"out {number}", (), "stop"),))


class Pipe(io.BytesIO):
    """A stream that counts flushes and fails at one of them."""

    def __init__(self, error: OSError | None = None) -> None:
        super().__init__()
        self.error, self.flushed = error, b""

    def flush(self) -> None:
        if self.error:
            raise self.error
        self.flushed = self.getvalue()


class Recorder(StreamSink):
    """A sink that remembers what it was asked to do, and waits or fails if told to."""

    def __init__(self, fail_at: int | None = None, gate: threading.Event | None = None) -> None:
        super().__init__(io.BytesIO(), RecordShape())
        self.rows: list[int] = []
        self.synced: list[int] = []
        self.fail_at, self.gate = fail_at, gate

    def write(self, completions: Sequence[Completion]) -> None:
        if self.gate:
            assert self.gate.wait(10)
        self.rows += [completion.row.index for completion in completions]
        if self.fail_at is not None and len(self.rows) > self.fail_at:
            raise Fatal("can't write")

    def sync(self) -> None:
        self.synced.append(len(self.rows))


def test_everything_is_written_in_order_and_synced_before_close_returns() -> None:
    sink = Recorder()
    writer = Writer(sink)
    for number in range(10_000):
        writer.put(completion(number))
    writer.close()
    assert sink.rows == list(range(10_000))
    assert sink.synced[-1] == 10_000


def test_nothing_to_write_means_nothing_to_sync() -> None:
    sink = Recorder()
    Writer(sink).close()
    assert (sink.rows, sink.synced) == ([], [])


def test_a_slow_sink_holds_up_whoever_puts_instead_of_losing_rows() -> None:
    gate = threading.Event()
    sink = Recorder(gate=gate)
    writer = Writer(sink)
    thread = threading.Thread(target=lambda: [writer.put(completion(number)) for number in range(9000)])
    thread.start()
    thread.join(timeout=0.3)
    assert thread.is_alive()
    gate.set()
    thread.join(timeout=10)
    writer.close()
    assert sink.rows == list(range(9000))


def test_an_error_of_the_sink_reaches_whoever_puts() -> None:
    writer = Writer(Recorder(fail_at=3))
    with pytest.raises(Fatal, match="can't write"):
        list(map(writer.put, map(completion, range(1_000_000))))
    with pytest.raises(Fatal, match="can't write"):
        writer.close()


def test_an_error_in_the_last_write_is_raised_by_close() -> None:
    gate = threading.Event()
    writer = Writer(Recorder(fail_at=0, gate=gate))
    writer.put(completion(0))
    threading.Timer(0.1, gate.set).start()
    with pytest.raises(Fatal, match="can't write"):
        writer.close()


def test_a_stream_gets_one_line_for_each_row_at_once() -> None:
    pipe = Pipe()
    sink = StreamSink(pipe, RecordShape())
    sink.write([completion(0), completion(1, RowError("invalid_prompt", "no"))])
    lines = pipe.flushed.decode().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [0, 1]
    assert [json.loads(line)["completion"] for line in lines] == ["out 0", None]
    assert json.loads(lines[0])["prompt"] == "a\u2028\nb"
    sink.write([completion(2)])
    assert len(pipe.flushed.splitlines()) == 3


@pytest.mark.parametrize(("code", "expected"), [(errno.EPIPE, ReaderGone), (errno.ENOSPC, Fatal), (errno.EIO, Fatal)])
def test_a_stream_that_takes_no_more_is_no_traceback(code: int, expected: type[Exception]) -> None:
    with pytest.raises(expected):
        StreamSink(Pipe(OSError(code, os.strerror(code))), RecordShape()).write([completion(0)])


def test_shards_get_the_records_with_their_digests(tmp_path: Path) -> None:
    def sink() -> Sink:
        target = Target(OutputConfig(output=str(tmp_path / "out")))
        return make_sink(target, [Source("in.jsonl", "jsonl")], WHOLE, None, note=pytest.fail)

    first = sink()
    first.open({})
    with Writer(first) as writer:
        for number, error in ((1, None), (0, RowError("invalid_prompt", "no")), (2, None)):
            writer.put(completion(number, error))
    first.close()
    (growing,) = (tmp_path / "out" / ".cbatch").glob("part-*.jsonl")
    records = [json.loads(line) for line in growing.read_text().split("\n")[:-1]]
    assert [(record["row"], record["finish_reason"]) for record in records] == [(1, "stop"), (0, "error"), (2, "stop")]
    second = sink()
    _, done = second.open({})
    assert (done.num_rows, done.num_failed) == (3, 1)
    assert [done.digest(0, number) for number in range(4)] == [5, 5, 5, 0]
    second.close()


@pytest.mark.parametrize("lost", ["out", "out/.cbatch", "out/.cbatch/part-00000.jsonl"])
@pytest.mark.parametrize("is_back", [False, True])
def test_an_output_that_is_gone_ends_the_job_within_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str, is_back: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cbatch.output.writer._SYNC_SECONDS", 0.01)
    sink = make_sink(Target(OutputConfig(output="out")), [Source("in.jsonl", "jsonl")], WHOLE, None, lambda _: None)
    sink.open({})
    writer = Writer(sink)
    writer.put(completion(0))
    writer.flush()
    Path(lost).rename("elsewhere")
    if is_back:
        shutil.copytree("elsewhere", lost) if Path("elsewhere").is_dir() else shutil.copy("elsewhere", lost)
    writer._thread.join(10)
    with pytest.raises(Fatal, match=r"part-00000.jsonl: was removed, moved or replaced while the job ran"):
        writer.put(completion(1))
    with pytest.raises(Fatal):
        writer.close()
    with pytest.raises(Fatal):
        sink.close()
