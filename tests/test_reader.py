from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import re
import sys
import zlib
from collections.abc import Callable
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cbatch.errors import UsageError
from cbatch.rows import lines
from cbatch.rows.inputs import resolve
from cbatch.rows.reader import UNKNOWN_DIGEST, Source, read
from cbatch.rows.request import Row
from cbatch.rows.signature import foreign_kind


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
    assert rows[1].data in ({}, {"a": None}, {"s": "\ufffd", "a": None}, {"a": "\ufffd"}, {"a": "\ufffd" * 3})
    assert str(rows[1].problem).startswith(f"{path}:2: ")
    assert rows[2].data == {"n": 2}


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


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=60))
def test_any_bytes_give_rows_and_never_an_exception(content: bytes) -> None:
    assume(not content.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")))  # gzip and zstd are decompressed
    if problem := foreign_kind(content, "jsonl"):
        with pytest.raises(UsageError, match=re.escape(f"-: {problem}")):
            _rows_of_bytes(content)
        return
    rows = list(_rows_of_bytes(content))
    expected = [part for part in content.split(b"\n") if part.replace(b"\xef\xbb\xbf", b"").strip()]
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
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join(map(line, range(9_000))))
    rows = read(resolve([str(path)]))
    next(rows)
    change(path)
    found = list(rows)
    assert len(found) >= 8_999
    assert not any(row.problem for row in found)


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.jsonl.zst", "in.jsonl", "IN.JSONL.GZ", "in.ndjson.Zst"])
@pytest.mark.parametrize("codec", ["", "gz", "zst"])
def test_the_first_bytes_tell_what_is_compressed_whatever_the_name_says(tmp_path: Path, name: str, codec: str) -> None:
    content = line(0) + line(1)
    assert data_of(tmp_path / name, compressed(content, codec) if codec else content) == [{"n": 0}, {"n": 1}]
    assert resolve([str(tmp_path / name)])[0].count() == (None if codec else 2)


@pytest.mark.parametrize("codec", ["gz", "zst"])
def test_compressed_standard_input_is_read(codec: str) -> None:
    content = b"".join(map(line, range(600)))
    assert [row.data for row in _rows_of_bytes(compressed(content, codec))] == [{"n": n} for n in range(600)]


def zstd_of_blocks(lines: list[bytes], per_block: int, checksum: bool = False) -> bytes:
    """A zstd frame with raw blocks of so many lines each, as writers make that flush often."""
    pieces = [b"".join(lines[n : n + per_block]) for n in range(0, len(lines), per_block)]
    blocks = [(len(piece) << 3 | (piece is pieces[-1])).to_bytes(3, "little") + piece for piece in pieces]
    return b"\x28\xb5\x2f\xfd" + bytes([0x04 * checksum, 0x58]) + b"".join(blocks) + b"sum?" * checksum


def members(codec: str, shape: str) -> bytes:
    """300 lines in compressed form: in one piece, in members or frames of 7 lines, or in small blocks."""
    lines = [b'{"n": %d, "pad": "%d"}\n' % (n, n * 2**40) for n in range(300)]
    if shape == "one":
        return compressed(b"".join(lines), codec)
    if shape == "blocks" and codec == "zst":
        return zstd_of_blocks(lines, 3)
    if shape == "blocks":
        coder = zlib.compressobj(wbits=31)
        return b"".join(coder.compress(one) + coder.flush(zlib.Z_SYNC_FLUSH) for one in lines) + coder.flush()
    return b"".join(compressed(b"".join(lines[n : n + 7]), codec) for n in range(0, 300, 7))


def content_before_fault(codec: str, data: bytes) -> bytes:
    """What a decoder that is given one byte at a time makes of data up to a fault."""
    if codec == "zst":
        return zstd_before_fault(data)
    found, decoder = b"", zlib.decompressobj(31)
    for index in range(len(data)):
        try:
            found += decoder.decompress(data[index : index + 1])
        except zlib.error:
            break
        if decoder.eof:
            decoder = zlib.decompressobj(31)
    return found


def zstd_before_fault(data: bytes) -> bytes:
    """The same of the raw blocks and whole frames that `members` makes."""
    found, rest = b"", data
    while rest.startswith(b"\x28\xb5\x2f\xfd\x00\x58"):
        rest, is_last = rest[6:], 0
        while not is_last and len(rest) >= 3:
            number = int.from_bytes(rest[:3], "little")
            is_last, size = number & 1, number >> 3
            if len(rest) < 3 + size:
                return found
            found, rest = found + rest[3 : 3 + size], rest[3 + size :]
    return found


