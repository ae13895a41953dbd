"""The Jinja of `--template`: that of transformers' chat templates, for data of any keys.

Stock Jinja is made for web pages, whose data a programmer shaped. Here names and attributes are columns and keys, whatever
they are called, and functions and methods exist only where they are called: `{{ order.items }}` is the key, and
`order.items()` the method. So no function is ever shown, which would be an address in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import wraps
from string import Formatter
from typing import Any, NoReturn

from jinja2 import StrictUndefined, TemplateError, Undefined, nodes, pass_environment
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.visitor import NodeTransformer

_PRINTED, _METHOD, _FUNCTION = "printed value", "method of", "function named"  # filters that no template can spell
_TEXT_FILTERS = (  # make a text of what they are given
    *("capitalize", "center", "e", "escape", "forceescape", "format", "indent", "lower", "replace", "safe", "string"),
    *("striptags", "title", "trim", "truncate", "upper", "wordcount", "wordwrap"),
)
_SHOW_ARGUMENTS = ("format", "replace")
_NO_FILTERS = ("random", "pprint", "urlencode", "urlize", "xmlattr")  # not repeatable, for Python, and for web pages


class PromptEnvironment(ImmutableSandboxedEnvironment):
    """The environment in which `--template` is compiled. `now`: the moment that `strftime_now` tells."""

    intercepted_binops = frozenset("%")

    def __init__(self, now: datetime) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
            undefined=StrictUndefined,
            finalize=printed,
        )
        functions = {name: self.globals[name] for name in ("range", "dict", "namespace", "cycler", "joiner")}
        functions |= {"raise_exception": _raise_exception, "strftime_now": now.strftime}
        self.globals.clear()
        self.filters |= {"tojson": to_json, "join": _join}
        self.filters |= {_PRINTED: printed, _METHOD: _method, _FUNCTION: functions.__getitem__}
        self.filters |= {name: _of_printed(name, self.filters[name]) for name in _TEXT_FILTERS}
        for name in _NO_FILTERS:
            del self.filters[name]
        self._calls = _Calls(functions)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """The value of a key or a data attribute; undefined if there is none."""
        return self.getitem(obj, attribute) if isinstance(obj, dict) else self._data(super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """The value of a key, an index or a data attribute; undefined if there is none."""
        if isinstance(obj, dict):
            return obj[argument] if argument in obj else self.undefined(obj=obj, name=argument)
        return self._data(super().getitem(obj, argument))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The remainder, or the text that `'...%s...' % values` makes."""
        if isinstance(left, str):
            if isinstance(right, dict) and "%(" in left:
                right = {key: printed(value) for key, value in right.items()}
            else:
                right = tuple(map(printed, right)) if isinstance(right, tuple) else printed(right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`'...'.format`, whose fields are printed by the rule of all others; None for anything else."""
        text = getattr(value, "__self__", None)
        if not isinstance(text, str) or value.__name__ not in ("format", "format_map"):
            return None
        if value.__name__ == "format_map":
            return lambda mapping: _PrintedFields(self).vformat(text, (), mapping)
        return lambda *args, **kwargs: _PrintedFields(self).vformat(text, args, kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = self._calls.visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        assert isinstance(tree, nodes.Template)
        return tree

    def _data(self, value: Any) -> Any:
        """A value that was looked up, undefined if it is a function."""
        if callable(value) and not isinstance(value, Undefined):
            return self.undefined(
                f"{getattr(value, '__name__', 'this')!r} is a function; write () behind it to call it"
            )
        return value


class _Calls(NodeTransformer):
    """Rewrites a template so that functions and methods are looked up only by calls, and every text is made of printed
    values.
    """

    def __init__(self, functions: Iterable[str]) -> None:
        self._functions = frozenset(functions)

    def visit_Call(self, node: nodes.Call) -> nodes.Node:  # noqa: N802
        callee = node.node
        self.generic_visit(node)
        if isinstance(callee, nodes.Getattr):
            node.node = _filtered(callee.node, _METHOD, nodes.Const(callee.attr))
        elif isinstance(callee, nodes.Name) and callee.name in self._functions:
            node.node = _filtered(nodes.Const(callee.name, lineno=node.lineno), _FUNCTION)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_filtered(operand, _PRINTED) for operand in node.nodes]
        return node


class _PrintedFields(SandboxedFormatter, Formatter):
    """Formats as `str.format` does, with values printed by the rule of all others."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        return super().format_field(printed(value), format_spec)


def printed(value: Any) -> Any:
    """A value as it is shown in a prompt, lists and objects as JSON; TypeError if it has no text."""
    if isinstance(value, str):
        return value
    if isinstance(value, Undefined):
        return str(value)  # raises, in its own words
    if value is None:
        raise TypeError("a value to be shown is null; write {{ x or '' }} to leave it out")
    if isinstance(value, (dict, list, tuple)):
        return to_json(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"a value to be shown is {value}, which is no number")
    return value if isinstance(value, (int, float)) else _text(value)


def to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers' chat templates have it: characters as they are, keys in their order."""
    options: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(x, ensure_ascii=ensure_ascii, allow_nan=False, default=_text, **options)


def _text(value: Any) -> str:
    """The text of a value that JSON does not have; TypeError if it is not a plain value."""
    if isinstance(value, Undefined):
        return str(value)  # raises, in its own words
    if isinstance(value, bytes):
        raise TypeError("a value to be shown is bytes that are not UTF-8")
    raise TypeError(f"a {type(value).__name__} can't be shown")


def _of_printed(name: str, text_filter: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that makes a text of values by the rule of all others, also where `map` applies it."""
    first = int(hasattr(text_filter, "jinja_pass_arg"))  # behind the environment or the like
    shows = printed if name in _SHOW_ARGUMENTS else lambda value: value

    @wraps(text_filter)
    def of_printed(*args: Any, **kwargs: Any) -> Any:
        named = {key: shows(value) for key, value in kwargs.items()}
        return text_filter(*args[:first], printed(args[first]), *map(shows, args[first + 1 :]), **named)

    return of_printed


def _filtered(node: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


@pass_environment
def _method(environment: PromptEnvironment, obj: Any, name: str) -> Any:
    """A method of an object, within the rules of Jinja's sandbox."""
    return super(PromptEnvironment, environment).getattr(obj, name)


@pass_environment
def _join(environment: PromptEnvironment, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    """Jinja's join, whose items are printed by the rule of all others."""
    items = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    return str(d).join(str(printed(item)) for item in items)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
