from __future__ import annotations

import json
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.errors import SOME_FAILED, RowError, UsageError
from cbatch.output import parquet
from cbatch.output.column_types import common_type
from cbatch.output.record import FIELDS, RecordShape
from cbatch.rows.inputs import resolve
from cbatch.rows.reader import read
from cbatch.rows.request import Completion, Output
from tests.jobs import run_job
from tests.tiny import save_model


def convert(folder: Path, *inputs: Path) -> tuple[list[dict[str, Any]], Path]:
    """The records of a job over `inputs` where every third row fails, and the Parquet file they were written to."""
    sources, shape = resolve([str(path) for path in inputs]), RecordShape(openai=False)
    schema = parquet.schema_of(sources, RecordShape())
    records = [
        shape.record(
            Completion.failed(row, row.problem or RowError("template_error", "no"))
            if number % 3 == 2 or row.problem
            else Completion(row, (Output(f"out {number}", (1, 2), "stop"),), num_prompt_tokens=3)
        )
        for number, row in enumerate(read(sources))
    ]
    out = folder / "out.parquet"
    parquet.write(out, records, schema)
    return records, out


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def table(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def type_of(out: Path, name: str) -> pa.DataType:
    return pq.read_schema(out).field(name).type


def test_columns_of_every_kind_come_back_whole(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": 1, "text": None, "flag": True, "score": 0.5, "meta": {"lang": None}, "tags": [], "none": None},
        {"id": 2, "text": "x", "flag": None, "score": None, "meta": {"lang": "en"}, "tags": ["a"], "none": None},
        {"id": 3, "text": "\u2028\U0001f600", "flag": False, "score": -1e300, "meta": None, "tags": [1, "b"]},
        *({"id": number} for number in range(4, 1200)),
        {"id": 2**63 - 1, "late": "here", "mixed": 1},
        {"id": -(2**63), "late": None, "mixed": 1.5},
        {"id": 0, "late": "again", "mixed": "text"},
    ]
    records, out = convert(tmp_path, jsonl(tmp_path / "in.jsonl", rows))
    columns = list(dict.fromkeys(name for row in rows for name in row)) + list(FIELDS)
    full = [{name: record.get(name) for name in columns} for record in records]
    assert list(parquet.read_records(out)) == full
    assert pq.read_schema(out).names == columns
    kinds = {"id": pa.int64(), "text": pa.string(), "flag": pa.bool_(), "score": pa.float64(), "late": pa.string()}
    added = {"prompt_tokens": pa.int64(), "row": pa.int64(), "error": pa.string(), "completion": pa.string()}
    assert {name: type_of(out, name) for name in kinds | added} == kinds | added
    assert all(type_of(out, name) == pa.string() for name in ("meta", "tags", "mixed", "none"))


def test_nested_and_mixed_columns_hold_json_text(tmp_path: Path) -> None:
    rows = [{"a": {"k": [1]}, "b": 1}, {"a": None, "b": "1"}, {"b": 2**70}]
    _, out = convert(tmp_path, jsonl(tmp_path / "in.jsonl", rows))
    stored = pq.read_table(out).to_pylist()
    assert [record["a"] for record in stored] == ['{"k": [1]}', None, None]
    assert [record["b"] for record in stored] == ["1", '"1"', str(2**70)]


def test_other_libraries_read_the_file(tmp_path: Path) -> None:
    records, out = convert(tmp_path, jsonl(tmp_path / "in.jsonl", [{"id": n, "prompt": f"p{n}"} for n in range(7)]))
    frame = pd.read_parquet(out)
    assert frame["completion"].isna().tolist() == [record["completion"] is None for record in records]
    assert frame["id"].tolist() == list(range(7))
    loaded = datasets.Dataset.from_parquet(str(out), cache_dir=str(tmp_path / "cache"))
    assert loaded.to_list() == records


def test_the_types_do_not_depend_on_which_rows_come_first(tmp_path: Path) -> None:
    rows = [{"a": None}, {"a": "x", "b": 1}, {"c": 0.5, "b": None}, {"c": {}}]
    for turn in range(len(rows)):
        source = jsonl(tmp_path / f"{turn}.jsonl", rows[turn:] + rows[:turn])
        _, out = convert(tmp_path, source)
        assert [type_of(out, name) for name in "abc"] == [pa.string(), pa.int64(), pa.string()]


EVERY_TYPE = {
    "large": pa.array(["a", None], pa.large_string()),
    "view": pa.array(["a", "b"], pa.string_view()),
    "small": pa.array([1, None], pa.int8()),
    "big": pa.array([2**64 - 1, 0], pa.uint64()),
    "half": pa.array([1.5, None], pa.float16()),
    "single": pa.array([0.1, float("nan")], pa.float32()),
    "double": pa.array([float("-inf"), float("inf")]),
    "flag": pa.array([True, None]),
    "turns": pa.array([[{"role": "user", "content": None, "n": 1}], []]),
    "fixed": pa.array([[1, 2], None], pa.list_(pa.int32(), 2)),
    "lists": pa.array([[["x"], None], None], pa.large_list(pa.list_(pa.string()))),
    "decimal": pa.array([Decimal("1.10"), None]),
    "wide": pa.array([Decimal("-" + "9" * 50 + ".25"), None], pa.decimal256(60, 2)),
    "times": pa.array([[datetime(2024, 1, 2, 3, 4)], []], pa.list_(pa.timestamp("ms"))),
    "nanos": pa.array([1_234_567_890_123_456_789, -1], pa.timestamp("ns")),
    "micros": pa.array([-1, None], pa.timestamp("us", "UTC")),
    "zone": pa.array([1_700_000_000_123, 0], pa.timestamp("ms", "Europe/Berlin")),
    "before_zones": pa.array([-3_000_000_000_000, 0], pa.timestamp("ms", "Europe/Berlin")),
    "offset": pa.array([1, 2], pa.timestamp("ns", "-09:30")),
    "day": pa.array([date(1, 1, 1), date(9999, 12, 31)]),
    "clock": pa.array([86_399_999_999_999, 1], pa.time64("ns")),
    "clock32": pa.array([1, None], pa.time32("ms")),
    "span": pa.array([-90_000_000_001, 1], pa.duration("ns")),
    "binary": pa.array([b"\x00\xff", None]),
    "large_binary": pa.array([b"text", b""], pa.large_binary()),
    "four": pa.array([b"abcd", None], pa.binary(4)),
    "pairs": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
    "deep": pa.array([[{"m": [("k", b"v")]}], None], pa.list_(pa.struct({"m": pa.map_(pa.string(), pa.binary())}))),
}


def test_columns_of_a_parquet_input_keep_type_and_value(tmp_path: Path) -> None:
    given = pq.read_table(table(tmp_path / "in.parquet", **EVERY_TYPE))
    _, out = convert(tmp_path, tmp_path / "in.parquet")
    found = pq.read_table(out).select(given.column_names)
    assert found.schema.types == given.schema.types
    for name in given.column_names:
        assert repr(found[name].to_pylist()) == repr(given[name].to_pylist()), name


@pytest.mark.parametrize("settings", [{}, {"ordered": True}])
def test_types_and_values_survive_the_growing_shard_and_a_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = save_model(tmp_path / "model")
    prompts = pa.array(["the rain", None])
    given = pq.read_table(table(tmp_path / "in.parquet", prompt=prompts, **EVERY_TYPE))
    for again in ({}, {"retry_failed": True}):
        job = {"model": str(model), "output": "out", "format": "parquet", "max_tokens": 2, **settings, **again}
        assert run_job("in.parquet", **job) == SOME_FAILED
        shards = [pq.read_table(path) for path in Path("out").glob("*.parquet")]
        found = sorted((row for shard in shards for row in shard.to_pylist()), key=lambda row: row["row"])
        assert [row["error_kind"] for row in found] == [None, "invalid_prompt"]
        assert all(shard.select(given.column_names).schema.types == given.schema.types for shard in shards)
        for name in given.column_names:
            assert repr([row[name] for row in found]) == repr(given[name].to_pylist()), name


def test_dictionaries_have_the_type_of_their_values(tmp_path: Path) -> None:
    moments = pa.array([1, 2], pa.timestamp("us"))
    codes = {
        "text": pa.array(["a", None]).dictionary_encode(),
        "at": moments.dictionary_encode(),
        "nothing": pa.nulls(2),
    }
    records, out = convert(tmp_path, table(tmp_path / "in.parquet", **codes))
    assert [type_of(out, name) for name in codes] == [pa.string(), pa.timestamp("us"), pa.string()]
    assert pq.read_table(out)["at"].to_pylist() == moments.to_pylist()
    assert list(parquet.read_records(out)) == records


@pytest.mark.parametrize(
    ("first", "second", "common"),
    [
        (pa.int32(), pa.int64(), pa.int64()),
        (pa.int8(), pa.uint8(), pa.int16()),
        (pa.uint32(), pa.int32(), pa.int64()),
        (pa.uint64(), pa.int64(), None),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.int16(), pa.float32(), pa.float32()),
        (pa.int32(), pa.float32(), pa.float64()),
        (pa.int64(), pa.float64(), None),
        (pa.string(), pa.large_string(), pa.string()),
        (pa.binary(), pa.binary(3), pa.binary()),
        (pa.timestamp("s"), pa.timestamp("us"), pa.timestamp("us")),
        (pa.timestamp("us"), pa.timestamp("ns"), None),
        (pa.timestamp("us"), pa.timestamp("us", "UTC"), None),
        (pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.int64())),
        (pa.struct({"a": pa.int32()}), pa.struct({"a": pa.int64(), "b": pa.bool_()}), pa.struct({"a": pa.int64(), "b": pa.bool_()})),
        (pa.null(), pa.date32(), pa.date32()),
        (pa.bool_(), pa.int8(), None),
    ],
)  # fmt: skip
def test_inputs_that_differ_have_the_type_that_holds_both_exactly(
    first: pa.DataType, second: pa.DataType, common: pa.DataType | None
) -> None:
    assert common_type(first, second) == common
    assert common_type(second, first) == common


