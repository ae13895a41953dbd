from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbatch.config import OutputConfig
from cbatch.errors import Fatal, RowError
from cbatch.output import parquet
from cbatch.output.index import Done
from cbatch.output.record import FIELDS, dumps
from cbatch.output.sink import make_sink
from cbatch.output.target import Target
from cbatch.rows.inputs import resolve
from cbatch.rows.rank import WHOLE
from cbatch.rows.reader import UNKNOWN_DIGEST, Source
from cbatch.rows.request import Completion, Output, Row

NUM_ROWS = 11
ORDER = (3, 0, 1, 7, 2, 10, 5, 4, 6, 9, 8)  # in which the rows finish


@dataclass(frozen=True)
class Layout:
    name: str  # of the output
    ordered: bool = False
    format: str = "jsonl"

    @property
    def single_file(self) -> bool:
        return "." in self.name

    @property
    def rolling(self) -> bool:
        return not self.single_file and not self.ordered


LAYOUTS = [
    Layout("folder"),
    Layout("folder", format="parquet"),
    Layout("folder", ordered=True),
    Layout("folder", ordered=True, format="parquet"),
    Layout("out.jsonl"),
    Layout("out.parquet", format="parquet"),
    Layout("out.jsonl", ordered=True),
]
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"{x.name}-{x.format}{'-ordered' * x.ordered}")


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the death of the machine tells whether a file was synced."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(os, "fdatasync", lambda _: None)


@pytest.fixture
def source() -> Iterator[Source]:
    memory = "/dev/shm"  # a disk flushes a file that is renamed over another, and the tests here do that 10,000 times
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        path = Path(folder, "in.jsonl")
        path.write_text("".join(json.dumps(columns(row)) + "\n" for row in range(NUM_ROWS)))
        yield resolve([str(path)])[0]


def columns(row: int) -> dict[str, Any]:
    return {"id": row, "prompt": f"é\u2028 {row}", "meta": {"a": [row, None]}, "score": row / 2}


def record(source: Source, row: int, failed: bool = False) -> dict[str, Any]:
    good = (f"text {row} 🦜", "stop", 3, 4, row, source.name, None, None)
    bad = (None, "error", 0, 0, row, source.name, f"row {row} is bad", "invalid_prompt")
    return {**columns(row), **dict(zip(FIELDS, bad if failed else good, strict=True))}


def digest(row: int) -> int:
    return 1000 + row


def completion(source: Source, row: int, failed: bool = False) -> Completion:
    """Of which `record` is the record."""
    given = Row(source.name, row, f"{source.name}:{row + 1}", columns(row), digest(row))
    if failed:
        return Completion.failed(given, RowError("invalid_prompt", f"row {row} is bad"))
    return Completion(given, (Output(f"text {row} 🦜", (5, 6, 7, 8), "stop"),), num_prompt_tokens=3)


class Job:
    """One run of a job without a model: `failing` rows end in an error."""

    def __init__(self, source: Source, layout: Layout, shard_rows: int = 4, **settings: Any) -> None:
        output = Path(source.name).with_name(layout.name)
        self.source, self.layout = source, layout
        self.target = Target(
            OutputConfig(
                output=str(output), format=layout.format, ordered=layout.ordered, shard_rows=shard_rows, **settings
            )
        )
        self.output, self.state = self.target.path, self.target.state
        self.sink = make_sink(self.target, [source], WHOLE, None, note=lambda _: None)

    def open(self) -> Done:
        """Find out what is done."""
        return self.sink.open({"seed": 7})[1]

    def put(self, *rows: int, failing: tuple[int, ...] = ()) -> None:
        self.sink.write([completion(self.source, row, row in failing) for row in rows])

    def run(self, failing: tuple[int, ...] = (), rows: tuple[int, ...] = ORDER) -> Done:
        """Everything from finding out what is done to the end."""
        done = self.open()
        assert all(done.digest(0, row) in (0, UNKNOWN_DIGEST, digest(row)) for row in rows)
        left = [row for row in rows if not done.digest(0, row)]
        for start in range(0, len(left), 3):
            self.put(*left[start : start + 3], failing=failing)
        assert self.sink.finish([range(NUM_ROWS)]) == 0
        return done


def whole_run(
    source: Source, layout: Layout, failing: tuple[int, ...] = (), rows: tuple[int, ...] = ORDER, **settings: bool
) -> Done:
    job = Job(source, layout, **settings)
    try:
        return job.run(failing, rows)
    finally:
        job.sink.close()


