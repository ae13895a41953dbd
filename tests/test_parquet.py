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

from cbatch.errors import RowError, UsageError
from cbatch.output import parquet
from cbatch.output.record import FIELDS, RecordShape
from cbatch.rows.inputs import resolve
from cbatch.rows.reader import read
from cbatch.rows.request import Completion, Output


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


def test_columns_of_a_parquet_input_keep_their_type_or_become_text(tmp_path: Path) -> None:
    structs = [{"role": "user", "content": "x", "n": 1}, {"role": "b", "content": None, "n": None}]
    source = table(
        tmp_path / "in.parquet",
        large=pa.array(["a", None], pa.large_string()),
        dictionary=pa.array(["a", "b"]).dictionary_encode(),
        view=pa.array(["a", "b"], pa.string_view()),
        small=pa.array([1, None], pa.int8()),
        big=pa.array([2**64 - 1, 0], pa.uint64()),
        half=pa.array([1.5, None], pa.float16()),
        single=pa.array([0.1, float("nan")], pa.float32()),
        flag=pa.array([True, None]),
        messages=pa.array([structs, []]),
        fixed=pa.array([[1, 2], None], pa.list_(pa.int32(), 2)),
        decimal=pa.array([Decimal("1.10"), None]),
        times=pa.array([[datetime(2024, 1, 2, 3, 4)], []], pa.list_(pa.timestamp("ms"))),
        day=pa.array([date(2024, 1, 2), None]),
        binary=pa.array([b"\x00", None]),
        pairs=pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
        deep=pa.array([[{"m": [("k", b"v")]}], None], pa.list_(pa.struct({"m": pa.map_(pa.string(), pa.binary())}))),
        nothing=pa.array([None, None], pa.null()),
    )
    records, out = convert(tmp_path, source)
    assert list(parquet.read_records(out)) == records
    kept = {"small": pa.int8(), "big": pa.uint64(), "half": pa.float16(), "single": pa.float32(), "flag": pa.bool_()}
    assert {name: type_of(out, name) for name in kept} == kept
    assert type_of(out, "messages").value_type.field("n").type == pa.int64()
    assert type_of(out, "times").value_type == pa.string()
    texts = ("large", "dictionary", "view", "decimal", "day", "binary", "pairs", "deep", "nothing")
    assert all(type_of(out, name) == pa.string() for name in texts)
    assert pq.read_table(out)["pairs"].to_pylist() == ['[["k", 1]]', None]


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
