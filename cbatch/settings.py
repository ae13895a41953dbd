"""How a setting is declared: default, help, bounds and names, checked when a settings class is built.

The command line, the TOML keys of `--config`, the `params` of a row and a job's manifest all read these declarations.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import Field, field, fields
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from cbatch.errors import SettingError

_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def option(
    default: Any,
    help: str,
    *,
    flags: str = "",
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    at_least: float | None = None,
    at_most: float | None = None,
    path_after: str | None = None,
) -> Any:
    """A dataclass field that is also a command-line option.

    `flags` replaces the flag made from the field's name; `aliases` are other names for it in TOML files and in rows.
    `path_after`: the value is a path behind what this regular expression matches; a `~` there is the home folder.
    """
    bounds = {"at_least": at_least, "at_most": at_most}
    names = {"flags": flags, "aliases": aliases, "path_after": path_after}
    return field(default=default, metadata={"help": help, "choices": choices, **names, **bounds})


class Settings:
    """Base of the settings dataclasses: checks types, choices and bounds when one is built; SettingError names the field."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, (spec, hint) in declared(kind).items():
            value = _checked(name, getattr(self, name), hint, spec.metadata)
            if spec.metadata.get("choices") and value not in (*spec.metadata["choices"], spec.default):
                raise SettingError(name, f"must be one of {', '.join(spec.metadata['choices'])}, not {value!r:.80}")
            object.__setattr__(self, name, value)


@cache
def declared(kind: Any) -> dict[str, tuple[Field[Any], Any]]:
    """The fields of a settings class with their types, by the fields' names."""
    hints = get_type_hints(kind)
    return {spec.name: (spec, hints[spec.name]) for spec in fields(kind)}


def _checked(name: str, value: Any, hint: Any, metadata: Mapping[str, Any]) -> Any:
    """`value` as the type that `hint` asks for and within its bounds, or SettingError."""
    if get_origin(hint) is tuple:
        items = value if isinstance(value, (list, tuple)) else (value,)
        return tuple(_checked(name, item, get_args(hint)[0], metadata) for item in items)
    if type(None) in get_args(hint):
        if value is None:
            return None
        hint = get_args(hint)[0]
    if hint is float and type(value) is int:
        value = float(value) if abs(value) < 2**64 else math.inf
    if type(value) is not hint:
        raise SettingError(name, f"must be {_TYPE_NAMES[hint]}, not {value!r:.80}")
    if metadata.get("path_after") is not None:
        return with_home(name, value, metadata["path_after"])
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingError(name, f"must be finite, not {value}")
    low, high = metadata.get("at_least"), metadata.get("at_most")
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
        raise SettingError(name, f"must be {bounds}, not {value!r:.80}")
    return value


def with_home(name: str, value: str, path_after: str = "") -> str:
    """`value` with the home folder in place of a `~` where its path begins; SettingError if there is none."""
    match = re.match(f"({path_after})(~.*)", value, re.DOTALL)
    if match is None:
        return value
    path = os.path.expanduser(match[2])  # noqa: PTH111 unlike Path, it leaves what it does not know
    if path.startswith("~"):
        raise SettingError(name, f"{match[2]}: no home folder is known for it; write the whole path, or ./{match[2]}")
    return match[1] + path


def field_names(*kinds: type) -> dict[str, str]:
    """All names of the settings in these classes, aliases too, each with the name of its field."""
    return {
        name: spec.name
        for kind in kinds
        for spec in fields(kind)
        for name in (spec.name, *spec.metadata.get("aliases", ()))
    }


def by_field(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """`values` under the names of their fields; SettingError if one setting is given under two names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if names[name] in found:
            raise SettingError(names[name], f"is given twice, the second time as {name}")
        found[names[name]] = value
    return found


def flag_names(spec: Field[Any]) -> list[str]:
    """The flags of a field; a field that is true by default also has one that turns it off."""
    flags = str(spec.metadata.get("flags") or "--" + spec.name.replace("_", "-"))
    if spec.default is True and "/" not in flags:
        flags = f"{flags}/--no-{flags[2:]}"
    return flags.split("/")


def as_flags(settings: Any) -> list[str]:
    """The command-line words that turn the defaults into these settings."""
    words = []
    for spec in fields(settings):
        value, flags = getattr(settings, spec.name), flag_names(spec)
        if value == spec.default:
            continue
        if isinstance(value, bool):
            words.append(flags[not value])
        else:
            words += [f"{flags[0]}={item}" for item in (value if isinstance(value, tuple) else [value])]
    return words
