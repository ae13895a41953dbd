"""What a resumed job says about an input that is not what it was."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cbatch.errors import OK, SOME_FAILED, Fatal, UsageError
from tests.jobs import prompt, records, run_job, write_input, write_rows

LAYOUTS: dict[str, dict[str, Any]] = {
    "folder": {},
    "rolled": {"shard_rows": 2},
    "file": {"output": "out.jsonl"},
    "ordered": {"ordered": True},
    "parquet": {"output": "out.parquet"},
}
Job = Callable[..., int]

pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.fixture
def job(tiny_model: Path) -> Job:
    def run(*inputs: object, **settings: Any) -> int:
        return run_job(*inputs, **{"model": str(tiny_model), "output": "out", "max_tokens": 2, **settings})

    return run


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Put so many rows on standard input."""

    def feed(num_rows: int) -> None:
        content = "".join(json.dumps(prompt(row)) + "\n" for row in range(num_rows)).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return feed


def forget_index(output: str) -> None:
    path = Path(output)
    state = path.with_name(f".{path.name}.cbatch") if path.suffix else path / ".cbatch"
    indexes = list(state.glob("*.idx"))
    assert indexes
    for index in indexes:
        index.unlink()


@pytest.mark.parametrize("left", [0, 2])
@pytest.mark.parametrize("output", ["out", "out.jsonl"])
def test_a_stream_that_ends_before_rows_that_are_done_is_refused(
    job: Job, feed: Callable[[int], None], left: int, output: str
) -> None:
    feed(4)
    assert job("-", output=output) == OK
    before = records(output)
    feed(left)
    with pytest.raises(Fatal, match=f"-: has {left} rows now, and had at least 4"):
        job("-", output=output)
    assert records(output) == before
    feed(5)
    assert job("-", output=output) == OK
    assert len(records(output)) == 5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mended_file_without_rows_that_are_done_is_refused(job: Job, layout: str) -> None:
    write_input(4, bad=(1,))
    settings = LAYOUTS[layout]
    assert job(**settings) == SOME_FAILED
    write_input(3)
    with pytest.raises(Fatal, match=r"in\.jsonl: has 3 rows now, and had at least 4"):
        job(retry_failed=True, **settings)
    write_input(4)
    assert job(retry_failed=True, **settings) == OK


def test_without_a_limit_that_was_reached_and_rows_that_are_skipped_the_end_is_the_end(job: Job) -> None:
    write_input(6)
    assert job() == OK
    assert job(limit=3) == OK
    assert job(skip=2) == OK
    assert job(skip=6) == OK
    assert job(skip=2, limit=1) == OK
    assert [record["row"] for record in records()] == list(range(6))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "parquet"])
def test_without_its_index_a_job_knows_its_rows_by_what_the_records_hold(job: Job, layout: str) -> None:
    rows = [{**prompt(row), "score": 1.50, "none": None, "text": "\u2028\x7f"} for row in range(4)]
    write_rows(rows)
    settings = LAYOUTS[layout]
    assert job(**settings) == OK
    forget_index(settings.get("output", "out"))
    assert job(**settings) == OK
    forget_index(settings.get("output", "out"))
    write_rows([rows[1], rows[0], *rows[2:]])
    with pytest.raises(Fatal, match=r"in\.jsonl:1: this row has changed since it was completed"):
        job(**settings)


def test_without_its_index_a_job_knows_openai_requests_by_their_custom_id(job: Job) -> None:
    def request(name: str) -> dict[str, Any]:
        return {"custom_id": name, "body": {"messages": [{"role": "user", "content": "x"}]}}

    write_rows(map(request, "ab"))
    assert job() == OK
    forget_index("out")
    assert job() == OK
    forget_index("out")
    write_rows(map(request, "ba"))
    with pytest.raises(Fatal, match=r"in\.jsonl:1: this row has changed"):
        job()


def test_rows_in_parquet_that_can_not_be_compared_without_their_index_are_counted(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    write_input(3)
    assert job(output="out.parquet") == OK
    forget_index("out.parquet")
    assert job(output="out.parquet", progress="plain") == OK
    assert "3 rows that were done earlier could not be compared with the input" in capsys.readouterr().err


def test_a_file_that_was_cut_is_refused_before_anything_is_loaded(job: Job) -> None:
    write_input(4)
    assert job() == OK
    write_input(2)
    with pytest.raises(UsageError, match="input sizes"):
        job()
