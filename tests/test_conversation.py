from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbatch.check import check
from cbatch.config import PromptConfig, SamplingParams
from cbatch.errors import OK, SOME_FAILED, RowError, UsageError
from cbatch.rows.inputs import resolve
from cbatch.rows.prompt import PromptBuilder
from cbatch.rows.reader import read
from cbatch.rows.request import Row
from tests.jobs import job_config, records, run_job, summary, write_rows
from tests.tiny import TEMPLATE, VOCAB_SIZE, make_tokenizer, save_model

USER = {"role": "user", "content": "Weather?"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"day": {"default": None}}}}}
CALLS = {
    "role": "assistant",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
WITH_TOOLS = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if thinking is defined and not thinking %}<no>{% endif %}{% endif %}"
)
DATED = "{{ strftime_now('%d %b %Y') }}" + TEMPLATE


def builder(template: str | None = WITH_TOOLS, **settings: Any) -> PromptBuilder:
    sampling = SamplingParams(seed=7)
    return PromptBuilder(PromptConfig(**settings), sampling, make_tokenizer(template), 2000, VOCAB_SIZE)


def row(**data: Any) -> Row:
    return Row("in.jsonl", 0, "in.jsonl:1", data, 5)


def refused(build: PromptBuilder, kind: str, **data: Any) -> str:
    with pytest.raises(RowError) as caught:
        build(row(**data))
    assert caught.value.kind == kind
    return str(caught.value)


def transformers_text(template: str, messages: list[dict[str, Any]], **settings: Any) -> str:
    """The conversation as transformers renders it."""
    return str(make_tokenizer(template).apply_chat_template(messages, tokenize=False, **settings))


# Beside the messages


def test_tools_and_template_kwargs_are_used() -> None:
    expected = transformers_text(WITH_TOOLS, [USER], tools=[TOOL], thinking=False, add_generation_prompt=True)
    assert '"default": null' in expected
    assert expected.endswith("<no>")
    beside: dict[str, Any] = {"tools": [TOOL], "chat_template_kwargs": {"thinking": False}}
    as_text = {name: json.dumps(value) for name, value in beside.items()}
    for data in (
        {"messages": [USER], **beside},
        {"messages": [USER], **as_text},
        {"custom_id": "1", "body": {"messages": [USER], **beside, "tool_choice": "auto", "parallel_tool_calls": True}},
    ):
        assert builder().render(row(**data)) == expected
    assert "<tools>" not in builder().render(row(messages=[USER], tools=[]))
    without = {"custom_id": "1", "body": {"messages": [USER], **beside, "tool_choice": "none"}}
    assert "<tools>" not in builder().render(row(**without))


def test_what_a_template_would_ignore_or_is_not_in_its_form_is_an_error() -> None:
    assert "takes no tools" in refused(builder(TEMPLATE), "template_error", messages=[USER], tools=[TOOL])
    wrong = refused(builder(), "template_error", messages=[USER], chat_template_kwargs={"thinkin": True})
    assert "takes no 'thinkin'; it takes thinking" in wrong
    refused(builder(), "template_error", messages=[USER], chat_template_kwargs={"messages": []})
    refused(builder(), "invalid_messages", messages=[USER], chat_template_kwargs=[1])
    for tools in ({"a": 1}, [1], [{"name": "f"}], "weather", [{"type": "function", "function": {}}]):
        refused(builder(), "invalid_messages", messages=[USER], tools=tools)
    request = {"custom_id": "1", "body": {"messages": [USER], "tools": [TOOL], "tool_choice": "required"}}
    refused(builder(), "invalid_params", **request)