def published(source: Source, layout: Layout) -> list[dict[str, Any]]:
    """The records in the final files, read without cbatch."""
    output = Path(source.name).with_name(layout.name)
    if layout.format == "parquet":
        files = sorted(map(str, output.glob("part-*"))) if output.is_dir() else str(output)
        found = pa.dataset.dataset(files).to_table().to_pylist()
        return [{**row, "meta": json.loads(row["meta"])} for row in found]
    parts = sorted(output.glob("part-*")) if output.is_dir() else [output]
    content = b"".join(part.read_bytes() for part in parts)
    assert content.endswith(b"\n")
    return [json.loads(line) for line in content.removesuffix(b"\n").split(b"\n")]


def state_of(source: Source, layout: Layout) -> Path:
    output = Path(source.name).with_name(layout.name)
    return output.with_name(f".{output.name}.cbatch") if layout.single_file else output / ".cbatch"


def sizes(source: Source, layout: Layout) -> list[int]:
    output = Path(source.name).with_name(layout.name)
    read: Callable[[Path], int] = lambda path: (  # noqa: E731
        pq.read_metadata(path).num_rows if path.suffix == ".parquet" else path.read_bytes().count(b"\n")
    )
    return [read(path) for path in sorted(output.glob("part-*"))]


def expect_all(source: Source, layout: Layout, failing: tuple[int, ...] = ()) -> None:
    found = published(source, layout)
    in_order = found if layout.ordered else sorted(found, key=lambda row: row["row"])
    assert in_order == [record(source, row, row in failing) for row in range(NUM_ROWS)]


# One run


@every_layout
def test_every_record_is_published_once_and_whole(source: Source, layout: Layout) -> None:
    done = whole_run(source, layout, failing=(2,))
    assert done.num_rows == 0
    expect_all(source, layout, failing=(2,))
    if not layout.single_file:
        assert sizes(source, layout) == [4, 4, 3]
    state = state_of(source, layout)
    assert not list(state.glob("*.jsonl")) + list(state.glob("*.tmp"))


@every_layout
def test_a_second_run_finds_all_rows_done_and_changes_nothing(source: Source, layout: Layout) -> None:
    whole_run(source, layout, failing=(2,))
    before = {path: path.read_bytes() for path in Path(source.name).parent.rglob("*") if path.is_file()}
    done = whole_run(source, layout)
    assert (done.num_rows, done.num_failed) == (NUM_ROWS, 1)
    assert [done.digest(0, row) for row in range(NUM_ROWS)] == [digest(row) for row in range(NUM_ROWS)]
    assert before == {path: path.read_bytes() for path in Path(source.name).parent.rglob("*") if path.is_file()}


@every_layout
def test_an_output_without_rows_is_there_and_readable(source: Source, layout: Layout) -> None:
    whole_run(source, layout, rows=())
    output = Path(source.name).with_name(layout.name)
    files = [output] if layout.single_file else list(output.glob("part-*"))
    assert len(files) == 1
    if layout.format == "parquet":
        table = pq.read_table(files[0])
        assert table.num_rows == 0
        assert set(table.column_names) == set(record(source, 0))
    else:
        assert files[0].read_bytes() == b""
    whole_run(source, layout)
    expect_all(source, layout)


def test_records_of_a_folder_of_shards_are_in_its_state_as_soon_as_they_are_appended(source: Source) -> None:
    job = Job(source, Layout("folder"))
    job.open()
    job.put(3, 0)
    growing = job.state / "part-00000.jsonl"
    assert [json.loads(line)["row"] for line in growing.read_bytes().splitlines()] == [3, 0]
    job.put(1, 7, 2, 10, 5, 4, 6)  # fills a shard and another
    assert sizes(source, job.layout) == [4, 4]
    assert [json.loads(line)["row"] for line in growing.with_name("part-00002.jsonl").read_bytes().splitlines()] == [6]
    job.sink.close()


