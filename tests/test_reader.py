from __future__ import annotations

import gzip
import io
import json
import os
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.config import OutputConfig
from cbatch.errors import RowError, UsageError
from cbatch.output.record import dumps
from cbatch.output.target import Target
from cbatch.rows import lines
from cbatch.rows.inputs import resolve
from cbatch.rows.json_object import parse_object
from cbatch.rows.reader import UNKNOWN_DIGEST, Source, read
from cbatch.rows.request import Row


def rows_of(path: Path, content: bytes | None = None) -> list[Row]:
    if content is not None:
        path.write_bytes(content)
    return list(read(resolve([str(path)])))


def data_of(path: Path, content: bytes | None = None) -> list[dict[str, Any]]:
    rows = rows_of(path, content)
    assert not [row.problem for row in rows if row.problem]
    return [row.data for row in rows]


def compressed(content: bytes, codec: str) -> bytes:
    return gzip.compress(content) if codec == "gz" else pa.compress(content, codec="zstd", asbytes=True)


def line(number: int) -> bytes:
    return b'{"n": %d}\n' % number


# Lines


@pytest.mark.parametrize(
    ("content", "numbers", "places"),
    [
        (b'{"n": 0}\n{"n": 1}\n', [0, 1], [1, 2]),
        (b'{"n": 0}\n{"n": 1}', [0, 1], [1, 2]),
        (b'{"n": 0}\r\n{"n": 1}\r\n', [0, 1], [1, 2]),
        (b'\xef\xbb\xbf{"n": 0}\n', [0], [1]),
        (b'\n\n{"n": 0}\n  \t\n\r\n{"n": 1}\n\n', [0, 1], [3, 6]),
        (b"", [], []),
        (b"\n \n\r\n", [], []),
        (b"\xef\xbb\xbf", [], []),
    ],
)
def test_lines_end_at_a_newline_and_blank_ones_are_no_rows(
    tmp_path: Path, content: bytes, numbers: list[int], places: list[int]
) -> None:
    path = tmp_path / "in.jsonl"
    rows = rows_of(path, content)
    assert [row.data["n"] for row in rows] == numbers
    assert [row.index for row in rows] == numbers
    assert [row.where for row in rows] == [f"{path}:{place}" for place in places]


@pytest.mark.parametrize("codec", ["", ".gz", ".zst"])
@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x7f"])
def test_unicode_line_separators_do_not_end_a_record(tmp_path: Path, separator: str, codec: str) -> None:
    record = {"id": f"a{separator}b", "prompt": f"x{separator}{separator}y"}
    content = (json.dumps(record, ensure_ascii=False) + "\n").encode() * 2
    path = tmp_path / f"in.jsonl{codec}"
    assert data_of(path, compressed(content, codec[1:]) if codec else content) == [record, record]


def test_vertical_tab_and_form_feed_inside_a_text_file_do_not_end_a_record(tmp_path: Path) -> None:
    assert data_of(tmp_path / "in.txt", b"a\x0bb\x0cc\n  d \n\n") == [{"prompt": "a\x0bb\x0cc"}, {"prompt": "  d "}]


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (b"{", "invalid_json"),
        (b'{"a": 1} x', "invalid_json"),
        (b"{'a': 1}", "invalid_json"),
        (b'{"a": NaN}', "invalid_json"),
        (b'{"a": -Infinity}', "invalid_json"),
        (b'{"a": 1e999}', "invalid_json"),
        (b'{"a": -1e999}', "invalid_json"),
        (b'{"a": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b'{"a": "\x01"}', "invalid_json"),
        (b'{"a": ' + b"[" * 201 + b"]" * 201 + b"}", "invalid_json"),
        (b'{"s": "\\ud800", "a": ' + b"[" * 900 + b"]" * 900 + b"}", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"a": "\xff"}', "invalid_utf8"),
        (b'{"a": "\xed\xa0\x80"}', "invalid_utf8"),
        (b"[1]", "not_an_object"),
        (b'"text"', "not_an_object"),
        (b"null", "not_an_object"),
        (b"17", "not_an_object"),
    ],
)
def test_a_bad_line_is_a_problem_of_its_row_only(tmp_path: Path, bad: bytes, kind: str) -> None:
    path = tmp_path / "in.jsonl"
    rows = rows_of(path, line(0) + bad + b"\n" + line(2))
    assert [row.problem.kind if row.problem else None for row in rows] == [None, kind, None]
    assert [row.index for row in rows] == [0, 1, 2]
    assert rows[1].data == {}
    assert str(rows[1].problem).startswith(f"{path}:2: ")
    assert rows[2].data == {"n": 2}


