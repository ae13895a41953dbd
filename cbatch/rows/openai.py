"""The OpenAI batch format, both ways: request rows are read, and completions become lines of its output file.

Source: https://platform.openai.com/docs/guides/batch
"""

from __future__ import annotations

import re
import time
import zlib
from typing import Any

from cbatch.errors import RowError
from cbatch.rows.request import Completion, Output, Row

_PROMPT_FIELDS = {"/chat/completions": "messages", "/completions": "prompt"}  # by the end of the URL's path
_PARAM_NAMES = {"max_completion_tokens": "max_tokens"}
_IGNORED = {  # changes no text
    *("model", "messages", "prompt", "user", "metadata", "store", "service_tier"),
    *("safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
}
_BESIDE_MESSAGES = {"tools", "chat_template_kwargs", "tool_choice"}
_NEUTRAL = {  # allowed with this value only
    **{"n": 1, "best_of": 1, "stream": False, "logprobs": False, "echo": False},
    **{"top_logprobs": 0, "logit_bias": {}, "suffix": "", "response_format": {"type": "text"}, "modalities": ["text"]},
    "parallel_tool_calls": True,
}


def is_request(row: Row) -> bool:
    """Whether a row is a line of an OpenAI batch input file."""
    data = row.data
    return "custom_id" in data and (isinstance(data.get("body"), dict) or ("body" in data and "url" in data))


def prompt_and_params(row: Row) -> tuple[Any, dict[str, Any]]:
    """The prompt of a request row and its sampling parameters by cbatch's names; RowError if cbatch can't do it."""
    body = row.data["body"]
    if not isinstance(body, dict):
        raise RowError("invalid_request", f"the body must be an object, not {body!r:.80}")
    if row.data.get("params"):
        raise RowError("invalid_params", "an OpenAI request has its settings in its body, not in params")
    field = _prompt_field(row.data.get("method"), row.data.get("url"))
    prompt = body.get(field)
    if prompt is None:
        raise RowError("missing_prompt", f"the body has no {field!r}")
    if field == "messages" and not (isinstance(prompt, list) and all(isinstance(item, dict) for item in prompt)):
        raise RowError("invalid_messages", f"messages must be a list of objects, not {prompt!r:.80}")
    if field == "prompt":
        return _single(prompt), _params(body, _IGNORED)
    return prompt, _params(body, _IGNORED | _BESIDE_MESSAGES)


def beside_messages(row: Row) -> dict[str, Any]:
    """The tools and the template's variables that a chat request has beside its messages; RowError if it can't be done."""
    body: dict[str, Any] = row.data["body"]
    choice = body.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        raise RowError("invalid_params", f"tool_choice: {choice!r:.80} is not supported")
    return {**body, "tools": None} if choice == "none" else body


def names_other_model(row: Row, model: str) -> bool:
    """Whether a request row names another model than the one that runs."""
    body = row.data["body"]
    return isinstance(body, dict) and body.get("model") not in (None, model)


def _prompt_field(method: Any, url: Any) -> str:
    """Where the body of a request has its prompt. The URL may be whole, and lack its /v1; without one it is a chat."""
    method, url = method or "POST", url or "/v1/chat/completions"
    is_text = isinstance(method, str) and isinstance(url, str)
    path = re.split("[?#]", url, maxsplit=1)[0].rstrip("/") if is_text else ""
    field = next((field for end, field in _PROMPT_FIELDS.items() if path.endswith(end)), None)
    if field is None or method.upper() != "POST":
        raise RowError(
            "invalid_request",
            f"{method!r:.20} {url!r:.200}: cbatch answers POST to /v1/chat/completions and /v1/completions",
        )
    return field


def _single(prompt: Any) -> Any:
    """The one prompt of a request for completions: a text, or token ids."""
    if isinstance(prompt, list) and not all(type(item) is int for item in prompt):
        if len(prompt) != 1:
            raise RowError("invalid_request", f"a list of {len(prompt)} prompts: make a request of each")
        return _single(prompt[0])
    if not isinstance(prompt, (str, list)):
        raise RowError("invalid_prompt", f"a prompt must be a text or token ids, not {prompt!r:.80}")
    return prompt


def _params(body: dict[str, Any], ignored: set[str]) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for name, value in body.items():
        if name in ignored or value is None or _is_neutral(name, value):
            continue
        if name in _NEUTRAL:
            raise RowError("invalid_params", f"{name}: {value!r:.80} is not supported")
        known = _PARAM_NAMES.get(str(name), str(name))
        first = params.setdefault(known, value)
        if (type(first), first) != (type(value), value):  # True is not 1
            raise RowError("invalid_params", f"{name}: {value!r:.80} contradicts {known}: {first!r:.80}")
    return params


def _is_neutral(name: str, value: Any) -> bool:
    """Whether a value asks for nothing. False is no number here: `logprobs: 0` asks for some."""
    neutral = _NEUTRAL.get(name)
    return name in _NEUTRAL and value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def answer(completion: Completion, model: str, prefix: str) -> dict[str, Any]:
    """A line of an OpenAI batch output file. `model`: the one that ran. `row` and `source`, with the prefix, are added for a
    resumed job.
    """
    row, response, error = completion.row, None, None
    unique = f"{zlib.crc32(row.source.encode(errors='replace')):08x}-{row.index}"
    if completion.error:
        error = {"code": completion.error.kind, "message": str(completion.error)}
    else:
        body = _body(completion, f"cmpl-{unique}", model)
        response = {"status_code": 200, "request_id": f"req-{unique}", "body": body}
    return {
        "id": f"batch_req_{unique}",
        "custom_id": row.data["custom_id"],
        "response": response,
        "error": error,
        prefix + "row": row.index,
        prefix + "source": row.source,
    }


def _body(completion: Completion, body_id: str, model: str) -> dict[str, Any]:
    num_prompt_tokens, num_tokens = completion.num_prompt_tokens, completion.num_completion_tokens
    details: dict[str, int | None] = {"cached_tokens": completion.num_cached_tokens}
    if completion.num_truncated_tokens != 0:
        details["truncated_tokens"] = completion.num_truncated_tokens
    return {
        "id": body_id,
        "object": "chat.completion" if completion.chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(index, output, completion.chat) for index, output in enumerate(completion.outputs)],
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "prompt_tokens_details": details,
        },
    }


def _choice(index: int, output: Output, chat: bool) -> dict[str, Any]:
    """One generated text in the body of a response."""
    text = {"message": {"role": "assistant", "content": output.text}} if chat else {"text": output.text}
    return {"index": index, "logprobs": None, "finish_reason": output.finish_reason, **text}


def is_failure(answer: dict[str, Any]) -> bool:
    """Whether a line of an output file says that its request failed; KeyError if it is no such line."""
    return answer["error"] is not None
