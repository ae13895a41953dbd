"""Hypothesis strategies for what users, disks and other programs do to commands, settings, rows and files."""

from __future__ import annotations

import json
import struct
from typing import Any, get_args, get_type_hints

from hypothesis import strategies as st

from cbatch.config import RunConfig
from cbatch.settings import declared, flag_names

TEXTS = [
    *(
        "",
        " ",
        "-",
        "--",
        "-1",
        "0",
        "1",
        "2",
        "3",
        "17",
        "1e309",
        "-1e309",
        "nan",
        "inf",
        "-inf",
        "1e-320",
        "0x10",
        "1_0",
    ),
    *("99999999999", "99999999999999999999", "9" * 400, "-99999999999999999999", "4294967296", "0.5", "1.5", "true"),
    *(
        "None",
        "null",
        "[]",
        "{}",
        "é",
        "ａ",
        "\u2028",
        "\udcff",
        "🦀",
        "\x1b[31m",
        "\n",
        "\r\n",
        "\t",
        "%s",
        "%",
        "x" * 5000,
    ),
    *(
        "a/b",
        "a/b/c",
        "../x",
        "..",
        ".",
        "./",
        "//",
        "~nobody/x",
        "*",
        "[",
        "]",
        "**",
        "?",
        "a?b",
        "?split=",
        "x.jsonl/y",
    ),
    *("{{", "{% x %}", "{{ x", "{{ 1/0 }}", "{{ [].pop() }}", "{{ x.y.z }}", "{{ 'a' * 9 }}", "{% for x in %}", "{# "),
    *("hf://", "hf://x", "hf://a/b?split=", "s3://x/y", "file:///etc/passwd", "http://[", "@", "@in.jsonl", "@nowhere"),
    *("@out", "in.jsonl", "in.jsonl/", "other.jsonl", "empty.jsonl", "nowhere.jsonl", "folder", "out", "out.jsonl"),
    *(
        "out.parquet",
        "out.csv",
        "out.jsonl.gz",
        ".jsonl",
        "/dev/null",
        "/dev/full",
        "/proc/self/mem",
        "/proc/x",
        "model",
    ),
    *(
        "cuda",
        "cuda:7",
        "cuda:-1",
        "cpu",
        "mps",
        "0/0",
        "1/0",
        "0/2",
        "2/2",
        "0/99999999999",
        "-1/2",
        "none",
        "auto",
        "5%",
    ),
    *(
        "101%",
        "2h",
        "30m",
        "1-2:3:4",
        "99999999999999d",
        "00:00:61",
        "12",
        "<|im_end|>",
        "prompt",
        "messages",
        "id",
        "row",
    ),
]
NUMBERS = [
    0,
    1,
    2,
    3,
    7,
    -1,
    -2,
    255,
    256,
    299,
    300,
    2**16,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
]
FLOATS = [0.5, -0.0, 1e-320, 1.5, 1e308, float("inf"), float("-inf"), float("nan")]

texts = st.sampled_from(TEXTS) | st.text(max_size=20)
scalars = st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.sampled_from(FLOATS) | texts
keys = st.sampled_from(
    ["role", "content", "type", "text", "prompt", "messages", "id", "params", "max_tokens", "stop", "body"]
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys | texts, inner, max_size=3),
                      max_leaves=6)  # fmt: skip


@st.composite
def mostly(draw: st.DrawFn, good: st.SearchStrategy[Any], bad: st.SearchStrategy[Any]) -> Any:
    """What can be, and one time in six what can not."""
    return draw(good if draw(st.integers(0, 5)) else bad)


# Commands and settings

_PARTS = {name: kind for name, kind in get_type_hints(RunConfig).items() if name != "given"}
OPTIONS = {
    name: (spec, hint)
    for kind in _PARTS.values()
    for name, (spec, hint) in declared(kind).items()
    if "help" in spec.metadata and name != "output"
}

