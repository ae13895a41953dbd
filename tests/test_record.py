from __future__ import annotations

import io
import json
import re
from typing import Any

import orjson
import pyarrow.json as pj
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.errors import RowError
from cbatch.output.record import FIELDS, RecordShape, dumps
from cbatch.rows.request import Completion, Output, Row

BREAKS = ["\n", "\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\x00", "\x7f", "\u0091"]


def row(**data: Any) -> Row:
    return Row("in.jsonl", 3, "in.jsonl:4", data, 255)


def done(row: Row, finish_reason: str = "stop", **more: Any) -> Completion:
    return Completion(row, (Output("out", (5, 6), finish_reason),), num_prompt_tokens=9, **more)


def failed(row: Row, kind: str = "prompt_too_long") -> Completion:
    return Completion.failed(row, RowError(kind, "in.jsonl:4: no"))


# Lines


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=10,
)


@settings(deadline=None, max_examples=200)
@given(json_values)
def test_what_is_written_is_one_line_that_other_readers_read_back(value: Any) -> None:
    text = dumps(value)
    assert text.splitlines() == [text]
    assert json.loads(text) == value
    assert orjson.loads(text.encode()) == value


@pytest.mark.parametrize("character", BREAKS)
def test_what_may_end_a_line_is_escaped(character: str) -> None:
    text = dumps({"a" + character: "b" + character})
    assert len(text.splitlines()) == 1
    assert character not in text
    assert json.loads(text) == {"a" + character: "b" + character}


def test_other_characters_are_written_as_they_are() -> None:
    assert dumps("h\u00e9 \u6f22 \U0001f600") == '"h\u00e9 \u6f22 \U0001f600"'


def test_half_a_surrogate_pair_is_written_as_an_escape() -> None:
    assert dumps("a\ud83d").encode() == b'"a\\ud83d"'


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [float("-inf")], {"a": [1.5, float("nan")]}])
def test_numbers_json_does_not_have_are_null_or_kept_for_parquet(value: Any) -> None:
    text = dumps({"id": 2**60, "v": value, "b": b"\xff\x00"})
    assert orjson.loads(text)["id"] == 2**60
    assert orjson.loads(text)["b"] == "/wA="
    assert re.sub("NaN|-?Infinity", "null", dumps(value, keep_nan=True)) == dumps(value)
    assert repr(json.loads(dumps(value, keep_nan=True))) == repr(value)


def test_pyarrow_reads_a_file_of_good_and_failed_rows() -> None:
    shape = RecordShape()
    rows = [row(id=number, prompt="a\u2028b", tags=["x"], meta={"k": None}) for number in range(4)]
    records = [shape.record(done(given) if number else failed(given)) for number, given in enumerate(rows)]
    table = pj.read_json(io.BytesIO("".join(dumps(record) + "\n" for record in records).encode()))
    assert table.to_pylist() == records


# Records


def test_a_record_holds_the_columns_of_its_row_then_what_was_generated() -> None:
    data = {"id": 1.0, "prompt": "p", "odd": [None, {"a": 2**80}]}
    record = RecordShape().record(done(row(**data)))
    assert list(record) == [*data, *FIELDS]
    assert record == {
        **data,
        "completion": "out",
        "finish_reason": "stop",
        "prompt_tokens": 9,
        "completion_tokens": 2,
        "row": 3,
        "source": "in.jsonl",
        "error": None,
        "error_kind": None,
    }


@pytest.mark.parametrize("ident", ["a", 1, "1", 1.0, True, None, "", "a/../b", "x" * 10_000, ["a"], {"b": 1}])
def test_an_id_comes_back_with_its_type(ident: Any) -> None:
    found = json.loads(dumps(RecordShape().record(done(row(id=ident)))))["id"]
    assert (type(found), found) == (type(ident), ident)


def test_a_failed_row_can_not_be_taken_for_a_completion() -> None:
    record = RecordShape().record(failed(row(id=1, prompt="p")))
    assert record["completion"] is None
    assert record["finish_reason"] == "error"
    assert (record["error_kind"], record["error"]) == ("prompt_too_long", "in.jsonl:4: no")
    assert (record["id"], record["prompt"], record["row"]) == (1, "p", 3)