def test_nesting_up_to_the_limit_passes_through_every_stage() -> None:
    text = '{"a": ' + '{"b": ' * 99 + "[" * 99 + '"\\ud800"' + "]" * 99 + "}" * 99 + "}"
    assert len(dumps(parse_object(text))) > 500


def test_many_brackets_that_are_not_nested_are_fine() -> None:
    assert len(parse_object('{"a": [' + "[]," * 5000 + '{}], "b": "' + "[{" * 5000 + '"}')["a"]) == 5001


def test_numbers_keep_their_value() -> None:
    text = '{"big": 123456789012345678901234567890, "small": -0.0, "int": 1, "float": 1.0, "tiny": 5e-324}'
    assert json.dumps(parse_object(text)) == text


def test_the_last_of_equal_keys_counts() -> None:
    assert parse_object('{"a": 1, "a": 2}') == {"a": 2}


@pytest.mark.parametrize(
    ("escaped", "text"),
    [
        (r"\ud83d", "\ufffd"),
        (r"\ude00", "\ufffd"),
        (r"a\ud83dz", "a\ufffdz"),
        (r"\ude00\ud83d", "\ufffd\ufffd"),
        (r"\ud83d\ude00", "\U0001f600"),
        (r"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (r"\uD83D\uDE00", "\U0001f600"),
        (r"\\ud83d", "\\ud83d"),
        (r"\ufeffx\ud83d", "\ufeffx\ufffd"),
    ],
)
def test_half_a_surrogate_pair_becomes_a_replacement_character(escaped: str, text: str) -> None:
    line = f'{{"prompt": "{escaped}", "id": "{escaped}", "m": [{{"k": ["{escaped}"]}}], "{escaped}": 1}}'
    assert parse_object(line) == {"prompt": text, "id": text, "m": [{"k": [text]}], text: 1}


def test_a_line_above_the_limit_is_a_problem_of_its_row_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_MAX_LINE", 1024)
    for length in (1025, 1026, 2047, 2048, 2049, 5000):
        long = b'{"a": "' + b"x" * (length - 9) + b'"}'
        assert len(long) == length
        for end in (b"\n", b"\r\n"):
            rows = rows_of(tmp_path / "in.jsonl", line(0) + long + end + line(2))
            assert [row.problem.kind if row.problem else None for row in rows] == [None, "line_too_long", None]
            assert [row.where[-1] for row in rows] == ["1", "2", "3"]
    assert rows_of(tmp_path / "in.jsonl", b"x" * 3000)[0].problem


def test_a_line_of_20_megabytes_is_read(tmp_path: Path) -> None:
    content = b'{"a": "' + b"x" * 20_000_000 + b'"}\n'
    assert [len(data["a"]) for data in data_of(tmp_path / "in.jsonl", content)] == [20_000_000]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=10,
)


