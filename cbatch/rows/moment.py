"""Arrow's dates, times of day, timestamps and durations <-> ISO 8601 texts that keep every digit.

Arrow stores each as one whole number of units since midnight or since 1970. Python's own types can't hold nanoseconds.
"""

from __future__ import annotations

import re
from datetime import date, datetime, time, timedelta, timezone
from functools import cache
from typing import Any

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_DAY = 86_400  # seconds
_EPOCH = datetime(1970, 1, 1)
_TEXT = re.compile(r"(.*?\d\d:\d\d:\d\d)(?:\.(\d+))?(.*)")  # up to the seconds, the fraction, the offset
_DURATION = re.compile(r"(-?)PT(\d+)(?:\.(\d+))?S")


def is_moment(kind: Any) -> bool:
    """Whether an Arrow type is one that this module makes texts of."""
    import pyarrow as pa

    types = pa.types
    return bool(types.is_date(kind) or types.is_time(kind) or types.is_timestamp(kind) or types.is_duration(kind))


def moment_text(number: int, kind: Any) -> str:
    """The text of a stored number; ValueError if it lies outside the years 1 to 9999."""
    try:
        return _text(number, str(kind), kind)
    except (OverflowError, ValueError):
        raise ValueError(f"{number} is no {kind} in the years 1 to 9999") from None


def _text(number: int, name: str, kind: Any) -> str:
    if name.startswith("date"):
        days = number if name.startswith("date32") else number // (_DAY * 1000)
        return (_EPOCH + timedelta(days=days)).date().isoformat()
    per_second = _PER_SECOND[kind.unit]
    if name.startswith("duration"):
        return duration_text(number, per_second)
    seconds, rest = divmod(number, per_second)
    if name.startswith("time") and not name.startswith("timestamp"):
        return time(seconds // 3600, seconds // 60 % 60, seconds % 60).isoformat() + _fraction(rest, per_second)
    moment = _EPOCH + timedelta(seconds=seconds)
    if kind.tz:
        moment = moment.replace(tzinfo=timezone.utc).astimezone(_zone(kind.tz))
    text = moment.isoformat()
    return text[:19] + _fraction(rest, per_second) + text[19:]


def duration_text(number: int, per_second: int) -> str:
    """The text of a duration in units of which a second has `per_second`: PT90.5S."""
    seconds, rest = divmod(abs(number), per_second)
    return f"{'-' if number < 0 else ''}PT{seconds}{_fraction(rest, per_second)}S"


def _fraction(rest: int, per_second: int) -> str:
    """The digits behind the second: none, six, or nine where six can't say it."""
    nanoseconds = rest * (10**9 // per_second)
    if not nanoseconds:
        return ""
    return f".{nanoseconds:09}" if nanoseconds % 1000 else f".{nanoseconds // 1000:06}"


def stored_number(text: str, kind: Any) -> int:
    """The number that Arrow stores for a text of `moment_text`."""
    name = str(kind)
    if name.startswith("date"):
        days = (date.fromisoformat(text) - _EPOCH.date()).days
        return days if name.startswith("date32") else days * _DAY * 1000
    per_second = _PER_SECOND[kind.unit]
    if match := _DURATION.fullmatch(text):
        number = int(match[2]) * per_second + _units(match[3], per_second)
        return -number if match[1] else number
    match = _TEXT.fullmatch(text)
    assert match, text
    if name.startswith("timestamp"):
        moment = datetime.fromisoformat(match[1] + match[3])
        since = moment.astimezone(timezone.utc).replace(tzinfo=None) - _EPOCH if moment.tzinfo else moment - _EPOCH
    else:
        since = datetime.combine(_EPOCH, time.fromisoformat(match[1])) - _EPOCH
    return (since.days * _DAY + since.seconds) * per_second + _units(match[2], per_second)


def _units(fraction: str | None, per_second: int) -> int:
    return int((fraction or "").ljust(9, "0")) * per_second // 10**9


@cache
def _zone(name: str) -> Any:
    """The time zone of this name or offset."""
    import pyarrow as pa

    return pa.lib.string_to_tzinfo(name)
