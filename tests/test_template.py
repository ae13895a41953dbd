from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from cbatch.errors import RowError, UsageError
from cbatch.rows.template import Template

NOW = datetime(2026, 1, 31, 9, 30)
ORDER = {"order": {"items": ["pear"], "no": 7}}


def render(template: str, **columns: Any) -> str:
    return Template(template, NOW).render(columns)


def refused(template: str, **columns: Any) -> str:
    with pytest.raises(RowError) as caught:
        render(template, **columns)
    assert caught.value.kind == "template_error"
    return str(caught.value)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ order.items }}", '["pear"]'),
        ("{{ order['items'][0] }}", "pear"),
        ("{% for key, value in order.items() %}{{ key }}={{ value }};{% endfor %}", 'items=["pear"];no=7;'),
        ("{{ order.keys() | list }}", '["items", "no"]'),
        ("{{ order.get('gone', 'none') }}", "none"),
        ("{{ order }}", '{"items": ["pear"], "no": 7}'),
        ("{{ order.no + 1 }}, {{ order.no is number }}", "8, True"),
        ("{{ 'a' ~ order.items }}", 'a["pear"]'),
        ("{{ '%s' % order.no }}", "7"),
        ("{{ '%s' % order }}", '{"items": ["pear"], "no": 7}'),
        ("{{ '%(no)s' % order }}", "7"),
        ("{{ order['items'] | map('upper') | join }}", "PEAR"),
        ("{{ 'a b' | wordwrap(1, true, none) }}", "a\nb"),
        ("{% filter upper %}{{ order.no }} x{% endfilter %}", "7 X"),
        ("{{ range(3) | join('-') }}", "0-1-2"),
    ],
)
def test_keys_win_over_attributes_and_methods_can_still_be_called(template: str, expected: str) -> None:
    assert render(template, **ORDER) == expected


@pytest.mark.parametrize(
    "template",
    [
        *("{{ order.values }}", "{{ order.keys }}", "{{ order.gone }}", "{{ range }}", "{{ dict }}", "{{ namespace }}"),
        *("{{ title.title }}", "{{ 'x' ~ title.title }}", "{{ '%s' % title.title }}", "{{ [title.title] }}"),
        *("{{ title.title | string }}", "{{ [order.keys] | join }}", "{{ '{}'.format(title.title) }}", "{{ cycler }}"),
        *("{{ order.keys | tojson }}", "{{ order.items | map('upper') }}", "{% macro m() %}{% endmacro %}{{ m }}"),
        *(
            "{{ [none_] | map('upper') | list }}",
            "{{ 's' | replace('s', none_) }}",
            "{{ '%s' % order }}x{{ none_ | trim }}",
        ),
        *("{{ 1e308 * 10 }}", "{{ 'a%s' | format(none_) }}", "{{ '%(a)s' % {'a': none_} }}", "{{ none_ ~ 'x' }}"),
        *("{{ namespace(a=1) }}", "{{ order.__class__ }}", "{{ gone }}", "{{ row.gone }}", "{{ none_ }}", "{{ {}.x }}"),
    ],
)
def test_no_function_object_or_missing_value_is_ever_printed(template: str) -> None:
    refused(template, **ORDER, title="t", none_=None)


def test_json_is_that_of_transformers_chat_templates() -> None:
    doc = {"b": "Ça & l'été <b>", "a": [1, 2.5, None, True]}
    for template in ("{{ doc | tojson }}", "{{ doc | tojson(indent=2) }}", "{{ doc.b }} {{ doc.a | length }}"):
        messages = [{"role": "user", "content": "", "doc": doc}]
        expected, _ = render_jinja_template([messages], chat_template=template.replace("doc", "messages[0].doc"))
        assert render(template, doc=doc) == expected[0]
    assert json.loads(render("{{ doc | tojson }}", doc=doc)) == doc


@pytest.mark.parametrize(
    ("template", "columns", "expected"),
    [
        ('{{ row["Review Text"] }}, {{ row["user.name"] }}', {"Review Text": "good", "user.name": "u"}, "good, u"),
        ("{{ row }}", {"row": 5}, "5"),
        ("{{ range }} {{ loop }} {{ dict }}", {"range": "r", "loop": "l", "dict": "d"}, "r l d"),
        ("{{ data }}", {"data": b"text"}, "text"),
        ("{% if x %}yes{% else %}no{% endif %}", {"x": float("nan")}, "no"),
        ('{{ row["self"] }}', {"self": "s"}, "s"),
    ],
)
def test_a_column_of_any_name_can_be_reached(template: str, columns: dict[str, Any], expected: str) -> None:
    assert Template(template, NOW).render(columns) == expected


def test_an_error_says_how_a_column_whose_name_is_no_identifier_is_written() -> None:
    columns = {"Review Text": "good"}
    with pytest.raises(
        RowError, match=r"'Review' is undefined; column 'Review Text' is \{\{ row\[\"Review Text\"\] \}\}"
    ):
        Template("{{ Review }}", NOW).render(columns)
    with pytest.raises(UsageError, match=r"line 1: .* A column whose name is no identifier is"):
        Template("{{ Review Text }}", NOW)


@pytest.mark.parametrize("value", [b"\xff\xfe", [b"\xff"], {"a": b"\xff"}])
def test_bytes_that_are_no_text_fail_their_row(value: Any) -> None:
    refused("{{ data }}", data=value)
    refused("{{ data | tojson }}", data=value)


def test_a_template_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_bytes(b"\xef\xbb\xbfSay {{ x }}")
    assert Template(f"@{tmp_path / 't.jinja'}", NOW).render({"x": "hi"}) == "Say hi"


def test_the_time_is_that_of_the_job() -> None:
    assert render("{{ strftime_now('%d %B %Y %H:%M') }}") == "31 January 2026 09:30"


@pytest.mark.parametrize("name", ["random", "pprint", "urlencode"])
def test_filters_that_are_not_repeatable_or_not_for_prompts_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"No filter named '{name}'"):
        Template(f"{{{{ x | {name} }}}}", NOW)


def test_a_template_may_refuse_a_row_in_its_own_words() -> None:
    assert "too short" in refused("{{ raise_exception('too short') }}")
