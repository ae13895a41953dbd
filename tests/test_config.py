from __future__ import annotations

import math
import pickle
from dataclasses import asdict, fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.config import (
    BenchConfig,
    EngineConfig,
    InputConfig,
    OutputConfig,
    PromptConfig,
    SamplingParams,
    TaskConfig,
)
from cbatch.errors import SettingError

EDGES: list[tuple[str, list[Any], list[Any]]] = [
    ("max_tokens", [1, 10**9, 10**30], [0, -1, "20", 1e9, True, math.nan]),
    ("temperature", [0, 0.0, 1e-6, 2, 100.0], [-0.1, math.nan, math.inf, 10**400, -(10**400), "1", True]),
    ("top_p", [0, 0.5, 1, 1.0], [-0.01, 1.01, math.nan, "0.5"]),
    ("top_k", [-1, 0, 1, 10**9], [-2, 0.5, 5.0, "1", False]),
    ("min_p", [0, 0.5, 1], [-0.01, 1.01, math.nan]),
    ("repetition_penalty", [1e-6, 1, 5.0], [0, -1.0, math.inf]),
    ("presence_penalty", [-2, 0, 2.0], [-2.01, 2.01, "0"]),
    ("frequency_penalty", [-2, 0, 2.0], [-2.01, 2.01, []]),
    ("stop", ["a", ["a", "b"], [], ("a",)], ["", [""], [1], 1, [["a"]], {"a": 1}, [None]]),
    ("stop_token_ids", [0, 5, [1, 2], []], [-1, [-1], "1", [1.0], [True]]),
    ("ignore_eos", [True, False], [1, 0, "true"]),
    ("min_tokens", [0, 5], [-1, 1.5, "1"]),
    ("seed", [0, -1, 2**64], [1.0, "7", True, []]),
]


def test_every_setting_has_its_edges_tested() -> None:
    assert [name for name, _, _ in EDGES] == [spec.name for spec in fields(SamplingParams)]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, good, _ in EDGES for value in good])
def test_values_inside_the_bounds_are_taken(name: str, value: Any) -> None:
    taken = getattr(SamplingParams(**{name: value}), name)
    if name in ("stop", "stop_token_ids"):
        assert taken == tuple(value if isinstance(value, (list, tuple)) else [value])
    else:
        assert taken == value


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, _, bad in EDGES for value in bad])
def test_values_outside_the_bounds_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must ") as caught:
        SamplingParams().override({name: value})
    assert len(str(caught.value)) < 200


def test_a_setting_has_one_field_and_may_have_other_names() -> None:
    for name in ("stop_token_ids", "stop_token_id"):
        assert SamplingParams().override({name: [7]}) == SamplingParams(stop_token_ids=(7,))
        with pytest.raises(SettingError, match=r"^stop_token_ids must be at least 0") as caught:
            SamplingParams().override({name: -1})
        assert caught.value.name == "stop_token_ids"
    both = {"stop_token_ids": [7], "stop_token_id": None}
    assert SamplingParams().override(both) == SamplingParams(stop_token_ids=(7,))
    with pytest.raises(SettingError, match=r"^stop_token_ids is given twice"):
        SamplingParams().override({**both, "stop_token_id": 7})


@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        (EngineConfig, "max_num_seqs", [0, 1.5, "4", True]),
        (EngineConfig, "kv_cache_memory", [-1, math.nan, math.inf, "1"]),
        (EngineConfig, "gpu_memory_utilization", [1.1, None]),
        (EngineConfig, "dtype", ["int8", None, 8]),
        (EngineConfig, "data_parallel_size", ["0", "two", 2]),
        (EngineConfig, "enable_prefix_caching", [1, "yes"]),
        (PromptConfig, "truncate", ["middle", True]),
        (PromptConfig, "template", ["", 1]),
        (PromptConfig, "system", ["\ud800", 1]),
        (TaskConfig, "max_failures", ["", "-1", "5 %", "1e2", "1.5", "%", "None", "9" * 19, 5]),
        (TaskConfig, "grace", [-0.1, math.inf]),
    ],
)
def test_all_settings_have_one_way_to_be_refused(kind: type, name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(SettingError) as caught:
            kind(**{name: value})
        assert caught.value.name == name
        assert str(caught.value) == f"{name} {caught.value.problem}"
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_null_leaves_a_setting_as_it_is() -> None:
    params = SamplingParams(max_tokens=7, seed=3, stop=("x",))
    assert params.override(dict.fromkeys(asdict(params))) == params


def test_an_unknown_setting_is_refused_even_if_null() -> None:
    with pytest.raises(ValueError, match="'max_token'"):
        SamplingParams().override({"max_token": None})


def test_an_override_changes_nothing_else_and_not_the_original() -> None:
    params = SamplingParams(temperature=0.5, stop=("x",))
    changed = params.override({"top_k": 4})
    assert {**asdict(params), "top_k": 4} == asdict(changed)
    assert params.top_k == 0


def test_a_whole_number_becomes_a_float_where_one_is_asked_for() -> None:
    assert type(SamplingParams(temperature=1).temperature) is float


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from([spec.name for spec in fields(SamplingParams)]), json_values)
def test_any_json_value_is_taken_or_refused_and_nothing_else(name: str, value: Any) -> None:
    try:
        params = SamplingParams().override({name: value})
    except ValueError:
        return
    assert SamplingParams(**asdict(params)) == params


def test_the_home_folder_may_be_written_as_a_tilde_in_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert InputConfig(inputs=("~/x.jsonl", "~", "a~", "./~/x")).inputs == (
        "/home/me/x.jsonl",
        "/home/me",
        "a~",
        "./~/x",
    )
    assert OutputConfig(output="~/x.jsonl").output == "/home/me/x.jsonl"
    assert EngineConfig(model="~/model").model == "/home/me/model"
    assert PromptConfig(template="@~/x.j2").template == "@/home/me/x.j2"
    assert PromptConfig(template="~{{ prompt }}\n~", system="~").template == "~{{ prompt }}\n~"
    bench = BenchConfig(
        python=("vllm=~/v/bin/python",), json="~/a.json", plot="~/b.html", openvino_model="~/c", workload="~/d.jsonl"
    )
    assert bench.python == ("vllm=/home/me/v/bin/python",)
    assert (bench.json, bench.plot) == ("/home/me/a.json", "/home/me/b.html")
    assert (bench.openvino_model, bench.workload) == ("/home/me/c", "/home/me/d.jsonl")


def test_a_home_folder_that_is_not_known_is_refused() -> None:
    with pytest.raises(SettingError, match="~nobody-here/x: no home folder is known for it"):
        OutputConfig(output="~nobody-here/x")