def test_json_text_of_a_table_keeps_its_nulls(tmp_path: Path) -> None:
    pq.write_table(pa.table({"messages": [[USER]], "tools": [json.dumps([TOOL])]}), tmp_path / "in.parquet")
    (found,) = read(resolve([str(tmp_path / "in.parquet")]))
    assert '"default": null' in builder().render(found)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"day": null, "city": "Rome"}', '{"day": null, "city": "Rome"}'),
        ({"day": None}, '{"day": null}'),
        ("", "{}"),
        ("not JSON", '"not JSON"'),
        ("[1]", '"[1]"'),
    ],
)
def test_arguments_of_a_tool_call_are_an_object_for_the_template(arguments: Any, shown: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "sun"}]
    assert f"<|im_start|>assistant\n{shown}<|im_end|>" in builder().render(row(messages=messages))


def test_flat_tool_calls_have_objects_too() -> None:
    flat = WITH_TOOLS.replace("call.function.arguments", "(call.function or call).arguments").replace(
        "{{ (call", "{{ call.name if call.name }}{{ (call"
    )
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": '{"x": 1}'}]},
        {"role": "tool", "content": "sun"},
    ]
    assert '{"x": 1}' in builder(flat).render(row(messages=messages))


def test_nulls_with_which_a_table_fills_up_objects_reach_no_prompt(tmp_path: Path) -> None:
    calls = [
        {"function": {"name": "f", "arguments": {"day": 1}}},
        {"function": {"name": "g", "arguments": {"city": "x"}}},
    ]
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "sun"}]
    pq.write_table(pa.table({"messages": [messages]}), tmp_path / "in.parquet")
    (found,) = read(resolve([str(tmp_path / "in.parquet")]))
    assert builder().render(found) == builder().render(row(messages=messages))


@pytest.mark.parametrize(
    ("template", "messages", "left_out"),
    [
        (
            "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}",
            [USER, {"role": "developer", "content": "Be brief."}],
            "messages of role 'developer'",
        ),
        (TEMPLATE, [USER, CALLS, {"role": "tool", "content": "sun"}], "tool calls"),
        (
            WITH_TOOLS.replace("in messages", "in messages if m.role != 'tool'"),
            [USER, CALLS, {"role": "tool", "content": "sun"}],
            "messages of role 'tool'",
        ),
    ],
)
def test_a_part_that_the_template_leaves_out_is_an_error(
    template: str, messages: list[dict[str, Any]], left_out: str
) -> None:
    build = builder(template)
    for _ in range(2):  # the second time from memory
        assert f"leaves {left_out} out" in refused(build, "template_error", messages=messages)
    assert build(row(messages=[USER]))


# The last turn


def test_a_last_turn_of_the_assistants_is_continued() -> None:
    messages = [USER, {"role": "assistant", "content": "Sure, the list:\n- "}]
    expected = transformers_text(TEMPLATE, messages, continue_final_message=True)
    found = builder(TEMPLATE)(row(messages=messages))
    assert builder(TEMPLATE).render(row(messages=messages)) == expected
    assert found.remarks == ("continued",)
    assert expected.endswith("- ")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "content": "I"}],
        [{"role": "assistant", "content": "I"}, {"role": "assistant", "content": "am"}],
        [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
    ],
)
def test_a_conversation_that_leaves_nothing_to_answer_is_an_error(messages: list[dict[str, Any]]) -> None:
    refused(builder(), "invalid_messages", messages=messages)


def test_a_turn_that_the_template_changes_can_not_be_continued() -> None:
    drops = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    messages = [USER, {"role": "assistant", "content": "I"}]
    assert "can't be continued" in refused(builder(drops), "template_error", messages=messages)


def test_a_template_that_refuses_or_drops_system_messages_is_said_to_do_so() -> None:
    drops = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    raises = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + drops
    messages = [{"role": "system", "content": "Be brief."}, USER]
    assert "leaves messages of role 'system' out" in refused(builder(drops), "template_error", messages=messages)
    assert "no system role" in refused(builder(raises), "template_error", messages=messages)
    for template in (drops, raises):
        with pytest.raises(UsageError, match="--system"):
            builder(template, system="Be brief.")


