from __future__ import annotations

from typing import Any

import pytest

from cbatch.config import PromptConfig, SamplingParams
from cbatch.errors import RowError
from cbatch.rows import openai
from cbatch.rows.prompt import PromptBuilder
from cbatch.rows.request import Row
from tests.tiny import TEMPLATE, VOCAB_SIZE, make_tokenizer


@pytest.fixture
def build() -> PromptBuilder:
    return PromptBuilder(PromptConfig(), SamplingParams(seed=7), make_tokenizer(TEMPLATE), 200, VOCAB_SIZE)


def row(**data: Any) -> Row:
    return Row("in.jsonl", 0, "in.jsonl:1", data, 5)


def request(body: Any, **data: Any) -> Row:
    return row(**{"custom_id": "r", "method": "POST", "url": "/v1/chat/completions", "body": body, **data})


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"body": {}, "custom_id": "x"}, True),
        ({"body": "x", "custom_id": "x", "url": "/v1/completions"}, True),
        ({"body": "the text of a mail", "custom_id": "x"}, False),
        ({"body": {}}, False),
        ({"custom_id": "x"}, False),
    ],
)
def test_a_row_is_a_request_only_with_both_of_its_keys(columns: dict[str, Any], expected: bool) -> None:
    assert openai.is_request(row(**columns)) is expected


def test_a_chat_request(build: PromptBuilder) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    body = {
        "model": "gpt-x",
        "messages": messages,
        "max_completion_tokens": 5,
        "temperature": 1,
        "stop": ["x"],
        "n": 1,
        "stream": False,
        "seed": 3,
        "user": "u",
        "top_p": None,
        "presence_penalty": 0,
    }
    found = build(request(body))
    assert build.render(request(body)) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (found.params.max_tokens, found.params.temperature, found.params.stop) == (5, 1.0, ("x",))
    assert found.chat


@pytest.mark.parametrize("prompt", ["hi", [5, 6]])
def test_a_text_request_is_never_put_into_a_conversation(build: PromptBuilder, prompt: Any) -> None:
    found = build(request({"prompt": prompt, "max_tokens": 4}, url="/v1/completions"))
    assert found.token_ids == (make_tokenizer()("hi")["input_ids"] if prompt == "hi" else prompt)
    assert not found.chat


@pytest.mark.parametrize(
    ("body", "data", "kind"),
    [
        (None, {}, "invalid_request"),
        ("x", {}, "invalid_request"),
        ({"messages": []}, {"url": "/v1/embeddings"}, "invalid_request"),
        ({"messages": []}, {"url": ["/v1/chat/completions"]}, "invalid_request"),
        ({"messages": []}, {"method": "GET"}, "invalid_request"),
        ({"prompt": "x"}, {}, "missing_prompt"),
        ({"messages": None}, {}, "missing_prompt"),
        ({"messages": "x"}, {}, "invalid_messages"),
        ({"messages": {"role": "user"}}, {}, "invalid_messages"),
        ({"messages": [5, 6, 7]}, {}, "invalid_messages"),
        ({"messages": []}, {}, "empty_prompt"),
        ({"messages": [{"role": "user", "content": "x"}], "n": 2}, {}, "invalid_params"),
        ({"messages": [{"role": "user", "content": "x"}], "stream": True}, {}, "invalid_params"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, {}, "invalid_messages"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, {}, "invalid_params"),
        ({"messages": [{"role": "user", "content": "x"}], "logprobs": True}, {}, "invalid_params"),
        ({"messages": [{"role": "user", "content": "x"}], "logprobs": 0}, {}, "invalid_params"),
        ({"messages": [{"role": "user", "content": "x"}], "n": True}, {}, "invalid_params"),
        ({"messages": [{"role": "user", "content": "x"}], "stream": 0}, {}, "invalid_params"),
        ({"messages": [{"role": "user", "content": "x"}], "logit_bias": {"5": 1}}, {}, "invalid_params"),
        ({"prompt": ["a", "b"]}, {"url": "/v1/completions"}, "invalid_request"),
        ({"prompt": [[1, 2], [3]]}, {"url": "/v1/completions"}, "invalid_request"),
        ({"prompt": [{"role": "user", "content": "x"}]}, {"url": "/v1/completions"}, "invalid_prompt"),
        ({"prompt": 7}, {"url": "/v1/completions"}, "invalid_prompt"),
        ({"prompt": "x"}, {"url": "/v1/responses"}, "invalid_request"),
        ({"messages": [{"role": "user", "content": "x"}]}, {"params": {"max_tokens": 3}}, "invalid_params"),
        ({"messages": []}, {"url": "http://[::1"}, "invalid_request"),
        ({"messages": []}, {"url": b"\xff"}, "invalid_request"),
        ({"messages": []}, {"method": b"\xff"}, "invalid_request"),
    ],
)
def test_a_request_that_can_not_be_answered_is_an_error_of_its_row(
    build: PromptBuilder, body: Any, data: dict[str, Any], kind: str
) -> None:
    with pytest.raises(RowError, match=r"^in\.jsonl:1: ") as caught:
        build(request(body, **data))
    assert caught.value.kind == kind


CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    "data",
    [
        {"method": "post"},
        {"method": None, "url": None},
        {"url": "/chat/completions"},
        {"url": "https://api.openai.com/v1/chat/completions"},
        {"url": "http://localhost:8000/v1/chat/completions/?timeout=9"},
        {"url": "http://[::1/v1/chat/completions#it"},
    ],
)
def test_a_request_is_known_by_its_url_however_it_is_written(build: PromptBuilder, data: dict[str, Any]) -> None:
    assert build(request(CHAT, **data)).token_ids == build(request(CHAT)).token_ids


@pytest.mark.parametrize("prompt", [["hi"], [[5, 6]]])
def test_a_list_of_one_prompt_is_that_prompt(build: PromptBuilder, prompt: list[Any]) -> None:
    url = "/v1/completions"
    assert (
        build(request({"prompt": prompt}, url=url)).token_ids
        == build(request({"prompt": prompt[0]}, url=url)).token_ids
    )


def test_settings_that_ask_for_nothing_are_allowed(build: PromptBuilder) -> None:
    neutral = {"n": 1.0, "logit_bias": {}, "top_logprobs": 0, "stop": [], "temperature": None, "best_of": 1}
    assert build(request({**CHAT, **neutral})).params == build(request(CHAT)).params


@pytest.mark.parametrize("names", [("max_tokens", "max_completion_tokens"), ("max_completion_tokens", "max_tokens")])
def test_two_names_of_one_setting_must_agree_in_either_order(build: PromptBuilder, names: tuple[str, str]) -> None:
    assert build(request({**CHAT, **dict.fromkeys(names, 3)})).params.max_tokens == 3
    with pytest.raises(RowError, match="contradicts max_tokens") as caught:
        build(request({**CHAT, names[0]: 2, names[1]: 4}))
    assert caught.value.kind == "invalid_params"
    with pytest.raises(RowError, match="contradicts max_tokens"):
        build(request({**CHAT, names[0]: 1, names[1]: True}))


@pytest.mark.parametrize(
    ("data", "remarks"),
    [
        ({"prompt": "x", "max_tokens": 5}, ("setting_as_column",)),
        ({"prompt": "x", "temprature": 0.5, "Params": {}}, ("setting_as_column",)),
        ({"prompt": "x", "sampling_params": {"max_tokens": 5}}, ("setting_as_column",)),
        ({"prompt": "x", "top-p": 0.5}, ("setting_as_column",)),
        ({"prompt": "x", "params": {"max_tokens": 5}, "text": "", "id": 1, "tokens": 3, "topic": "t"}, ()),
        ({"custom_id": "1", "body": {**CHAT, "model": "gpt-x"}}, ("other_model",)),
        ({"custom_id": "1", "body": {**CHAT, "model": "served"}}, ()),
        ({"custom_id": "1", "body": CHAT}, ()),
    ],
)
def test_what_a_user_may_not_expect_is_remarked(data: dict[str, Any], remarks: tuple[str, ...]) -> None:
    tokenizer = make_tokenizer(TEMPLATE)
    build = PromptBuilder(PromptConfig(), SamplingParams(seed=7), tokenizer, 200, VOCAB_SIZE, model="served")
    assert build(row(**data)).remarks == remarks


@pytest.mark.parametrize("settings", [{"template": "{{ custom_id }}"}, {"prompt_column": "custom_id"}])
def test_settings_that_would_not_count_for_a_request_are_an_error_of_its_row(settings: dict[str, Any]) -> None:
    build = PromptBuilder(PromptConfig(**settings), SamplingParams(), make_tokenizer(TEMPLATE), 200, VOCAB_SIZE)
    with pytest.raises(RowError, match="has its prompt in its body; leave out --"):
        build(request({"messages": [{"role": "user", "content": "x"}]}))
