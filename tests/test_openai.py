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
    ("columns", "expected"), [(("body", "custom_id"), True), (("body",), False), (("custom_id",), False)]
)
def test_a_row_is_a_request_only_with_both_of_its_keys(columns: tuple[str, ...], expected: bool) -> None:
    assert openai.is_request(row(**dict.fromkeys(columns, "x"))) is expected


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
        ({"messages": []}, {}, "empty_prompt"),
        ({"messages": [{"role": "user", "content": "x"}], "n": 2}, {}, "invalid_params"),
        ({"messages": [{"role": "user", "content": "x"}], "stream": True}, {}, "invalid_params"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, {}, "invalid_params"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, {}, "invalid_params"),
        ({"messages": [{"role": "user", "content": "x"}], "logprobs": True}, {}, "invalid_params"),
    ],
)
def test_a_request_that_can_not_be_answered_is_an_error_of_its_row(
    build: PromptBuilder, body: Any, data: dict[str, Any], kind: str
) -> None:
    with pytest.raises(RowError, match=r"^in\.jsonl:1: ") as caught:
        build(request(body, **data))
    assert caught.value.kind == kind
