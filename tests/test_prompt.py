from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers.processors import TemplateProcessing

from cbatch.config import PromptConfig, SamplingParams
from cbatch.errors import RowError, SettingError, UsageError
from cbatch.rows.inputs import resolve
from cbatch.rows.prompt import PromptBuilder
from cbatch.rows.reader import read
from cbatch.rows.request import Row
from tests.tiny import TEMPLATE, VOCAB_SIZE, make_tokenizer

CONTEXT = 200


def builder(
    chat_template: str | None = TEMPLATE, tokenizer: Any = None, sampling: SamplingParams | None = None, **settings: Any
) -> PromptBuilder:
    tokenizer = tokenizer or make_tokenizer(chat_template)
    context = settings.pop("context", CONTEXT)
    return PromptBuilder(PromptConfig(**settings), sampling or SamplingParams(seed=7), tokenizer, context, VOCAB_SIZE)


def row(number: int = 0, source: str = "in.jsonl", **data: Any) -> Row:
    return Row(source, number, f"{source}:{number + 1}", data, 5)


def kind_of(build: PromptBuilder, bad: Row) -> str:
    with pytest.raises(RowError) as caught:
        build(bad)
    assert str(caught.value).startswith(f"{bad.where}: ")
    return caught.value.kind


def chat(*turns: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


# Where the prompt is


def test_a_text_is_a_user_message_if_the_model_has_a_chat_template() -> None:
    assert builder().render(row(prompt="hi")) == chat(("user", "hi"))
    assert builder(chat_template=None).render(row(prompt="hi")) == "hi"
    assert builder(chat=False).render(row(prompt="hi")) == "hi"
    assert builder()(row(prompt="hi")).chat
    assert not builder(chat=False)(row(prompt="hi")).chat


def test_messages_go_through_the_chat_template_even_when_texts_do_not() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    for build in (builder(), builder(chat=False)):
        assert build.render(row(messages=messages)) == chat(("system", "s"), ("user", "u"))
        assert build.render(row(prompt=messages)) == chat(("system", "s"), ("user", "u"))


def test_token_ids_are_taken_as_they_are() -> None:
    for given in (row(token_ids=[5, 6, 7]), row(prompt=[5, 6, 7])):
        assert builder()(given).token_ids == [5, 6, 7]


def test_the_prompt_column_that_is_named_is_the_only_one() -> None:
    build = builder(chat=False, prompt_column="question")
    assert build.render(row(question="q", prompt="p", messages=[], token_ids=[9])) == "q"
    assert kind_of(build, row(question=None, token_ids=[9])) == "invalid_prompt"
    assert kind_of(build, row(prompt="p")) == "missing_prompt"


@pytest.mark.parametrize("others", [{"messages": [{"role": "user", "content": "x"}]}, {"token_ids": [9]}])
def test_two_prompts_in_one_row_are_an_error_until_one_is_named(others: dict[str, Any]) -> None:
    both = {"prompt": "p", **others}
    with pytest.raises(RowError, match=r"columns 'prompt' and '.*' both hold a prompt; say with --prompt-column"):
        builder()(row(**both))
    assert builder(prompt_column="prompt").render(row(**both)) == chat(("user", "p"))
    assert builder().render(row(**{**both, **dict.fromkeys(others)})) == chat(("user", "p"))


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ({}, "missing_prompt"),
        ({"text": "a"}, "missing_prompt"),
        ({"prompt": None}, "invalid_prompt"),
        ({"prompt": 5}, "invalid_prompt"),
        ({"prompt": {"a": 1}}, "invalid_prompt"),
        ({"prompt": True}, "invalid_prompt"),
        ({"prompt": ""}, "empty_prompt"),
        ({"prompt": []}, "empty_prompt"),
        ({"token_ids": []}, "empty_prompt"),
        ({"messages": []}, "empty_prompt"),
        ({"token_ids": [-1]}, "invalid_prompt"),
        ({"token_ids": [VOCAB_SIZE]}, "invalid_prompt"),
        ({"token_ids": [1.0]}, "invalid_messages"),
        ({"token_ids": [True]}, "invalid_messages"),
        ({"token_ids": "text"}, "invalid_prompt"),
        ({"messages": "text"}, "invalid_prompt"),
        ({"messages": '[{"role": "user", "content": "x"}]'}, "invalid_prompt"),
        ({"messages": {"role": "user", "content": "x"}}, "invalid_prompt"),
        ({"prompt": ["a", "b"]}, "invalid_messages"),
        ({"body": {"messages": []}}, "missing_prompt"),
    ],
)
def test_what_can_not_be_a_prompt_is_an_error_of_its_row(data: dict[str, Any], kind: str) -> None:
    assert kind_of(builder(chat=False), row(**data)) == kind