# Jobs


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], str]:
    """Makes a model folder with a chat template; the test works in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda template: str(save_model(Path("model"), template=template))


def test_a_job_has_one_date_which_a_resume_keeps(
    model: Callable[[str | None], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Later:  # noqa: ARG003
            return cls(2031, 5, 6)

    settings = {"model": model(DATED), "max_tokens": 1}
    write_rows([{"prompt": "a"}, {"prompt": "b"}])
    assert run_job(**settings, output="out", date="2026-01-31", limit=1) == OK
    with pytest.raises(UsageError, match="date"):
        run_job(**settings, output="out", date="2026-02-01")
    monkeypatch.setattr("cbatch.rows.prompt.datetime", Later)
    assert run_job(**settings, output="out", progress="plain") == OK  # no --date: that of the first run
    assert "templates see the date 2026-01-31T00:00:00" in capsys.readouterr().err
    lengths = {record["prompt_tokens"] for record in records()}
    assert lengths == {len(make_tokenizer()("31 Jan 2026" + TEMPLATE_OF_ONE.format("a"))["input_ids"])}
    assert check(job_config(**settings)) == OK
    shown = capsys.readouterr().out
    assert "06 May 2031<|im_start|>user" in shown
    assert "Date        2031-05-06T00:00:00, which a template asks for" in shown


TEMPLATE_OF_ONE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("date", ["today", "2026-13-01", "31.1.2026", ""])
def test_a_date_that_is_none_is_refused(date: str) -> None:
    with pytest.raises(ValueError, match="date must be like 2026-01-31"):
        PromptConfig(date=date)


def test_a_manifest_without_a_date_goes_on(model: Callable[[str | None], str]) -> None:
    settings = {"model": model(DATED), "max_tokens": 1, "output": "out"}
    write_rows([{"prompt": "a"}, {"prompt": "b"}])
    assert run_job(**settings, limit=1) == OK
    manifest = Path("out/.cbatch/manifest.json")
    recorded = json.loads(manifest.read_text())
    del recorded["date"]
    manifest.write_text(json.dumps(recorded))
    assert run_job(**settings) == OK
    assert json.loads(manifest.read_text())["date"]


def test_conversations_for_a_model_without_a_template_are_refused_before_its_weights_are_read(
    model: Callable[[str | None], str],
) -> None:
    folder = model(None)
    shutil.copytree(folder, "other")
    for rows in ([{"messages": [USER]}], [{"custom_id": "1", "body": {"messages": [USER]}}]):
        write_rows(rows)
        for start in (lambda: run_job(model=folder, output="out"), lambda: check(job_config(model=folder))):
            with pytest.raises(UsageError, match="holds conversations, and model has no chat template"):
                start()
    write_rows([{"prompt": "a"}, {"messages": [USER]}])
    assert run_job(model=folder, output="out", max_tokens=1) == SOME_FAILED


def test_continued_conversations_are_counted(
    model: Callable[[str | None], str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows([{"messages": [USER, {"role": "assistant", "content": "It is"}]}, {"messages": [USER]}])
    folder = model(TEMPLATE)
    assert run_job(model=folder, output="out", max_tokens=1) == OK
    assert summary()["rows"]["remarks"] == {"continued": 1}
    assert check(job_config(model=folder)) == OK
    assert "1 ending with a turn of the assistant's, which is continued" in capsys.readouterr().out


def test_a_template_over_openai_requests_is_refused_before_the_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows([{"custom_id": "1", "body": {"messages": [USER]}}])
    for settings in ({"template": "{{ custom_id }}"}, {"prompt_column": "custom_id"}):
        for start in (lambda: run_job(**settings, output="out"), lambda: check(job_config(**settings))):  # noqa: B023
            with pytest.raises(UsageError, match=r"in.jsonl: an OpenAI request has its prompt in its body"):
                start()