@settings(deadline=None, max_examples=150)
@given(st.dictionaries(st.text(max_size=5), json_values, max_size=5), st.booleans())
def test_any_object_is_read_as_the_standard_library_reads_it(value: dict[str, Any], ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert parse_object(text) == json.loads(text) == value


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=60))
def test_any_bytes_give_rows_and_never_an_exception(content: bytes) -> None:
    rows = list(_rows_of_bytes(content))
    expected = [part for part in content.removeprefix(b"\xef\xbb\xbf").split(b"\n") if part.strip()]
    assert len(rows) == len(expected)
    assert [row.index for row in rows] == list(range(len(rows)))
    assert all(row.problem or isinstance(row.data, dict) for row in rows)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.binary(max_size=40)
        | st.sampled_from([b"\xff\xfe", b"[" * 5000, b'{"a": "', b"\\", b'"\r', b"\xef\xbb\xbf{}"])
    ),
    st.integers(1, 70_000),
)
def test_no_bytes_cost_a_good_line_before_or_behind_them(junk: list[bytes], length: int) -> None:
    content, good = b"", []
    for number, piece in enumerate(junk):
        good.append(content.count(b"\n") + 1)
        content += b'{"n": %d, "pad": "%s"}\n' % (number, b"x" * (length if number == 0 else 0)) + piece + b"\n"
    rows = [row for row in _rows_of_bytes(content) if row.data.keys() == {"n", "pad"}]
    assert [row.data["n"] for row in rows] == list(range(len(junk)))
    assert [row.where for row in rows] == [f"-:{place}" for place in good]


def _rows_of_bytes(content: bytes) -> list[Row]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        return list(Source("-", "jsonl").rows())


# Digests


def test_a_digest_changes_with_the_line_and_is_never_a_reserved_one(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "in.jsonl", b"".join(map(line, range(500))) + b"{\n")
    assert len({row.digest for row in rows}) == 501
    assert min(row.digest for row in rows) > UNKNOWN_DIGEST


# Compression


@pytest.mark.parametrize("codec", ["gz", "zst"])
def test_all_members_of_a_compressed_file_are_read(tmp_path: Path, codec: str) -> None:
    content = compressed(line(0) + b'{"n":', codec) + compressed(b" 1}\n", codec) + compressed(line(2), codec)
    assert data_of(tmp_path / f"in.jsonl.{codec}", content) == [{"n": 0}, {"n": 1}, {"n": 2}]


@pytest.mark.parametrize("codec", ["gz", "zst"])
@pytest.mark.parametrize("keep", [0.3, 0.9, -1, -5])
def test_a_compressed_file_cut_short_ends_in_a_problem(tmp_path: Path, codec: str, keep: float) -> None:
    whole = compressed(b"".join(map(line, range(50_000))), codec)
    rows = rows_of(tmp_path / f"in.jsonl.{codec}", whole[: int(len(whole) * keep) if keep > 0 else int(keep)])
    assert [row.data for row in rows[:-1]] == [{"n": number} for number in range(len(rows) - 1)]
    assert rows[-1].problem
    assert rows[-1].problem.kind == "read_error"
    assert rows[-1].index == len(rows) - 1


@pytest.mark.parametrize("suffix", ["jsonl", "txt"])
def test_a_file_cut_while_it_is_read_ends_in_a_problem(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"in.{suffix}"
    path.write_bytes(b"".join(map(line, range(50_000))))
    rows = read(resolve([str(path)]))
    first = [next(rows) for _ in range(10)]
    os.truncate(path, len(b"".join(map(line, range(20_000)))))
    found = [*first, *rows]
    assert len(found) == 20_001
    assert not any(row.problem for row in found[:-1])
    assert str(found[-1].problem).endswith("the file became shorter while it was read")


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_bytes(path.read_bytes() + line(9_000))])
def test_a_file_that_is_removed_or_grows_while_it_is_read_is_read_to_its_end(
    tmp_path: Path, change: Callable[[Path], Any]
) -> None:
    path = _file(tmp_path / "in.jsonl", b"".join(map(line, range(9_000))))
    rows = read(resolve([str(path)]))
    next(rows)
    change(path)
    found = list(rows)
    assert len(found) >= 8_999
    assert not any(row.problem for row in found)


@pytest.mark.parametrize("codec", ["gz", "zst"])
def test_what_is_not_compressed_at_all_is_a_problem(tmp_path: Path, codec: str) -> None:
    (row,) = rows_of(tmp_path / f"in.jsonl.{codec}", b'{"n": 0}\n{"n": 1}\n')
    assert row.problem
    assert row.problem.kind == "read_error"