def test_a_space_is_a_prompt() -> None:
    assert builder(chat=False).render(row(prompt=" ")) == " "


def test_an_empty_text_in_a_conversation_still_has_the_tokens_of_the_template() -> None:
    assert builder().render(row(prompt="")) == chat(("user", ""))


def test_a_row_that_could_not_be_read_keeps_its_own_problem() -> None:
    problem = RowError("invalid_json", "in.jsonl:1: not valid JSON")
    with pytest.raises(RowError) as caught:
        builder()(Row("in.jsonl", 0, "in.jsonl:1", {}, 5, problem))
    assert caught.value is problem


# Messages

PARTS: list[tuple[Any, str]] = [
    ("text", "text"),
    ("", ""),
    ([{"type": "text", "text": "one"}], "one"),
    ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo"),
    ([{"text": "one"}], "one"),
]


@pytest.mark.parametrize(("content", "expected"), PARTS)
def test_text_parts_are_joined_by_newlines(content: Any, expected: str) -> None:
    assert builder().render(row(messages=[{"role": "user", "content": content}])) == chat(("user", expected))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": 5},
        {"role": "user", "content": {"text": "x"}},
        {"role": "user", "content": ["x"]},
        {"role": "user", "content": [{"type": "image", "url": "x"}]},
        {"role": "user", "content": [{"type": "text", "text": None}]},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"content": "x"},
        {"role": None, "content": "x"},
        {"role": 1, "content": "x"},
        "x",
        None,
        [],
    ],
)
def test_a_message_without_text_is_an_error_of_its_row(message: Any) -> None:
    assert kind_of(builder(), row(messages=[{"role": "user", "content": "x"}, message])) == "invalid_messages"


TOOLS_TEMPLATE = (
    "{% for m in messages %}{{ m.keys() | list | sort | join(',') }}|{{ m['role'] }}|"
    "{% if 'content' in m %}{{ m['content'] }}{% endif %}"
    "{% for call in m.get('tool_calls', []) %}{{ call | tojson }}{% endfor %};{% endfor %}"
)


def test_a_tool_call_may_have_no_content() -> None:
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = {"role": "tool", "content": "5"}
    text = builder(TOOLS_TEMPLATE).render(row(messages=[message, answer]))
    assert text == f"content,role,tool_calls|assistant|{json.dumps(call)};content,role|tool|5;"


def test_jsonl_and_parquet_give_the_same_prompt_ids(tmp_path: Path) -> None:
    user: dict[str, Any] = {"role": "user", "content": "weather?"}
    conversations = [
        [user],
        [{"role": "system", "content": "s", "name": "n"}, user],
        [
            user,
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"city": "Rome"}}}]},
            {"role": "tool", "content": "sun", "tool_call_id": "1"},
        ],
        [
            user,
            {"role": "assistant", "tool_calls": [{"function": {"name": "g", "arguments": {"day": 1}}, "id": "2"}]},
            {"role": "tool", "content": "rain"},
        ],
    ]
    parts = [[{"role": "user", "content": content}] for content, _ in PARTS if isinstance(content, list)]
    image = [[{"role": "user", "content": [{"type": "image", "url": "u"}]}]]
    build = builder(TOOLS_TEMPLATE, context=4000)
    for name, rows, bad in (("plain", conversations, 0), ("parts", parts + image, 1)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
        pq.write_table(pa.table({"messages": rows}), tmp_path / f"{name}.parquet")
        results = [
            [_ids_or_kind(build, found) for found in read(resolve([str(tmp_path / f"{name}.{suffix}")]))]
            for suffix in ("jsonl", "parquet")
        ]
        assert results[0] == results[1]
        assert sum(isinstance(result, str) for result in results[0]) == bad


def _ids_or_kind(build: PromptBuilder, found: Row) -> list[int] | str:
    try:
        return build(found).token_ids
    except RowError as error:
        return error.kind


STRICT = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system turns here') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns must alternate') }}{% endif %}"
    "{{ m['content'] }}{% endfor %}"
)


