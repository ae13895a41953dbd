"""One line of JSONL -> a row's columns, by rules that every other JSON reader accepts, too."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from cbatch.errors import RowError
from cbatch.rows.values import Parsed

_MAX_NESTING = 200  # levels; far below Python's recursion limit, which would end the job in whichever thread met it
_TOO_DEEP = RowError("invalid_json", f"nested more than {_MAX_NESTING} levels deep")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_object(text: str) -> Parsed:
    """The object that a line holds. A column with something that strict JSON does not have, or that is nested too deeply,
    is a problem and the others are kept; without any columns, the line is no object.

    A lone surrogate escape becomes U+FFFD: many readers refuse a whole file that holds one.
    """
    numbers = _Numbers()
    try:
        data = json.loads(text, parse_constant=numbers.constant, parse_float=numbers.real, parse_int=numbers.whole)
    except RecursionError:
        return Parsed({}, _TOO_DEEP)
    except ValueError as error:
        return Parsed({}, RowError("invalid_json", f"not valid JSON: {error}"))
    problem = RowError("invalid_json", f"not valid JSON: {numbers.fault}") if numbers.fault else None
    if not isinstance(data, dict):
        no_object = RowError("not_an_object", f"a row must be a JSON object, not {_json_type(data)}")
        return Parsed({}, problem or no_object)
    if text.count("[") + text.count("{") > _MAX_NESTING and (deep := [key for key in data if _is_too_deep(data[key])]):
        data.update(dict.fromkeys(deep))
        problem = _TOO_DEEP
    return Parsed(_without_surrogates(data) if _SURROGATE_ESCAPE.search(text) else data, problem)


def _is_too_deep(value: Any) -> bool:
    """Whether a column makes a row nested more than `_MAX_NESTING` levels; goes level by level, so it can't recurse."""
    level = [value]
    for _ in range(_MAX_NESTING - 1):
        containers = (item for item in level if isinstance(item, (dict, list)))
        level = [child for item in containers for child in (item.values() if isinstance(item, dict) else item)]
    return bool(level)


class _Numbers:
    """Makes the numbers of a line. One that JSON does not have, or no float can hold, is null and remembered as a fault."""

    fault = ""  # the first

    def constant(self, name: str) -> None:
        """NaN and Infinity, which Python's parser takes."""
        self.fault = self.fault or f"{name} is not JSON"

    def real(self, text: str) -> float | None:
        value = float(text)
        if not math.isinf(value):
            return value
        self.fault = self.fault or f"{text:.40} is too large for a number"
        return None

    def whole(self, text: str) -> int | None:
        """An integer of any size that a float could hold; a larger one makes other readers refuse the line."""
        return None if self.real(text) is None else int(text)


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