def test_an_empty_compressed_file_has_no_rows(tmp_path: Path) -> None:
    for codec in ("gz", "zst"):
        assert rows_of(tmp_path / f"in.jsonl.{codec}", compressed(b"", codec)) == []


def test_compressed_text_files_are_read(tmp_path: Path) -> None:
    assert data_of(tmp_path / "in.txt.gz", gzip.compress(b"one\ntwo")) == [{"prompt": "one"}, {"prompt": "two"}]


# Several sources


def test_skip_and_limit_count_over_all_sources(tmp_path: Path) -> None:
    for name, numbers in (("a", range(3)), ("b", range(3, 6))):
        (tmp_path / f"{name}.jsonl").write_bytes(b"".join(map(line, numbers)))
    sources = resolve([str(tmp_path)])
    for skip, limit in ((0, None), (2, 2), (4, None), (9, 1), (0, 0)):
        found = [row.data["n"] for row in read(sources, skip, limit)]
        assert found == list(range(6))[skip : None if limit is None else skip + limit]


def test_each_row_names_its_source_and_its_position_there(tmp_path: Path) -> None:
    a, b = _file(tmp_path / "a.jsonl"), _file(tmp_path / "b.jsonl")
    assert [(row.source, row.index) for row in read(resolve([str(b), str(a)]))] == [
        (str(b), 0),
        (str(b), 1),
        (str(a), 0),
        (str(a), 1),
    ]


def _file(path: Path, content: bytes = b'{"n": 0}\n{"n": 1}\n') -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def names_of(*inputs: object, output: Path | None = None) -> list[str]:
    return [Path(source.name).name for source in resolve(list(map(str, inputs)), owned_by(output))]


def owned_by(output: Path | None) -> Callable[[Path], bool]:
    """Tells which files belong to the output of a job."""
    return Target(OutputConfig(output=str(output))).owns if output else lambda _: False


def test_a_folder_gives_its_files_in_order_without_hidden_and_foreign_ones(tmp_path: Path) -> None:
    for name in (
        "b.jsonl",
        "a.ndjson",
        "sub/c.txt",
        "d.jsonl.gz",
        ".hidden.jsonl",
        ".cbatch/e.jsonl",
        "f.json",
        "g.md",
    ):
        _file(tmp_path / name)
    assert names_of(tmp_path) == ["a.ndjson", "b.jsonl", "d.jsonl.gz", "c.txt"]


def test_a_folder_below_a_hidden_one_may_be_named(tmp_path: Path) -> None:
    _file(tmp_path / ".data/in.jsonl")
    assert names_of(tmp_path / ".data") == ["in.jsonl"]


def test_patterns(tmp_path: Path) -> None:
    for name in ("part-1.jsonl", "part-2.jsonl", "part-10.jsonl", "x/part-3.jsonl", ".part-4.jsonl"):
        _file(tmp_path / name)
    assert names_of(tmp_path / "part-?.jsonl") == ["part-1.jsonl", "part-2.jsonl"]
    assert names_of(tmp_path / "**" / "part-*.jsonl") == [f"part-{n}.jsonl" for n in (1, 10, 2, 3)]
    assert names_of(tmp_path / "part-[!1]*.jsonl") == ["part-2.jsonl"]


def test_a_file_with_a_pattern_or_a_question_mark_in_its_name_is_that_file(tmp_path: Path) -> None:
    for name in ("what?.jsonl", "[a].jsonl", "a.jsonl"):
        _file(tmp_path / name)
    assert names_of(tmp_path / "what?.jsonl", tmp_path / "[a].jsonl") == ["what?.jsonl", "[a].jsonl"]


@pytest.mark.parametrize("again", ["in.jsonl", "sub/../in.jsonl", "*.jsonl", ".", "link.jsonl"])
def test_the_same_file_twice_is_refused(tmp_path: Path, again: str) -> None:
    path = _file(tmp_path / "in.jsonl")
    (tmp_path / "sub").mkdir()
    if again == "link.jsonl":
        (tmp_path / again).symlink_to(path)
    with pytest.raises(UsageError, match="named twice"):
        resolve([str(path), str(tmp_path / again)])