def test_what_the_chat_template_refuses_is_an_error_of_its_row_in_the_templates_words() -> None:
    build, user = builder(STRICT), {"role": "user", "content": "hi"}
    assert build.render(row(messages=[user])) == "hi"
    for messages, words in (
        ([{"role": "system", "content": "s"}, user], "no system turns here"),
        ([user, user], "turns must alternate"),
        ([{"role": "tool", "content": "t"}], "turns must alternate"),
    ):
        with pytest.raises(RowError, match=words) as caught:
            build(row(3, messages=messages))
        assert caught.value.kind == "template_error"
        assert str(caught.value).startswith("in.jsonl:4: ")


def test_messages_for_a_model_without_a_template_are_an_error_of_their_row() -> None:
    assert kind_of(builder(chat_template=None), row(messages=[{"role": "user", "content": "x"}])) == "invalid_prompt"


def test_the_row_itself_is_not_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}], "name": None}]
    original = row(messages=messages)
    before = json.dumps(original.data)
    builder(system="s")(original)
    assert json.dumps(original.data) == before


# BOS


def bos_tokenizer(template: str | None = None) -> Any:
    """A tokenizer that puts BOS before every text it encodes."""
    tokenizer = make_tokenizer(template)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    return tokenizer


def test_a_conversation_has_exactly_the_bos_of_its_template() -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    build = builder(tokenizer=bos_tokenizer(template))
    for chat_row in (row(prompt="ab"), row(messages=[{"role": "user", "content": "ab"}])):
        assert build(chat_row).token_ids.count(1) == 1
        assert build.render(chat_row) == "<|im_start|>ab"


@pytest.mark.parametrize(
    ("prompt", "number"), [("ab", 1), ("<|im_start|>ab", 1), ("<|im_start|><|im_start|>ab", 3), ("", 1)]
)
def test_a_raw_text_gets_the_bos_its_tokenizer_adds_but_not_a_second_one(prompt: str, number: int) -> None:
    ids = builder(tokenizer=bos_tokenizer())(row(prompt=prompt)).token_ids
    assert ids[:number] == [1] * number
    assert ids.count(1) == number


def test_a_raw_text_keeps_its_own_bos_where_the_tokenizer_adds_none() -> None:
    assert builder(chat=False)(row(prompt="<|im_start|>ab")).token_ids.count(1) == 1


# --system and --template


def test_the_system_message_goes_before_conversations_that_have_none() -> None:
    build = builder(system="Be brief.")
    assert build.render(row(prompt="hi")) == chat(("system", "Be brief."), ("user", "hi"))
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    assert build.render(row(messages=own)) == chat(("system", "own"), ("user", "hi"))
    assert build(row(token_ids=[5])).token_ids == [5]
    assert builder(system="").render(row(prompt="hi")) == chat(("system", ""), ("user", "hi"))


def test_settings_that_contradict_the_model_are_refused() -> None:
    unfit: list[dict[str, Any]] = [{"system": "s"}, {"chat": True}]
    for settings in unfit:
        with pytest.raises(UsageError, match="no chat template"):
            builder(chat_template=None, **settings)
    with pytest.raises(SettingError, match=r"system .* --raw"):
        builder(system="s", chat=False)
    for name in ("system", "template"):
        broken: dict[str, Any] = {name: "a\udcff"}
        with pytest.raises(SettingError, match=f"{name} is not valid UTF-8"):
            builder(**broken)


