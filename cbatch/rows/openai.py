"""The OpenAI batch format, both ways: request rows are read, and completions become lines of its output file.

Source: https://platform.openai.com/docs/guides/batch
"""

from __future__ import annotations

import time
import zlib
from typing import Any

from cbatch.errors import RowError
from cbatch.rows.request import Completion, Output, Row

_PROMPT_FIELDS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}  # by URL
_PARAM_NAMES = {"max_completion_tokens": "max_tokens"}
_IGNORED = {"model", "messages", "prompt", "user", "metadata", "store", "service_tier"}
_NEUTRAL = {"n": 1, "best_of": 1, "stream": False, "logprobs": False, "echo": False}  # allowed with this value only


def is_request(row: Row) -> bool:
    """Whether a row is a line of an OpenAI batch input file."""
    return "body" in row.data and "custom_id" in row.data


def prompt_and_params(row: Row) -> tuple[Any, dict[str, Any]]:
    """The prompt of a request row and its sampling parameters by cbatch's names; RowError if cbatch can't do it."""
    body, url = row.data["body"], row.data.get("url") or "/v1/chat/completions"
    if not isinstance(body, dict) or str(url) not in _PROMPT_FIELDS or (row.data.get("method") or "POST") != "POST":
        raise RowError(
            "invalid_request", f"cbatch answers POST to {' and '.join(_PROMPT_FIELDS)} with a body, not {url!r:.80}"
        )
    prompt = body.get(_PROMPT_FIELDS[url])
    if prompt is None:
        raise RowError("missing_prompt", f"the body has no {_PROMPT_FIELDS[url]!r}")
    if _PROMPT_FIELDS[url] == "messages" and not isinstance(prompt, list):
        raise RowError("invalid_messages", f"messages must be a list, not {prompt!r:.80}")
    return prompt, _params(body)


def _params(body: dict[str, Any]) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for name, value in body.items():
        if name in _IGNORED or value is None:
            continue
        if name not in _NEUTRAL:
            params[_PARAM_NAMES.get(str(name), str(name))] = value
        elif value != _NEUTRAL[name]:
            raise RowError("invalid_params", f"{name}: {value!r} is not supported")
    return params


def answer(completion: Completion, prefix: str) -> dict[str, Any]:
    """A line of an OpenAI batch output file; `row` and `source`, with the prefix, are added for a resumed job."""
    row, response, error = completion.row, None, None
    unique = f"{zlib.crc32(row.source.encode(errors='replace')):08x}-{row.index}"
    if completion.error:
        error = {"code": completion.error.kind, "message": str(completion.error)}
    else:
        response = {"status_code": 200, "request_id": f"req-{unique}", "body": _body(completion, f"cmpl-{unique}")}
    return {
        "id": f"batch_req_{unique}",
        "custom_id": row.data["custom_id"],
        "response": response,
        "error": error,
        prefix + "row": row.index,
        prefix + "source": row.source,
    }


def _body(completion: Completion, body_id: str) -> dict[str, Any]:
    num_prompt_tokens, num_tokens = completion.num_prompt_tokens, completion.num_completion_tokens
    details = {"cached_tokens": completion.num_cached_tokens}
    if completion.num_truncated_tokens:
        details["truncated_tokens"] = completion.num_truncated_tokens
    return {
        "id": body_id,
        "object": "chat.completion" if completion.chat else "text_completion",
        "created": int(time.time()),
        "model": completion.row.data["body"].get("model"),
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
