"""A completion -> the record that is written for it, and back to what a record is about."""

from __future__ import annotations

import json
import re
import time
import zlib
from dataclasses import dataclass
from typing import Any

from cbatch.errors import RowError
from cbatch.rows.request import Completion, Output, Row

FIELDS = ("completion", "finish_reason", "prompt_tokens", "completion_tokens", "row", "source", "error", "error_kind")

# Valid inside a JSON string, but line breaks to many readers, or no characters at all.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@dataclass(frozen=True)
class RecordShape:
    """How records look: `prefix` goes before the names that cbatch adds; OpenAI rows may get OpenAI's shape."""

    prefix: str = ""
    openai: bool = True

    def check(self, row: Row) -> None:
        """RowError if an input column has the name of one that cbatch adds."""
        if row.is_openai and self.openai:
            return
        if taken := [self.prefix + name for name in FIELDS if self.prefix + name in row.data]:
            raise RowError(
                "column_collision", f"{row.where}: the input has a column {taken[0]!r} already; choose a --prefix"
            )

    def record(self, completion: Completion) -> dict[str, Any]:
        """All input columns and what was generated."""
        row = completion.row
        if row.is_openai and self.openai:
            return _openai_record(completion, self.prefix)
        (output,) = completion.outputs
        values = (
            output.text,
            output.finish_reason,
            completion.num_prompt_tokens,
            len(output.token_ids),
            row.index,
            row.source,
            str(output.error) if output.error else None,
            output.error.kind if output.error else None,
        )
        added = {self.prefix + name: value for name, value in zip(FIELDS, values, strict=True)}
        collision = output.error is not None and output.error.kind == "column_collision"
        return added if collision else {**row.data, **added}

    def key(self, record: dict[str, Any]) -> tuple[str, int, bool]:
        """Source, row, and whether it failed; KeyError or TypeError if this is no record of this shape."""
        source, row = record[self.prefix + "source"], record[self.prefix + "row"]
        if not isinstance(source, str) or not isinstance(row, int):
            raise TypeError("source or row of the wrong type")
        name = self.prefix + "error"
        return source, row, record[name if name in record else "error"] is not None


def dumps(value: Any) -> str:
    """Strict JSON on one line, whatever splits it into lines, and encodable as UTF-8."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _openai_record(completion: Completion, prefix: str) -> dict[str, Any]:
    """A line of an OpenAI batch output file, with the place of the request added."""
    row, response, error = completion.row, None, None
    ident = f"{zlib.crc32(row.source.encode(errors='replace')):08x}-{row.index}"
    if completion.error:
        error = {"code": completion.error.kind, "message": str(completion.error)}
    else:
        prompt_tokens, completion_tokens = completion.num_prompt_tokens, completion.num_completion_tokens
        body = {
            "id": f"cmpl-{ident}",
            "object": "chat.completion" if completion.chat else "text_completion",
            "created": int(time.time()),
            "model": row.data["body"].get("model"),
            "choices": [_choice(index, output, completion.chat) for index, output in enumerate(completion.outputs)],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
                "prompt_tokens_details": {"cached_tokens": completion.num_cached_tokens},
            },
        }
        response = {"status_code": 200, "request_id": f"req-{ident}", "body": body}
    return {
        "id": f"batch_req_{ident}",
        "custom_id": row.data["custom_id"],
        "response": response,
        "error": error,
        prefix + "row": row.index,
        prefix + "source": row.source,
    }


def _choice(index: int, output: Output, chat: bool) -> dict[str, Any]:
    """One answer in the body of an OpenAI response."""
    text = {"message": {"role": "assistant", "content": output.text}} if chat else {"text": output.text}
    return {"index": index, "logprobs": None, "finish_reason": output.finish_reason, **text}