def test_ids_of_two_files_widen(tmp_path: Path) -> None:
    inputs = [
        table(tmp_path / "a.parquet", id=pa.array([1, 2], pa.int32()), v=pa.array([1, None], pa.int64())),
        table(tmp_path / "b.parquet", id=pa.array([2**40]), v=pa.array([float("nan")])),
        jsonl(tmp_path / "c.jsonl", [{"id": -(2**63)}]),
    ]
    _, out = convert(tmp_path, *inputs)
    assert type_of(out, "id") == pa.int64()
    assert pq.read_table(out)["id"].to_pylist() == [1, 2, 2**40, -(2**63)]
    assert pq.read_table(out)["v"].to_pylist() == ["1", None, "null", None]


def test_a_row_that_can_not_be_read_has_null_columns(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": 1, "flag": true}\n{broken\n{"id": 2, "flag": false}\n')
    _, out = convert(tmp_path, path)
    stored = pq.read_table(out).to_pylist()
    assert [record["id"] for record in stored] == [1, None, 2]
    assert [record["error_kind"] for record in stored] == [None, "invalid_json", "template_error"]


def test_several_inputs_share_one_schema(tmp_path: Path) -> None:
    inputs = [
        jsonl(tmp_path / "a.jsonl", [{"id": 1, "only_a": "x", "none": None, "meta": {"a": 1}}]),
        table(tmp_path / "b.parquet", id=pa.array(["one"]), only_b=pa.array([1.5]), none=pa.array([3])),
        jsonl(tmp_path / "c.jsonl", [{"meta": "text"}]),
    ]
    records, out = convert(tmp_path, *inputs)
    names = pq.read_schema(out).names
    assert list(parquet.read_records(out)) == [{name: record.get(name) for name in names} for record in records]
    assert type_of(out, "none") == pa.int64()


def test_text_files_have_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_text("one\ntwo\n")
    records, out = convert(tmp_path, path)
    assert list(parquet.read_records(out)) == records


def test_a_saved_dataset(tmp_path: Path) -> None:
    features = datasets.Features(
        {"grid": datasets.Array2D((1, 2), "int64"), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    saved = datasets.Dataset.from_dict({"grid": [[[1, 2]], [[3, 4]]], "label": [0, 1]}, features=features)
    saved.save_to_disk(str(tmp_path / "saved"))
    records, out = convert(tmp_path, tmp_path / "saved")
    assert list(parquet.read_records(out)) == records
    assert [record["grid"] for record in records] == [[[1, 2]], [[3, 4]]]


def test_no_rows_give_a_readable_file_with_all_columns(tmp_path: Path) -> None:
    _, out = convert(tmp_path, table(tmp_path / "in.parquet", prompt=pa.array([], pa.string())))
    assert pq.read_table(out).num_rows == 0
    assert pq.read_schema(out).names == ["prompt", *FIELDS]
    (tmp_path / "empty.jsonl").touch()
    assert pq.read_schema(convert(tmp_path, tmp_path / "empty.jsonl")[1]).names == list(FIELDS)


def test_a_collision_is_found_even_in_the_last_row(tmp_path: Path) -> None:
    sources = resolve([str(jsonl(tmp_path / "in.jsonl", [{"prompt": "x"}] * 50 + [{"source": "mine"}]))])
    with pytest.raises(UsageError, match="'source'"):
        parquet.schema_of(sources, RecordShape())
    assert parquet.schema_of(sources, RecordShape("my_")).names[:2] == ["prompt", "source"]


def test_standard_input_can_not_be_looked_through() -> None:
    with pytest.raises(UsageError, match="standard input"):
        parquet.schema_of(resolve(["-"]), RecordShape())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, max_examples=75)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), json_values), max_size=6))
def test_every_value_of_any_jsonl_comes_back(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("any")
    records, out = convert(folder, jsonl(folder / "in.jsonl", rows))
    names = pq.read_schema(out).names
    found = [json.dumps(record) for record in parquet.read_records(out)]
    assert found == [json.dumps({name: record.get(name) for name in names}) for record in records]
