"""One line of JSONL -> a row's columns, by rules that every other JSON reader accepts, too."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from cbatch.errors import RowError

_MAX_NESTING = 200  # levels; far below Python's recursion limit, which would end the job in whichever thread met it
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_object(text: str) -> dict[str, Any]:
    """The object that a line holds; RowError if it is not strict JSON, nested too deeply, or no object.

    A lone surrogate escape becomes U+FFFD: many readers refuse a whole file that holds one.
    """
    try:
        data = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_float, parse_int=_int)
        if text.count("[") + text.count("{") > _MAX_NESTING and _is_too_deep(data):
            raise RecursionError
    except RecursionError:
        raise RowError("invalid_json", f"nested more than {_MAX_NESTING} levels deep") from None
    except ValueError as error:
        raise RowError("invalid_json", f"not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise RowError("not_an_object", f"a row must be a JSON object, not {_json_type(data)}")
    return _without_surrogates(data) if _SURROGATE_ESCAPE.search(text) else data


def _is_too_deep(value: Any) -> bool:
    """Whether a value is nested more than `_MAX_NESTING` levels; goes level by level, so it can't recurse itself."""
    level = [value]
    for _ in range(_MAX_NESTING):
        containers = (item for item in level if isinstance(item, (dict, list)))
        level = [child for item in containers for child in (item.values() if isinstance(item, dict) else item)]
    return bool(level)


def _refuse_constant(name: str) -> NoReturn:
    """Refuses NaN and Infinity, which Python's parser takes and JSON does not have."""
    raise ValueError(f"{name} is not JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text:.40} is too large for a number")
    return value


def _int(text: str) -> int:
    """An integer of any size that a float could hold; a larger one makes other readers refuse the line."""
    _finite_float(text)
    return int(text)


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _without_surrogates(value: Any) -> Any:
    """A value with U+FFFD for every lone surrogate in its texts and keys; pairs become the character they mean."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return [_without_surrogates(item) for item in value] if isinstance(value, list) else value