@pytest.mark.parametrize("inline", [True, False])
def test_a_template_makes_the_prompt_of_all_columns(tmp_path: Path, inline: bool) -> None:
    text = "To {{ language | upper }}: {{ text }}{% for tag in tags %} #{{ tag.name }}{% endfor %}"
    path = tmp_path / "template.txt"
    path.write_text(text + " \u00fc", encoding="utf-8")
    data: dict[str, Any] = {
        "prompt": "ignored",
        "messages": [],
        "text": "h\u00e9",
        "language": "en",
        "tags": [{"name": "x"}],
    }
    build = builder(template=text + " \u00fc" if inline else f"@{path}")
    assert build.render(row(**data)) == chat(("user", "To EN: h\u00e9 #x \u00fc"))


@pytest.mark.parametrize(
    "template",
    ["{{ missing }}", "{{ null }}", "{{ a.b.c }}", "{{ 1 / 0 }}", "{{ a + 1 }}", "{{ a.__class__.__mro__ }}"],
)
def test_a_template_that_fails_for_a_row_is_an_error_of_that_row(template: str) -> None:
    build = builder(template=template)
    assert kind_of(build, row(a="x", null=None)) == "template_error"


def test_an_undefined_column_is_named() -> None:
    with pytest.raises(RowError, match="'missing'"):
        builder(template="{{ missing }}")(row(a="x"))


def test_a_template_may_ask_whether_a_column_is_there() -> None:
    build = builder(template="{% if a is defined and a %}{{ a }}{% else %}none{% endif %}", chat=False)
    assert [build.render(case) for case in (row(a="x"), row(b=1), row(a=None))] == ["x", "none", "none"]
    assert builder(template="{{ a or '' }}{{ b }}", chat=False).render(row(a=None, b=0)) == "0"


@pytest.mark.parametrize("template", ["{% if", "{{ a", "{{ a | nofilter }}", "{% endfor %}"])
def test_a_template_with_a_syntax_error_is_refused_at_once(template: str) -> None:
    with pytest.raises(UsageError, match="--template: line 2"):
        builder(template="first line\n" + template)


def test_a_template_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xff")
    for name in ("missing", "latin"):
        with pytest.raises(UsageError, match=name):
            builder(template=f"@{tmp_path / name}")


# Length


@pytest.mark.parametrize("length", [1, CONTEXT - 2, CONTEXT - 1])
def test_a_prompt_that_leaves_room_for_one_token_is_taken_whole(length: int) -> None:
    ids = [7] * length
    for side in (None, "left", "right"):
        assert builder(truncate=side)(row(token_ids=ids)).token_ids == ids


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 10 * CONTEXT])
def test_a_prompt_that_is_too_long_is_an_error_that_gives_the_numbers(length: int) -> None:
    with pytest.raises(RowError, match=f"{length} tokens.* {CONTEXT} fit") as caught:
        builder()(row(token_ids=[7] * length))
    assert caught.value.kind == "prompt_too_long"