def test_a_prefix_goes_before_every_added_name() -> None:
    data = dict.fromkeys(FIELDS, "mine")
    record = RecordShape("my_").record(done(row(**data)))
    assert {name: record[name] for name in FIELDS} == data
    assert record["my_completion"] == "out"
    assert len(record) == 2 * len(FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_a_column_with_the_name_of_an_added_one_is_a_collision(name: str) -> None:
    with pytest.raises(RowError, match=f"in.jsonl:4: .*'{name}'") as caught:
        RecordShape().check(row(**{name: 1}))
    assert caught.value.kind == "column_collision"
    RecordShape("my_").check(row(**{name: 1}))
    with pytest.raises(RowError, match="my_" + name):
        RecordShape("my_").check(row(**{"my_" + name: 1}))


def test_a_collision_that_is_met_late_keeps_the_added_columns_and_the_rows_own() -> None:
    record = RecordShape().record(failed(row(id=1, row="mine"), "column_collision"))
    assert list(record) == ["id", "row", *(name for name in FIELDS if name != "row")]
    assert (record["id"], record["row"]) == (1, 3)


@pytest.mark.parametrize("prefix", ["", "my_"])
@pytest.mark.parametrize(
    "data",
    [
        {},
        {"prompt": "p"},
        {"custom_id": "x", "response": {"a": 1}},
        {"custom_id": "x", "body": {"messages": []}},
        {"response": 1, "custom_id": None, "error": "mine"},
    ],
)
def test_a_record_says_what_it_is_about(prefix: str, data: dict[str, Any]) -> None:
    if not prefix:
        data = {name: value for name, value in data.items() if name not in FIELDS}
    shape, given = RecordShape(prefix), row(**data)
    for completion, is_failed in ((done(given), False), (failed(given), True)):
        assert shape.key(json.loads(dumps(shape.record(completion)))) == ("in.jsonl", 3, is_failed)


@pytest.mark.parametrize("record", [{}, {"row": 1}, {"row": "1", "source": "s", "error": None}, [], 5, "x", None])
def test_what_is_no_record_is_about_nothing(record: Any) -> None:
    with pytest.raises((KeyError, TypeError)):
        RecordShape().key(record)


# OpenAI


def openai_row(**body: Any) -> Row:
    return row(custom_id="r-1", method="POST", url="/v1/chat/completions", body={"model": "m", **body}, note="n")


def test_a_chat_request_is_answered_in_openais_shape() -> None:
    record = RecordShape(model="ran").record(done(openai_row(), num_cached_tokens=8, finish_reason="length"))
    body = record["response"]["body"]
    assert record.keys() == {"id", "custom_id", "response", "error", "row", "source"}
    assert (record["custom_id"], record["error"], record["row"], record["source"]) == ("r-1", None, 3, "in.jsonl")
    assert record["response"]["status_code"] == 200
    assert (body["object"], body["model"]) == ("chat.completion", "ran")
    assert type(body["created"]) is int
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "out"}
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    assert body["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 2,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 8},
    }


def test_a_text_request_is_answered_with_a_text() -> None:
    body = RecordShape().record(done(openai_row(), chat=False))["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == "out"
    assert "message" not in body["choices"][0]


def test_a_request_that_failed_has_an_error_and_no_response() -> None:
    record = RecordShape("my_").record(failed(openai_row()))
    assert record["response"] is None
    assert record["error"] == {"code": "prompt_too_long", "message": "in.jsonl:4: no"}
    assert (record["my_row"], record["my_source"]) == (3, "in.jsonl")


def test_ids_of_answers_differ() -> None:
    first, other = openai_row(), Row("in.jsonl", 4, "in.jsonl:5", openai_row().data, 255)
    assert RecordShape().record(done(first))["id"] != RecordShape().record(done(other))["id"]


def test_without_openais_shape_a_request_is_a_row_like_others() -> None:
    record = RecordShape(openai=False).record(done(openai_row()))
    assert record["completion"] == "out"
    assert record["custom_id"] == "r-1"