def test_a_write_that_fails_in_the_middle_leaves_whole_records(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(source, Layout("folder"), shard_rows=100)
    job.open()
    job.put(3, 0)
    write = os.write
    left = [150]

    def fill(file: int, data: Any) -> int:
        if not left[0]:
            raise OSError(28, "No space left on device")
        size = write(file, data[: left[0]])
        left[0] -= size
        return size

    monkeypatch.setattr(os, "write", fill)
    with pytest.raises(OSError, match="No space"):
        job.put(1, 7, 2)
    monkeypatch.undo()
    growing = job.state / "part-00000.jsonl"
    assert [json.loads(line)["row"] for line in growing.read_bytes().splitlines()] == [3, 0]
    job.sink.close()
    whole_run(source, job.layout)
    expect_all(source, job.layout)


def test_a_write_may_take_only_a_part_at_a_time(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    whole_run(source, Layout("folder"))
    expect_all(source, Layout("folder"))


# Resuming


@every_layout
def test_a_kill_at_any_byte_of_the_last_record_costs_at_most_that_record(source: Source, layout: Layout) -> None:
    job = Job(source, layout, shard_rows=100)
    job.open()
    job.put(3, 0)
    growing, index = (job.state / f"part-00000.{kind}" for kind in ("jsonl", "idx"))
    whole = growing.stat().st_size
    job.put(1)
    content, entries = growing.read_bytes(), index.read_bytes()
    job.sink.close()
    for cut in range(whole, len(content) + 1, 1 if layout == LAYOUTS[0] else 7):
        growing.write_bytes(content[:cut])
        index.write_bytes(entries)
        job = Job(source, layout, shard_rows=100)
        done = job.open()
        complete = cut >= len(content) - 1
        assert [row for row in range(NUM_ROWS) if done.digest(0, row)] == ([0, 1, 3] if complete else [0, 3])
        job.put(*(row for row in ORDER if not done.digest(0, row)))
        assert sorted(json.loads(line)["row"] for line in growing.read_bytes().splitlines()) == list(range(NUM_ROWS))
        if cut in (whole, len(content) - 1, len(content)):
            job.sink.finish([range(NUM_ROWS)])
            expect_all(source, layout)
            for path in [*job.output.glob("part-*"), *job.state.glob("part-*")]:
                path.unlink()
            if layout.single_file:
                job.output.unlink()
        job.sink.close()


@every_layout
@pytest.mark.parametrize("index", ["whole", "torn", "gone", "of another file"])
def test_the_index_is_only_a_cache(source: Source, layout: Layout, index: str) -> None:
    job = Job(source, layout)
    job.open()
    job.put(*ORDER[:3])
    job.sink.close()
    for path in job.state.glob("*.idx"):
        content = path.read_bytes()
        if index == "torn":
            path.write_bytes(content[:-5])
        elif index == "gone":
            path.unlink()
        elif index == "of another file":
            path.write_bytes(content[:16] + content[:15:-1])
    done = whole_run(source, layout)
    assert done.num_rows == 3
    expect_all(source, layout)


@every_layout
def test_without_its_index_a_finished_output_is_read_again(source: Source, layout: Layout) -> None:
    whole_run(source, layout, failing=(2, 8))
    for path in state_of(source, layout).glob("*.idx"):
        path.unlink()
    done = whole_run(source, layout)
    assert (done.num_rows, done.num_failed) == (NUM_ROWS, 2)
    assert done.digest(0, 5) == UNKNOWN_DIGEST
    expect_all(source, layout, failing=(2, 8))


@every_layout
def test_a_shard_that_was_edited_is_read_again(source: Source, layout: Layout) -> None:
    whole_run(source, layout)
    output = Path(source.name).with_name(layout.name)
    path = output if layout.single_file else output / f"part-00000.{layout.format}"
    if layout.format == "parquet":
        pq.write_table(pq.read_table(path).slice(1), path)
    else:
        path.write_bytes(path.read_bytes().split(b"\n", 1)[1])
    done = whole_run(source, layout)
    assert done.num_rows == NUM_ROWS - 1
    expect_all(source, layout)


def test_a_damaged_record_in_the_middle_is_never_skipped(source: Source) -> None:
    job = Job(source, Layout("folder"))
    job.open()
    job.put(3, 0, 1)
    job.sink.close()
    growing = job.state / "part-00000.jsonl"
    lines = growing.read_bytes().splitlines(keepends=True)
    damaged = lines[0] + lines[1][:20] + b"\n" + lines[2]
    growing.write_bytes(damaged)
    with pytest.raises(Fatal, match=r"part-00000\.jsonl:2"):
        whole_run(source, Layout("folder"))
    assert growing.read_bytes() == damaged


def test_a_row_of_a_file_that_is_no_input_is_reported(source: Source) -> None:
    job = Job(source, Layout("folder"))
    job.open()
    stranger = {**record(source, 1), "source": "other.jsonl"}
    (job.output / "part-00000.jsonl").write_text(dumps(stranger) + "\n")
    with pytest.raises(Fatal, match=r"other\.jsonl"):
        job.open()
    job.sink.close()


@every_layout
def test_another_shard_size_on_resume_loses_nothing(source: Source, layout: Layout) -> None:
    for shard_rows, rows in ((100, ORDER[:6]), (2, ORDER[:9]), (3, ORDER)):
        job = Job(source, layout, shard_rows)
        done = job.open()
        job.put(*(row for row in rows if not done.digest(0, row)))
        job.sink.close()
    whole_run(source, layout)
    expect_all(source, layout)


# More of the input, and failed rows again


@every_layout
def test_a_finished_output_takes_more_rows(source: Source, layout: Layout) -> None:
    for rows in ((3, 0, 1, 7, 2), (10, 3, 5), ORDER):
        whole_run(source, layout, rows=rows)
        assert {found["row"] for found in published(source, layout)} >= set(rows)
    expect_all(source, layout)


@every_layout
@pytest.mark.parametrize("interrupted", [False, True])
def test_failed_rows_are_done_until_a_retry_is_asked_for(source: Source, layout: Layout, interrupted: bool) -> None:
    failing = (3, 0, 1, 7, 6)
    job = Job(source, layout)
    job.open()
    job.put(*ORDER, failing=failing)
    if not interrupted:
        job.sink.finish([range(NUM_ROWS)])
    job.sink.close()
    done = whole_run(source, layout)
    assert (done.num_rows, done.num_failed) == (NUM_ROWS, 5)
    expect_all(source, layout, failing)
    done = whole_run(source, layout, retry_failed=True, failing=(7,))
    assert (done.num_rows, done.num_failed) == (NUM_ROWS - 5, 0)
    assert not any(done.digest(0, row) for row in failing)
    expect_all(source, layout, failing=(7,))
    done = whole_run(source, layout, retry_failed=True)
    assert done.num_rows == NUM_ROWS - 1
    expect_all(source, layout)
    assert whole_run(source, layout, retry_failed=True).num_rows == NUM_ROWS


@every_layout
def test_a_retry_that_is_interrupted_goes_on_without_being_asked_again(source: Source, layout: Layout) -> None:
    whole_run(source, layout, failing=(3, 6, 8))
    job = Job(source, layout, retry_failed=True)
    job.open()
    job.put(3)
    job.sink.close()
    whole_run(source, layout)
    expect_all(source, layout)


@every_layout
def test_a_failed_row_that_a_retry_did_not_reach_is_not_done(source: Source, layout: Layout) -> None:
    """As with a lower --limit."""
    whole_run(source, layout, failing=(3, 8))
    whole_run(source, layout, retry_failed=True, rows=(3,))
    assert {found["row"] for found in published(source, layout)} == set(range(NUM_ROWS)) - {8}
    whole_run(source, layout)
    expect_all(source, layout)


@every_layout
def test_overwriting_removes_what_the_job_wrote_and_nothing_else(source: Source, layout: Layout) -> None:
    output = Path(source.name).with_name(layout.name)
    whole_run(source, layout, failing=(2,))
    other = output.parent / "mine.txt" if layout.single_file else output / "mine.txt"
    other.write_text("mine")
    before = published(source, layout)
    job = Job(source, layout, overwrite=True)
    assert job.open().num_rows == 0
    assert published(source, layout) == before  # until there is something else
    job.put(3)
    assert not job.target.final_files()
    assert other.read_text() == "mine"
    job.sink.close()
    assert whole_run(source, layout).num_rows == 1
    expect_all(source, layout)


# Killed between any two operations on files


class Killed(BaseException):
    """The process is gone: nothing that it would do from here on is done."""


class Kill:
    """Lets `after` operations happen; the next does not, or only by half, and all later ones fail too."""

    def __init__(self, after: int, torn: bool) -> None:
        self.left, self.torn, self.happened = after, torn, False

    def dies(self) -> bool:
        """Whether this is the operation at which the process dies."""
        if self.happened:
            raise Killed
        self.left -= 1
        self.happened = self.left < 0
        return self.happened


@contextmanager
def killed(kill: Kill) -> Iterator[None]:
    opened: list[int] = []
    close, open_, write, parquet_write = os.close, os.open, os.write, parquet.write

    def guarded(function: Callable[..., Any], half: Callable[..., Any] | None = None) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> Any:
            if kill.dies():
                if half and kill.torn:
                    half(*args)
                raise Killed
            return function(*args, **settings)

        return call

    def open_and_note(*args: Any) -> int:
        opened.append(open_(*args))
        return opened[-1]

    def torn_parquet(path: Path, *_: Any) -> None:
        path.write_bytes(b"PAR1 and no more")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", guarded(open_and_note))
        patch.setattr(os, "write", guarded(write, half=lambda file, data: write(file, data[: len(data) // 2])))
        patch.setattr(parquet, "write", guarded(parquet_write, half=torn_parquet))
        for owner, name in ((os, "fsync"), (os, "fdatasync"), (os, "ftruncate")):
            patch.setattr(owner, name, guarded(getattr(owner, name)))
        for name in ("open", "replace", "unlink", "rename"):
            patch.setattr(Path, name, guarded(getattr(Path, name)))
        patch.setattr(os, "close", guarded(lambda file: (opened.remove(file), close(file))))
        try:
            yield
        except Killed:
            assert kill.happened
    for file in opened:
        close(file)


def kill_everywhere(prepare: Callable[[], None], run: Callable[[], Any], check: Callable[[], None]) -> int:
    """Kill `run` after 0, 1, 2 ... operations, twice in a row each time, and have it run to its end after that."""
    points = 0
    while True:
        for torn in (False, True):
            prepare()
            kill = Kill(points, torn)
            with killed(kill):
                run()
            if not kill.happened:
                check()
                return points
            with killed(Kill(points // 2, not torn)):
                run()
            run()
            check()
        points += 1


def remove_output(source: Source) -> None:
    for path in Path(source.name).parent.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path != Path(source.name):
            path.unlink()


@every_layout
def test_no_kill_loses_or_doubles_a_row(source: Source, layout: Layout) -> None:
    points = kill_everywhere(
        prepare=lambda: remove_output(source),
        run=lambda: whole_run(source, layout, failing=(2,)),
        check=lambda: expect_all(source, layout, failing=(2,)),
    )
    assert points > 15


@every_layout
def test_no_kill_during_a_retry_loses_or_doubles_a_row(source: Source, layout: Layout) -> None:
    def prepare() -> None:
        remove_output(source)
        whole_run(source, layout, failing=(3, 0, 1, 7, 6))

    points = kill_everywhere(
        prepare,
        run=lambda: whole_run(source, layout, retry_failed=True),
        check=lambda: expect_all(source, layout),
    )
    assert points > 10


@pytest.mark.parametrize("layout", [LAYOUTS[3], LAYOUTS[4]], ids=["folder-parquet-ordered", "out.jsonl"])
def test_no_kill_while_more_rows_are_added_loses_or_doubles_a_row(source: Source, layout: Layout) -> None:
    def prepare() -> None:
        remove_output(source)
        whole_run(source, layout, rows=ORDER[:6])

    kill_everywhere(prepare, run=lambda: whole_run(source, layout), check=lambda: expect_all(source, layout))


@dataclass(frozen=True)
class Run:
    """A run that dies after so many operations, and what happened to its index before the next one starts."""

    operations: int
    torn: bool
    retry_failed: bool
    failing: frozenset[int]
    shard_rows: int
    index: str


runs = st.builds(
    Run,
    operations=st.integers(0, 70),
    torn=st.booleans(),
    retry_failed=st.booleans(),
    failing=st.frozensets(st.integers(0, NUM_ROWS - 1), max_size=4),
    shard_rows=st.integers(1, 5),
    index=st.sampled_from(["kept", "kept", "lost", "cut", "of zeros"]),
)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(LAYOUTS), st.lists(runs, min_size=1, max_size=6), st.permutations(range(NUM_ROWS)))
def test_no_series_of_kills_retries_and_lost_indexes_loses_or_doubles_a_row(
    source: Source, layout: Layout, series: list[Run], order: list[int]
) -> None:
    remove_output(source)

    def run(this: Run) -> None:
        job = Job(source, layout, this.shard_rows, retry_failed=this.retry_failed)
        try:
            job.run(tuple(this.failing), tuple(order))
        finally:
            job.sink.close()

    for this in series:
        with killed(Kill(this.operations, this.torn)):
            run(this)
        for path in state_of(source, layout).glob("*.idx"):
            if this.index == "lost":
                path.unlink()
            elif this.index == "cut":
                os.truncate(path, path.stat().st_size // 2)
            elif this.index == "of zeros":
                path.write_bytes(bytes(path.stat().st_size))
    run(Run(0, False, True, frozenset(), 3, "kept"))
    expect_all(source, layout)