def test_standard_input_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="named twice"):
        resolve(["-", "-"])


def test_closed_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="closed"):
        resolve(["-"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.jsonl", "no such file"),
        ("*.ndjson", "no file matches"),
        ("empty", "holds no file"),
        ("data.json", "unknown kind"),
        ("data.csv", "unknown kind"),
        ("data.parquet.gz", "unknown kind"),
        ("bad.parquet", "can't be read"),
        ("empty.parquet", "can't be read"),
        ("x" * 300, "can't be opened"),
    ],
)
def test_an_input_that_can_not_be_opened_is_named(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    for file in ("data.json", "data.csv", "data.parquet.gz"):
        _file(tmp_path / file)
    _file(tmp_path / "bad.parquet", b"PAR1 this is not Parquet PAR1")
    _file(tmp_path / "empty.parquet", b"")
    with pytest.raises(UsageError, match=message) as caught:
        resolve([str(tmp_path / name)])
    assert name[:50] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_or_a_pattern_leaves_out_the_output(tmp_path: Path) -> None:
    _file(tmp_path / "in.jsonl")
    _file(tmp_path / "out/part-00000.jsonl")
    _file(tmp_path / "done.jsonl")
    assert names_of(tmp_path, output=tmp_path / "out") == ["done.jsonl", "in.jsonl"]
    assert names_of(tmp_path / "*.jsonl", output=tmp_path / "done.jsonl") == ["in.jsonl"]
    (tmp_path / "link").symlink_to(tmp_path / "out")
    assert names_of(tmp_path / "**" / "*.jsonl", output=tmp_path / "link") == ["done.jsonl", "in.jsonl"]


def test_a_named_input_that_would_be_overwritten_is_refused(tmp_path: Path) -> None:
    single, shard = _file(tmp_path / "in.jsonl"), _file(tmp_path / "out/part-00000.jsonl")
    (tmp_path / "link.jsonl").symlink_to(single)
    for name, output in ((single, single), (single, tmp_path / "link.jsonl"), (shard, tmp_path / "out")):
        with pytest.raises(UsageError, match="overwritten"):
            resolve([str(name)], owned_by(output))
    assert names_of(single, output=tmp_path) == ["in.jsonl"]


def test_counting_lines_without_parsing_them(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    for content, expected in ((b"", 0), (b"{}\n", 1), (b"{}", 1), (b"{}\n{}", 2), (b"{}\n{}\n", 2)):
        assert resolve([str(_file(path, content))])[0].count() == expected
    assert resolve([str(_file(tmp_path / "in.jsonl.gz", gzip.compress(b"{}")))])[0].count() is None
    pq.write_table(pa.table({"a": [1, 2, 3]}), tmp_path / "in.parquet")
    assert resolve([str(tmp_path / "in.parquet")])[0].count() == 3


# Parquet


def parquet(path: Path, table: pa.Table, **options: Any) -> Path:
    pq.write_table(table, path, **options)
    return path


@pytest.mark.parametrize(
    "make",
    [
        lambda values: pa.array(values, pa.string()),
        lambda values: pa.array(values, pa.large_string()),
        lambda values: pa.array(values, pa.string_view()),
        lambda values: pa.array(values).dictionary_encode(),
    ],
)
def test_texts_of_all_kinds_arrive_as_texts(tmp_path: Path, make: Callable[[list[str | None]], pa.Array]) -> None:
    values = ["a", None, "\U0001f600 \u2028", "a", ""]
    path = parquet(tmp_path / "in.parquet", pa.table({"prompt": make(values)}))
    assert [data["prompt"] for data in data_of(path)] == values


def test_columns_json_does_not_know_become_text_or_null(tmp_path: Path) -> None:
    table = pa.table(
        {
            "time": pa.array([datetime(2024, 1, 2, 3, 4, 5, tzinfo=timezone.utc)], pa.timestamp("us", "UTC")),
            "nanos": pa.array([1_234_567_890_123_456_789], pa.timestamp("ns")),
            "decimal": pa.array([Decimal("1.10")]),
            "bytes": pa.array([b"\x00\xff"]),
            "nan": pa.array([float("nan")]),
            "inf": pa.array([[float("-inf"), 1.5]]),
            "half": pa.array([1.5], pa.float16()),
            "big": pa.array([2**64 - 1], pa.uint64()),
            "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
            "null": pa.array([None], pa.null()),
        }
    )
    (data,) = data_of(parquet(tmp_path / "in.parquet", table))
    assert data == {
        "time": "2024-01-02T03:04:05+00:00",
        "nanos": "2009-02-13T23:31:30.123456789",
        "decimal": "1.10",
        "bytes": "AP8=",
        "nan": None,
        "inf": [None, 1.5],
        "half": 1.5,
        "big": 2**64 - 1,
        "map": [["k", 1]],
        "null": None,
    }
    assert json.loads(dumps(data)) == data


def test_messages_arrive_as_plain_lists_and_dicts(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    (data,) = data_of(parquet(tmp_path / "in.parquet", pa.table({"messages": [messages]})))
    assert data == {"messages": messages}
    assert type(data["messages"]) is list
    assert type(data["messages"][0]) is dict


@pytest.mark.parametrize(
    "bad",
    [
        pa.array([b"ok", b"\xff", b"ok"]).view(pa.string()),
        pa.array([0, 2**62, 0], pa.timestamp("us")),
        pa.array([0, 10**7, 0], pa.int32()).cast(pa.date32()),
    ],
    ids=["utf8", "timestamp", "date"],
)
def test_a_value_python_can_not_hold_is_a_problem_of_its_row_only(tmp_path: Path, bad: pa.Array) -> None:
    rows = rows_of(parquet(tmp_path / "in.parquet", pa.table({"id": [0, 1, 2], "odd": bad})))
    assert [row.problem.kind if row.problem else None for row in rows] == [None, "invalid_value", None]
    assert "row 1: column 'odd'" in str(rows[1].problem)
    assert [row.data.get("id") for row in rows] == [0, None, 2]
    assert [row.index for row in rows] == [0, 1, 2]


def test_a_parquet_file_without_rows_has_none(tmp_path: Path) -> None:
    assert rows_of(parquet(tmp_path / "in.parquet", pa.table({"prompt": pa.array([], pa.string())}))) == []


def test_one_big_row_group_is_read_in_pieces(tmp_path: Path) -> None:
    messages = pa.array([[{"role": "user", "content": "x" * 400}]] * 30_000)
    path = parquet(tmp_path / "in.parquet", pa.table({"messages": messages}), row_group_size=30_000)
    del messages
    before = pa.total_allocated_bytes()
    rows = iter(read(resolve([str(path)])))
    assert next(rows).data["messages"][0]["role"] == "user"
    assert pa.total_allocated_bytes() - before < 4_000_000
    assert sum(1 for _ in rows) == 29_999


def test_a_damaged_data_page_ends_the_reading_with_a_problem(tmp_path: Path) -> None:
    path = parquet(tmp_path / "in.parquet", pa.table({"a": [str(n) for n in range(1000)]}), compression="zstd")
    content = bytearray(path.read_bytes())
    content[60:160] = bytes(100)
    rows = rows_of(path, bytes(content))
    assert rows[-1].problem
    assert rows[-1].problem.kind == "read_error"


# Datasets


def test_a_saved_dataset_is_read(tmp_path: Path) -> None:
    import datasets

    data = {"id": [1, 2], "prompt": ["a", "b"], "messages": [[{"role": "user", "content": "x"}], []]}
    datasets.Dataset.from_dict(data).save_to_disk(str(tmp_path / "saved"))
    (source,) = resolve([str(tmp_path / "saved")])
    assert source.count() == 2
    assert [row.data["prompt"] for row in source.rows()] == ["a", "b"]
    assert next(source.rows()).data == {name: values[0] for name, values in data.items()}


def test_a_saved_dataset_with_splits_needs_one_named(tmp_path: Path) -> None:
    import datasets

    folder = str(tmp_path / "saved")
    splits = {name: datasets.Dataset.from_dict({"prompt": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(folder)
    assert [row.data for row in read(resolve([folder + "?split=test"]))] == [{"prompt": "test"}]
    assert len(resolve([folder + "?split=test", folder + "?split=train"])) == 2
    for name in (folder, folder + "?split=dev", folder + "?other=1"):
        with pytest.raises(UsageError, match="train, test"):
            resolve([name])


def test_a_folder_that_only_looks_like_a_dataset_is_refused(tmp_path: Path) -> None:
    _file(tmp_path / "state.json", b"{}")
    with pytest.raises(UsageError, match="dataset"):
        resolve([str(tmp_path)])


def test_a_saved_dataset_is_read_as_it_is_stored_whatever_its_format(tmp_path: Path) -> None:
    import datasets

    data = {"prompt": ["a", "b"], "token_ids": [[1, 2], [3]], "image": [{"bytes": b"x", "path": None}] * 2}
    saved = datasets.Dataset.from_dict(data).with_format("numpy", columns=["token_ids"])
    saved.save_to_disk(str(tmp_path / "saved"))
    found = data_of(tmp_path / "saved")
    assert [one["prompt"] for one in found] == data["prompt"]
    assert [one["token_ids"] for one in found] == data["token_ids"]
    assert found[0]["image"] == {"bytes": "eA==", "path": None}


def test_a_split_of_a_dataset_without_splits_is_refused(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"prompt": ["a"]}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(UsageError, match="no splits"):
        resolve([str(tmp_path / "saved") + "?split=train"])


class FakeHub:
    """Stands where datasets.load_dataset is: remembers what it was asked for and streams some rows."""

    features = None

    def __init__(self, rows: list[Any], error: Exception | None = None) -> None:
        self.rows, self.error, self.asked = rows, error, ()

    def __call__(self, path: str, name: str | None, *, split: str, revision: str | None, streaming: bool) -> Any:
        self.asked = (path, name, split, revision, streaming)
        if self.error:
            raise self.error
        return self

    def __iter__(self) -> Any:
        for row in self.rows:
            if isinstance(row, Exception):
                raise row
            yield row


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("hf://org/data", ("org/data", None, "train", None, True)),
        ("hf://data", ("data", None, "train", None, True)),
        ("hf://org/data?split=test", ("org/data", None, "test", None, True)),
        ("hf://org/data?config=en&split=train[:9]&revision=v1", ("org/data", "en", "train[:9]", "v1", True)),
    ],
)
def test_a_hub_dataset_is_streamed(monkeypatch: pytest.MonkeyPatch, name: str, asked: tuple[Any, ...]) -> None:
    hub = FakeHub([{"prompt": "a"}, {"prompt": "b", "when": datetime(2024, 1, 1)}])
    monkeypatch.setattr("datasets.load_dataset", hub)
    (source,) = resolve([name])
    assert hub.asked == asked
    assert source.count() is None
    assert [row.data for row in source.rows()] == [{"prompt": "a"}, {"prompt": "b", "when": "2024-01-01T00:00:00"}]
    assert [(row.source, row.index) for row in source.rows()] == [(name, 0), (name, 1)]


def test_an_unknown_option_of_a_hub_dataset_is_refused() -> None:
    with pytest.raises(UsageError, match="'splt'"):
        resolve(["hf://org/data?splt=test"])


def test_a_hub_that_can_not_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", FakeHub([], ConnectionError("no route\nto host")))
    with pytest.raises(UsageError, match=r"hf://org/data: can't be opened: no route$"):
        resolve(["hf://org/data"])


def test_a_stream_that_breaks_off_ends_in_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", FakeHub([{"n": 0}, RuntimeError("peer closed connection")]))
    rows = list(read(resolve(["hf://org/data"])))
    assert [row.data for row in rows] == [{"n": 0}, {}]
    assert isinstance(rows[1].problem, RowError)
    assert "peer closed connection" in str(rows[1].problem)