_LIKELY_TEXTS: dict[str, list[Any]] = {
    **{"template": ["x {{ prompt }}", "{{ id }}", "{{ row.id }}", "{{ y }}"], "data_parallel_size": ["auto", "2"]},
    **{"device": ["cpu"], "shard": ["0/1", "0/2", "1/2", "none"], "max_failures": ["none", "1", "5%", "0"]},
    **{
        "time_limit": ["none", "1h", "3600", "0:30:00"],
        "prompt_column": ["prompt", "id", "messages"],
        "model": ["./model"],
    },
}


def _likely(name: str) -> list[Any]:
    """Values of an option that it is likely to take, or nearly."""
    spec, hint = OPTIONS[name]
    found: list[Any] = list(spec.metadata.get("choices") or ())
    for bound in ("at_least", "at_most"):
        if (limit := spec.metadata.get(bound)) is not None:
            found += [limit, limit - 1, limit + 1, limit + 0.5]
    kinds = set(get_args(hint)) | {hint}
    if spec.default is not None and not isinstance(spec.default, tuple):
        found += [spec.default] * 3
    return found + ([1, 2, 5] if kinds & {int, float} else _LIKELY_TEXTS.get(name, ["x"]))


def _typed(name: str) -> list[Any]:
    """As `_likely`, for a file: true and false, and lists where an option may be repeated."""
    if bool in (OPTIONS[name][1], *get_args(OPTIONS[name][1])):
        return [True, False]
    return [[value] for value in _likely(name)] if "tuple" in str(OPTIONS[name][1]) else _likely(name)


@st.composite
def flags(draw: st.DrawFn) -> list[str]:
    """One option of the command, mostly with a value that it can't have."""
    name = draw(st.sampled_from(sorted(OPTIONS)))
    spec, hint = OPTIONS[name]
    flag = draw(st.sampled_from(flag_names(spec)))
    if bool in (hint, *get_args(hint)):
        return [flag] if draw(st.integers(0, 9)) else [flag, draw(texts)]
    value = draw(mostly(st.sampled_from(_likely(name)), texts))
    text = str(value).replace("\0", "")
    return [f"{flag}={text}"] if draw(st.booleans()) else [flag, text]


@st.composite
def tomls(draw: st.DrawFn) -> bytes:
    """A file of settings, some of which can't be, and it may be damaged."""
    written = []
    for name in draw(st.lists(st.sampled_from(sorted([*OPTIONS, *OPTIONS, "output", "rows", "x"])), max_size=5)):
        likely = st.sampled_from(_typed(name)) if name in OPTIONS else texts
        key = draw(st.sampled_from([name, name.replace("_", "-"), json.dumps(name)]))
        written.append(f"{key} = {_toml(draw(mostly(likely, values)))}\n".encode(errors="replace"))
    if draw(st.integers(0, 4)) == 0:
        written.append(
            draw(st.sampled_from([b"[x]\n", b"[[x]]\n", b"x.y = 1\n", b"= 1\n", b"a = 1979-05-27T07:32:00Z\n"]))
        )
    content = b"".join(written)
    content = draw(st.sampled_from([b""] * 8 + [b"\xef\xbb\xbf", b"\xff\xfe"])) + content
    return draw(damaged(content)) if draw(st.integers(0, 7)) == 0 else content


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float):
        return str(value).replace("e+", "e")
    return json.dumps(value, ensure_ascii=False) if value is not None else '"none"'


# Values in JSON


def places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in a value of JSON there is something, itself left out."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:40]) if isinstance(value, list) else ()
    return [found for key, item in items for found in ((*place, key), *places(item, (*place, key)))]


@st.composite
def changed(draw: st.DrawFn, value: Any, most: int = 3, replacements: st.SearchStrategy[Any] = values) -> Any:
    """A value of JSON in which some are others, are missing, or have another name."""
    value = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, most))):
        if not (found := places(value)):
            break
        *way, last = found[draw(st.integers(0, len(found) - 1))]
        holder = value
        for key in way:
            holder = holder[key]
        how, old = draw(st.integers(0, 7)), holder[last]
        if how == 0:
            del holder[last]
        elif how == 1 and isinstance(holder, dict):
            holder[draw(keys | texts)] = holder.pop(last)
        elif how == 2 and type(old) in (int, float):
            holder[last] = old * draw(st.sampled_from([-1, 0, 2, 3, 1000, 10**9, 0.5]))
        elif how == 3 and isinstance(holder, list):
            holder.append(old)
        else:
            holder[last] = draw(replacements)
    return value


