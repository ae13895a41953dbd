from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.config import OutputConfig
from cbatch.errors import Fatal, UsageError
from cbatch.output import durable
from cbatch.output.index import Done, Entry, IndexFile, as_entries
from cbatch.output.journal import Journal
from cbatch.output.lines import read_lines, repair
from cbatch.output.record import FIELDS, RecordShape, dumps
from cbatch.output.target import Target

SHAPE = RecordShape()


def journal_of(output: Path) -> Journal:
    return Journal(Target(OutputConfig(output=str(output))))


def line(row: int, text: str = "Grüße 🦜\u2028") -> bytes:
    values = (text, "stop", 3, 4, row, "in.jsonl", None, None)
    return dumps({"id": row, **dict(zip(FIELDS, values, strict=True))}).encode() + b"\n"


def rows(path: Path) -> list[int]:
    return [json.loads(text)["row"] for text in path.read_bytes().splitlines()]


# Locking


def test_a_second_job_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    first = journal_of(tmp_path / "out")
    with pytest.raises(UsageError, match="another cbatch job"):
        journal_of(tmp_path / "out")
    with pytest.raises(UsageError, match="another cbatch job"):
        journal_of(tmp_path / "elsewhere" / ".." / "out")
    first.close()
    journal_of(tmp_path / "out").close()


def test_the_lock_ends_with_the_process_that_held_it(tmp_path: Path) -> None:
    hold = (
        "import os, signal, sys; from cbatch.config import OutputConfig; from cbatch.output.journal import Journal; "
        "from cbatch.output.target import Target; Journal(Target(OutputConfig(output=sys.argv[1]))); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    dead = subprocess.run([sys.executable, "-c", hold, tmp_path / "out"], cwd=Path(__file__).parent.parent)
    assert dead.returncode == -9
    assert (tmp_path / "out/.cbatch/lock").exists()
    journal_of(tmp_path / "out").close()


def test_a_programme_started_by_the_job_does_not_keep_its_lock(tmp_path: Path) -> None:
    journal = journal_of(tmp_path / "out")
    child = subprocess.Popen(["sleep", "30"], close_fds=False)
    journal.close()
    try:
        journal_of(tmp_path / "out").close()
    finally:
        child.kill()
        child.wait()


def test_outputs_in_one_folder_have_states_of_their_own(tmp_path: Path) -> None:
    journals = [
        journal_of(tmp_path),
        journal_of(tmp_path / "a.jsonl"),
        journal_of(tmp_path / "a.parquet"),
    ]
    assert len({journal.state for journal in journals}) == 3
    assert all(journal.state.name.startswith(".") for journal in journals)
    for journal in journals:
        journal.close()


def test_an_output_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="can't write there"):
        journal_of(tmp_path / "file" / "out")
    assert (tmp_path / "file").read_text() == "mine"


# Settings


def test_the_same_settings_go_on_and_others_are_refused_by_name(tmp_path: Path) -> None:
    journal = journal_of(tmp_path)
    assert journal.manifest is None
    journal.begin({"seed": 7, "stop": ["a"], "temperature": 0.5, "system": None})
    assert journal.manifest == {"seed": 7, "stop": ["a"], "temperature": 0.5, "system": None}
    journal.check({"temperature": 0.5, "stop": ["a"], "seed": 7, "system": None})
    with pytest.raises(UsageError) as refused:
        journal.check({"seed": 8, "stop": ["a"], "temperature": 0.5, "system": "é" * 500})
    text = str(refused.value)
    assert "seed: 7 before, 8 now" in text
    assert "system: null before, " in text
    assert "stop" not in text
    assert "temperature" not in text
    assert max(map(len, text.split("; "))) < 400 + len(str(tmp_path))
    assert journal.manifest
    assert journal.manifest["seed"] == 7
    journal.close()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe"])
def test_a_manifest_that_cannot_be_read_stops_the_job(tmp_path: Path, content: bytes) -> None:
    journal = journal_of(tmp_path)
    (journal.state / "manifest.json").write_bytes(content)
    with pytest.raises(Fatal, match=r"manifest\.json: can't be read"):
        _ = journal.manifest
    journal.close()


def test_a_write_that_fails_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    durable.replace(tmp_path / "a.json", [b"before"])
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        durable.replace(tmp_path / "a.json", [b"af", b"ter"])
    assert (tmp_path / "a.json").read_text() == "before"


# The torn end


def test_a_file_cut_at_any_byte_of_its_last_record_ends_in_a_whole_record(tmp_path: Path) -> None:
    path, whole, last = tmp_path / "part.jsonl", line(0) + line(1), line(2)
    for cut in range(len(last) + 1):
        path.write_bytes(whole + last[:cut])
        repair(path, SHAPE)
        complete = cut >= len(last) - 1  # all of it, or all but its newline
        assert path.read_bytes() == (whole + last if complete else whole), cut