@pytest.mark.parametrize("shape", ["one", "members", "blocks"])
@pytest.mark.parametrize("codec", ["gz", "zst"])
@pytest.mark.parametrize("fault", ["cut", "behind"])
def test_every_whole_line_before_a_fault_is_a_row(codec: str, shape: str, fault: str) -> None:
    whole = members(codec, shape)
    known = shape == "blocks" or codec == "gz"  # how much stands before a cut
    for keep in range(20, len(whole), len(whole) // 40) if fault == "cut" else (len(whole),):
        data = whole[:keep] + (b"behind the end" if fault == "behind" else b"")
        rows = list(_rows_of_bytes(data))
        good = [row.data["n"] for row in rows if not row.problem]
        assert good == list(range(len(good)))
        if fault == "behind":
            assert len(good) == 300
        elif known:
            least = content_before_fault(codec, data).count(b"\n")
            assert len(good) == least if codec == "gz" else len(good) >= least
        if rows and rows[-1].problem:
            assert [row.problem.kind for row in rows[len(good) :] if row.problem][-1] == "read_error"
            assert len(rows) == len(good) + 1
        else:
            assert shape == "members"  # cut between two


@pytest.mark.parametrize("codec", ["gz", "zst"])
def test_every_whole_line_before_damage_is_a_row(codec: str) -> None:
    whole = bytearray(members(codec, "members"))
    starts = [n for n in range(len(whole)) if whole[n:].startswith((b"\x1f\x8b\x08\x00", b"\x28\xb5\x2f\xfd"))]
    middle = starts[20]
    whole[middle] ^= 0xFF
    rows = list(_rows_of_bytes(bytes(whole)))
    assert [row.data.get("n") for row in rows] == [*range(140), None]
    assert rows[-1].problem
    assert rows[-1].problem.kind == "read_error"


@pytest.mark.parametrize("fault", ["cut", "damaged"])
def test_every_line_in_whole_blocks_of_zstd_is_a_row(fault: str) -> None:
    content = b"".join(b'{"n": %d, "pad": "%d"}\n' % (n, n**5) for n in range(40_000))
    data = compressed(content, "zst")
    ends: list[int] = []
    position = 4 + 1 + (not data[4] >> 5 & 1) + (data[4] >> 5 & 1, 2, 4, 8)[data[4] >> 6]
    number = 0
    while not number & 1:
        number = int.from_bytes(data[position : position + 3], "little")
        position += 3 + (number >> 3)
        ends.append(position)
    assert len(ends) >= 8
    for block in (1, len(ends) // 2, len(ends) - 2):
        end = ends[block]
        spoilt = data[: end + 40] if fault == "cut" else data[: end + 3] + b"\xff" * 60 + data[end + 63 :]
        rows = list(_rows_of_bytes(spoilt))
        assert rows[-1].problem
        assert [row.data["n"] for row in rows[:-1]] == list(range(len(rows) - 1))
        assert len(rows) - 1 >= content[: (block + 1) * 2**17].count(b"\n")


def test_a_wrong_checksum_of_a_zstd_frame_costs_no_line() -> None:
    rows = list(_rows_of_bytes(zstd_of_blocks([line(n) for n in range(9)], 2, checksum=True)))
    assert [row.data.get("n") for row in rows] == [*range(9), None]
    assert rows[-1].problem


def test_frames_that_decoders_pass_over_are_passed_over() -> None:
    user = b"\x50\x2a\x4d\x18" + (70_000).to_bytes(4, "little") + bytes(70_000)
    packed = user + compressed(line(0), "zst") + user + zstd_of_blocks([line(1)], 1)
    assert [row.data for row in _rows_of_bytes(packed)] == [{"n": 0}, {"n": 1}]


# What is none of the kinds


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("text", ["One line\r\nand another\r\n", "Ein Läufer für Übermut\n", '{"prompt": "x"}\n' * 9])
@pytest.mark.parametrize("suffix", ["txt", "jsonl", "txt.gz"])
def test_text_of_two_or_four_bytes_a_character_is_refused_by_name(
    tmp_path: Path, encoding: str, text: str, suffix: str
) -> None:
    content = text.encode(encoding)
    path = tmp_path / f"in.{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    name = encoding[:6].upper()
    with pytest.raises(UsageError, match=f"{re.escape(str(path))}: is {name}.* text: convert it: iconv"):
        resolve([str(path)])


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_chinese_text_in_utf_16_without_a_mark_is_refused(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes("写一首关于雨的诗 2024 年\n请把这句话翻译成英文。\n".encode(encoding) * 3)
    with pytest.raises(UsageError, match="UTF-16"):
        resolve([str(path)])


@pytest.mark.parametrize("content", [b"a\0b\nc\n", b"\0" * 40 + b"\nx\n", "é漢字 😀\n".encode(), b"x", b"\xff" * 50])
def test_other_text_is_not_taken_for_utf_16(tmp_path: Path, content: bytes) -> None:
    assert rows_of(tmp_path / "in.txt", content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "Git LFS pointer.*git lfs pull"),
        (bz2.compress(line(0)), "bzip2"),
        (lzma.compress(line(0)), "xz"),
        (b"PK\x03\x04abc", "zip"),
        (b"PAR1abcd", "Parquet: let its name end in .parquet"),
        (b'[{"prompt": "a"}, {"prompt": "b"}]', "one JSON array"),
        (b'[\n  {"prompt": "a"},\n  {"prompt": "b"}\n]\n', "one JSON array"),
        (b'\xef\xbb\xbf \n[ {"prompt": "a"},\r\n{"prompt": "b"}]', "one JSON array"),
        (b'{\n  "prompt": "a"\n}\n', "one JSON object over several lines"),
    ],
)
@pytest.mark.parametrize("name", ["in.jsonl", "-", "in.jsonl.gz"])
def test_what_is_no_jsonl_is_refused_by_name(tmp_path: Path, content: bytes, message: str, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(UsageError, match=f": is .*{message}"):
        _ = _rows_of_bytes(content) if name == "-" else rows_of(path)


@pytest.mark.parametrize("first", [b"[1]", b'[{"a": 1}]', b"{", b"[ERROR] log", b"}"])
def test_a_first_line_that_is_bad_costs_no_other(tmp_path: Path, first: bytes) -> None:
    rows = rows_of(tmp_path / "in.jsonl", first + b"\n" + line(1))
    assert [row.data for row in rows] == [{}, {"n": 1}]


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
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path in (a, b):
        path.write_bytes(line(0) + line(1))
    assert [(row.source, row.index) for row in read(resolve([str(b), str(a)]))] == [
        (str(b), 0),
        (str(b), 1),
        (str(a), 0),
        (str(a), 1),
    ]


def test_counting_lines_without_parsing_them(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    for content, expected in ((b"", 0), (b"{}\n", 1), (b"{}", 1), (b"{}\n{}", 2), (b"{}\n{}\n", 2)):
        path.write_bytes(content)
        assert resolve([str(path)])[0].count() == expected
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    assert resolve([str(tmp_path / "in.jsonl.gz")])[0].count() is None
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


def test_columns_of_all_types_arrive_as_plain_values_and_keep_their_digits(tmp_path: Path) -> None:
    berlin = pa.timestamp("ns", "Europe/Berlin")
    expected: dict[str, tuple[pa.Array, Any]] = {
        "time": (pa.array([datetime(2024, 1, 2, 3, 4, 5, tzinfo=timezone.utc)], pa.timestamp("us", "UTC")), "2024-01-02T03:04:05+00:00"),
        "nanos": (pa.array([1_234_567_890_123_456_789], pa.timestamp("ns")), "2009-02-13T23:31:30.123456789"),
        "zone": (pa.array([1_234_567_890_123_456_789], berlin), "2009-02-14T00:31:30.123456789+01:00"),
        "early": (pa.array([-1], pa.timestamp("ms")), "1969-12-31T23:59:59.999000"),
        "day": (pa.array([-719_162], pa.int32()).cast(pa.date32()), "0001-01-01"),
        "date64": (pa.array([86_400_000], pa.date64()), "1970-01-02"),
        "clock": (pa.array([86_399_999_999_999], pa.time64("ns")), "23:59:59.999999999"),
        "span": (pa.array([-90_000_000_001], pa.duration("ns")), "-PT90.000000001S"),
        "days": (pa.array([86_401], pa.duration("s")), "PT86401S"),
        "decimal": (pa.array([Decimal("1.10")]), "1.10"),
        "bytes": (pa.array([b"\x00\xff"]), b"\x00\xff"),
        "inf": (pa.array([[float("-inf"), 1.5]]), [float("-inf"), 1.5]),
        "half": (pa.array([1.5], pa.float16()), 1.5),
        "big": (pa.array([2**64 - 1], pa.uint64()), 2**64 - 1),
        "map": (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.timestamp("s"))), [["k", "1970-01-01T00:00:01"]]),
        "deep": (pa.array([[{"at": 1, "b": b"x"}]], pa.list_(pa.struct([("at", pa.time32("s")), ("b", pa.binary())]))), [{"at": "00:00:01", "b": b"x"}]),
        "null": (pa.array([None], pa.null()), None),
    }  # fmt: skip
    table = pa.table({name: array for name, (array, _) in expected.items()})
    (data,) = data_of(parquet(tmp_path / "in.parquet", table))
    assert data == {name: value for name, (_, value) in expected.items()}


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
    assert [row.data["id"] for row in rows] == [0, 1, 2]
    assert rows[1].data == {"id": 1, "odd": None}
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


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize(
    "text", ["один два\nтри\n", "مرحبا بك\nx\n", "中文 上\n第二\n" * 9000, "Ça va\n\U0001f600 b\n", "x"]
)
def test_text_of_any_script_in_two_or_four_bytes_is_named(tmp_path: Path, encoding: str, text: str) -> None:
    (tmp_path / "in.txt").write_bytes(text.encode(encoding))
    with pytest.raises(UsageError, match=f"is {encoding[:6].upper()}[BL]E text"):
        resolve([str(tmp_path / "in.txt")])


def test_a_nul_in_a_line_of_text_is_a_problem_of_its_row_only(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "in.txt", "één\n".encode() + b"t\0wo\nthree\n" + bytes(5000))
    assert [row.problem.kind if row.problem else None for row in rows] == [None, "invalid_utf8", None, "invalid_utf8"]


def test_what_is_compressed_twice_is_named(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(compressed(line(0), "zst")))
    with pytest.raises(UsageError, match="is compressed twice"):
        resolve([str(tmp_path / "in.jsonl.gz")])
