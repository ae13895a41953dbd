from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.output.record import dumps
from cbatch.rows.json_object import parse_object


def read(text: str) -> dict[str, Any]:
    """The columns of a line without fault."""
    columns, problem = parse_object(text)
    assert problem is None
    return columns


def test_nesting_up_to_the_limit_passes_through_every_stage() -> None:
    text = '{"a": ' + '{"b": ' * 99 + "[" * 99 + '"\\ud800"' + "]" * 99 + "}" * 99 + "}"
    assert len(dumps(read(text))) > 500


def test_many_brackets_that_are_not_nested_are_fine() -> None:
    assert len(read('{"a": [' + "[]," * 5000 + '{}], "b": "' + "[{" * 5000 + '"}')["a"]) == 5001


def test_numbers_keep_their_value() -> None:
    text = '{"big": 123456789012345678901234567890, "small": -0.0, "int": 1, "float": 1.0, "tiny": 5e-324}'
    assert json.dumps(read(text)) == text


def test_the_last_of_equal_keys_counts() -> None:
    assert read('{"a": 1, "a": 2}') == {"a": 2}


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
    assert read(line) == {"prompt": text, "id": text, "m": [{"k": [text]}], text: 1}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=10,
)


@settings(deadline=None, max_examples=150)
@given(st.dictionaries(st.text(max_size=5), json_values, max_size=5), st.booleans())
def test_any_object_is_read_as_the_standard_library_reads_it(value: dict[str, Any], ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert read(text) == json.loads(text) == value


@pytest.mark.parametrize(
    "value",
    ["NaN", "[1, NaN]", '{"x": -Infinity}', "1e999", "-" + "9" * 400, "9" * 5000, "[" * 200 + "]" * 200],
)
def test_a_fault_in_one_column_leaves_the_others(value: str) -> None:
    columns, problem = parse_object(f'{{"id": 7, "odd": {value}, "text": "\\ud800"}}')
    assert problem
    assert problem.kind == "invalid_json"
    assert (columns["id"], columns["text"]) == (7, "\ufffd")
    assert json.dumps(columns["odd"], allow_nan=False) in ("null", "[1, null]", '{"x": null}')