@pytest.mark.parametrize("fragment", [b"7", b"{}", b"null", b'"row"', b"[]", b"[1]", b"true", b"{", b"\x00" * 9000])
@pytest.mark.parametrize("before", [b"", line(0)])
def test_a_fragment_that_is_no_record_is_cut_off(tmp_path: Path, before: bytes, fragment: bytes) -> None:
    path = tmp_path / "part.jsonl"
    path.write_bytes(before + fragment)
    repair(path, SHAPE)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"row": 0, "source": "in.jsonl"},
        {"row": "0", "source": "in.jsonl", "error": None},
        {"row": 0, "source": None, "error": None},
    ],
)
def test_an_object_that_lacks_its_row_source_or_error_is_no_record(tmp_path: Path, wrong: dict[str, object]) -> None:
    path = tmp_path / "part.jsonl"
    path.write_bytes(line(0) + json.dumps(wrong).encode())
    repair(path, SHAPE)
    assert path.read_bytes() == line(0)


def test_the_last_newline_is_found_however_long_the_last_record_is(tmp_path: Path) -> None:
    path = tmp_path / "part.jsonl"
    for length in (65_000, 65_536, 70_000, 200_000):
        path.write_bytes(line(0) + line(1, "x" * length)[:-9])
        repair(path, SHAPE)
        assert path.read_bytes() == line(0)
        path.write_bytes(line(0) + line(1, "x" * length)[:-1])
        repair(path, SHAPE)
        assert rows(path) == [0, 1]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=5), st.data())
def test_repair_keeps_every_whole_record_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], data: st.DataObject
) -> None:
    lines = [line(row, text) for row, text in enumerate(texts)]
    content = b"".join(lines)
    cut = data.draw(st.integers(0, len(content)))
    path = tmp_path_factory.getbasetemp() / "repaired.jsonl"
    path.write_bytes(content[:cut])
    repair(path, SHAPE)
    ends = np.cumsum([len(text) for text in lines])
    assert rows(path) == [row for row, end in enumerate(ends) if end - 1 <= cut]
    assert path.read_bytes() == content[: path.stat().st_size]


@pytest.mark.parametrize("damaged", [b"\n", b"{}\n", b"nonsense\n", line(1)[:-9] + b"\n", line(1)[:-9] + line(2)])
def test_a_damaged_line_in_the_middle_is_reported_with_its_number(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "part.jsonl"
    path.write_bytes(line(0) + damaged + line(3))
    with pytest.raises(Fatal, match=r"part\.jsonl:2: this record is damaged"):
        list(read_lines(path, SHAPE))


def test_records_of_batch_api_rows_are_recognised() -> None:
    shape = RecordShape("gen_")
    record = {"custom_id": "a", "response": None, "error": {"code": "x"}, "gen_row": 4, "gen_source": "in.jsonl"}
    assert shape.key(record) == ("in.jsonl", 4, True)
    assert shape.key({**record, "response": {}, "error": None}) == ("in.jsonl", 4, False)


@pytest.mark.parametrize("error", [{}, {"error": "of the input"}])
def test_input_columns_named_as_in_a_batch_file_do_not_decide_whether_a_row_failed(error: dict[str, str]) -> None:
    record = {"custom_id": "a", "response": "mine", **error, "gen_row": 4, "gen_source": "in.jsonl", "gen_error": None}
    assert RecordShape("gen_").key(record) == ("in.jsonl", 4, False)


# The index


def test_an_index_is_believed_only_for_a_shard_of_the_size_it_was_made_for(tmp_path: Path) -> None:
    index = IndexFile(tmp_path / "part.idx")
    assert index.read() is None
    entries = as_entries([Entry(5, 0, 77, False), Entry(2**40, 3, 2**32 - 1, True)])
    index.write(entries)
    assert index.read(100) is None
    index.finish(100)
    assert index.read(99) is None
    found = index.read(100)
    assert found is not None
    assert found.tolist() == entries.tolist()


def test_a_torn_index_gives_its_whole_entries(tmp_path: Path) -> None:
    index = IndexFile(tmp_path / "part.idx")
    index.write(as_entries([Entry(row, 0, 9, False) for row in range(3)]))
    content = index.path.read_bytes()
    header = len(content) - 3 * as_entries([]).itemsize
    for cut in range(len(content) + 1):
        index.path.write_bytes(content[:cut])
        found = index.read()
        if cut < header:
            assert found is None
        else:
            assert found is not None
            assert found["row"].tolist() == list(range((cut - header) // as_entries([]).itemsize))


# What is done


def test_done_rows_are_told_apart_by_source() -> None:
    done = Done()
    done.add(as_entries([Entry(0, 0, 5, False), Entry(7, 2, 6, True)]))
    done.add(as_entries([]))
    done.add(as_entries([Entry(100_000, 0, 8, False)]))
    assert (done.digest(0, 0), done.digest(2, 7), done.digest(0, 100_000)) == (5, 6, 8)
    assert [done.digest(*place) for place in ((0, 7), (1, 0), (2, 0), (0, 10**9))] == [0, 0, 0, 0]
    assert (done.num_rows, done.num_failed) == (3, 1)


def test_a_row_that_stands_twice_is_reported() -> None:
    twice = as_entries([Entry(4, 0, 5, False)] * 2)
    with pytest.raises(Fatal, match="twice"):
        Done().add(twice)
    done = Done()
    done.add(twice[:1])
    with pytest.raises(Fatal, match="twice"):
        done.add(twice[1:])