@pytest.mark.parametrize("max_tokens", [1, 50, 100, 150, 10**9])
def test_truncation_keeps_the_other_end_and_leaves_room_for_the_completion(max_tokens: int) -> None:
    ids = [number % VOCAB_SIZE for number in range(3 * CONTEXT)]
    params = {"max_tokens": max_tokens}
    left = builder(truncate="left")(row(token_ids=ids, params=params)).token_ids
    right = builder(truncate="right")(row(token_ids=ids, params=params)).token_ids
    assert len(left) == len(right) == max(CONTEXT - max_tokens, CONTEXT // 2)
    assert left == ids[-len(left) :]
    assert right == ids[: len(right)]


@pytest.mark.parametrize("context", [2, 3])
def test_truncation_in_the_smallest_contexts(context: int) -> None:
    for side in ("left", "right"):
        assert len(builder(truncate=side, context=context)(row(token_ids=[5] * 9)).token_ids) in range(1, context)


# Sampling parameters and random keys


def test_a_row_may_override_the_job() -> None:
    build = builder(sampling=SamplingParams(max_tokens=9, temperature=0.5))
    params = build(row(prompt="a", params={"max_tokens": 3, "stop": "x", "temperature": None})).params
    assert (params.max_tokens, params.temperature, params.stop) == (3, 0.5, ("x",))
    assert build(row(prompt="a", params={})).params == build(row(prompt="a", params=None)).params == build.sampling


@pytest.mark.parametrize(
    "params", [{"max_tokens": 0}, {"nonsense": 1}, {"temperature": 10**400}, [], "x", 1, {"stop": [""]}]
)
def test_parameters_that_are_wrong_are_an_error_of_their_row(params: Any) -> None:
    assert kind_of(builder(), row(prompt="a", params=params)) == "invalid_params"


def test_rows_have_random_keys_of_their_own_that_follow_their_id() -> None:
    build = builder()
    ids: list[Any] = ["a", "b", 1, "1", 2]
    keys = [build(row(number, id=row_id, prompt="p")).random_key for number, row_id in enumerate(ids)]
    assert len(set(keys)) == len(ids)
    assert all(0 <= key < 2**64 for key in keys)
    build = builder()
    moved = [
        build(row(9 - number, "other.jsonl", id=row_id, prompt="q")).random_key for number, row_id in enumerate(ids)
    ]
    assert moved == keys


def test_rows_without_an_id_are_known_by_their_place() -> None:
    build = builder()
    places = [(0, "a.jsonl"), (1, "a.jsonl"), (0, "b.jsonl")]
    keys = [build(row(number, source, prompt="p")).random_key for number, source in places]
    assert len(set(keys)) == 3
    build = builder()
    assert [build(row(number, f"moved/{source}", prompt="p")).random_key for number, source in places] == keys
    assert builder()(row(0, "a.jsonl", prompt="p", id=None)).random_key == keys[0]


def test_copies_of_a_row_differ_and_a_resumed_job_draws_the_same() -> None:
    rows = [row(number, id="same", prompt="p") for number in range(50)]
    rows += [row(0, f"{folder}/data.jsonl", prompt="p") for folder in ("train", "test")]
    build, resumed = builder(), builder()
    keys = [build(copy).random_key for copy in rows]
    assert len(set(keys)) == len(rows)
    for done in rows[:-1]:
        resumed.skip(done)
    assert resumed(rows[-1]).random_key == keys[-1]


def test_a_seed_of_a_row_decides_its_random_key_alone() -> None:
    build = builder()
    keys = {seed: build(row(0, prompt="p", params={"seed": seed})).random_key for seed in (0, 1, -1, 2**70)}
    assert len(set(keys.values())) == 4
    assert build(row(5, id="x", prompt="q", params={"seed": 1})).random_key == keys[1]


def test_a_stop_text_that_is_a_special_token_stops_as_that_token() -> None:
    build = builder(None, sampling=SamplingParams(seed=7, stop=("<|im_start|>", "x"), stop_token_ids=(9,)))
    assert build(row(prompt="a")).params.stop_token_ids == (9, 1)
    assert build(row(prompt="a")).params.stop == ("<|im_start|>", "x")
    own = build(row(prompt="a", params={"stop": ["<|endoftext|>"], "ignore_eos": True}))
    assert own.params.stop_token_ids == (9, 0)
    assert build(row(prompt="a", params={"stop": "the"})).params.stop_token_ids == (9,)


def test_params_may_be_json_text_as_tables_have_it() -> None:
    found = builder()(row(prompt="a", params='{"max_tokens": 3, "seed": 5}'))
    assert found.params.max_tokens == 3
    assert found.random_key == builder()(row(prompt="a", params={"max_tokens": 3, "seed": 5})).random_key
    assert kind_of(builder(), row(prompt="a", params="greedy")) == "invalid_params"


def test_columns_that_belong_to_conversations_are_the_users_own_beside_a_text() -> None:
    assert builder().render(row(prompt="a", tools="hammer, saw")) == chat(("user", "a"))


def test_a_row_that_nobody_thought_of_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    build = builder()

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("odd")

    with monkeypatch.context() as patch:
        patch.setattr(build, "_prompt", fail)
        with pytest.raises(
            RowError, match=r"^in\.jsonl:1: ZeroDivisionError: odd\. This is a fault of cbatch"
        ) as caught:
            build(row(prompt="a"))
    assert caught.value.kind == "internal_error"
    assert build(row(prompt="a"))