def dumped(value: Any) -> bytes:
    """JSON as Python writes it: with NaN, and half surrogate pairs escaped."""
    return json.dumps(value).encode()


# Bytes


@st.composite
def damaged(draw: st.DrawFn, content: bytes, first: int | None = None) -> bytes:
    """Some bytes cut off, changed, doubled or put in; with `first` only among the first so many."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, min(len(data), first or len(data))))
        how = draw(st.integers(0, 6))
        if how == 0:
            del data[at:]
        elif how == 1:
            data[at:at] = draw(
                st.binary(max_size=8) | st.sampled_from([bytes(64), b"\xef\xbb\xbf", b"\n", b'"', b"\xff"])
            )
        elif how == 2:
            del data[at : at + draw(st.integers(1, 40))]
        elif how == 3:
            data[at:at] = data[at : at + draw(st.integers(1, 200))]
        elif how == 4:
            number = draw(st.sampled_from(NUMBERS)) % 2**64
            data[at : at + 8] = struct.pack("<Q", number)
        elif at < len(data):
            data[at] = data[at] ^ (1 << draw(st.integers(0, 7))) if how == 5 else draw(st.integers(0, 255))
    return bytes(data)


# Rows

_TEXT = "the rain in spain"
_MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": _TEXT}]}]
_TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
ROWS: list[dict[str, Any]] = [
    {"id": 1, "prompt": _TEXT, "params": {"max_tokens": 2, "temperature": 0.5, "stop": ["x"], "seed": 3, "top_k": 4}},
    {"id": 2, "messages": _MESSAGES, "params": {"stop_token_ids": [3], "min_tokens": 1, "ignore_eos": True}},
    {"id": 3, "messages": [*_MESSAGES, {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                           {"role": "tool", "tool_call_id": "c1", "content": "7"}], "tools": _TOOLS,
     "chat_template_kwargs": {"enable_thinking": True}},
    {"id": 4, "token_ids": [1, 50, 60, 70]},
    {"id": 5, "prompt": [1, 2, 3]},
    {"id": 6, "prompt": [{"role": "user", "content": _TEXT}]},
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
     "body": {"model": "m", "messages": _MESSAGES, "max_tokens": 2, "n": 1, "stop": "x", "temperature": 0, "logprobs": False}},
    {"custom_id": "b", "method": "POST", "url": "/v1/completions",
     "body": {"model": "m", "prompt": _TEXT, "max_tokens": 2, "presence_penalty": 0.5, "stream": False}},
    {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": [[1, 2, 3]]}},
]  # fmt: skip
_LINES = [b"", b" ", b"\t", b"null", b"[]", b"1", b'"x"', b"{}", b"{", b"}", b'{"prompt":', b"\xef\xbb\xbf{}", b"\xff\xfe", b"\0",
          b"[" * 3000, b'{"prompt": ' + b"[" * 3000, b'{"a":' * 500 + b"1" + b"}" * 500, b'{"prompt": "x"}{"prompt": "y"}',
          b'{"prompt": "a", "prompt": 7}', b'{"prompt": "\\ud800"}', b'{"prompt": 1e999}', b'{"prompt": NaN}', b"\r",
          b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}", b'{"prompt": "' + b"the rain " * 3000 + b'"}']  # fmt: skip


@st.composite
def bad_lines(draw: st.DrawFn) -> bytes:
    """One line of JSONL, that was a row before something changed it."""
    if draw(st.integers(0, 5)) == 0:
        return draw(st.sampled_from(_LINES))
    line = dumped(draw(changed(draw(st.sampled_from(ROWS)))))
    if draw(st.integers(0, 4)) == 0:
        line = draw(damaged(line))
    return line.replace(b"\n", b" ")
