from __future__ import annotations

import gzip
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbatch import __version__
from cbatch.errors import FATAL, INTERRUPTED, OK, READER_GONE, SOME_FAILED, USAGE, Fatal, UsageError
from cbatch.watch import progress
from tests.child import SLOW, Child
from tests.conftest import Cbatch
from tests.jobs import num_records, prompt, records, replace_start_engine, row_numbers, run_job, summary, write_input
from tests.tiny import generate, make_config, make_model, make_tokenizer, save_model

LAYOUTS = [
    {"output": "out"},
    {"output": "out", "format": "parquet"},
    {"output": "out", "ordered": True},
    {"output": "out.jsonl"},
    {"output": "out.parquet", "ordered": True},
]
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: "-".join(map(str, x.values())))


pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.fixture
def job(tiny_model: Path) -> Callable[..., int]:
    """Runs a job in this process: job(max_tokens=3, ...)."""

    def run(*inputs: str, **settings: Any) -> int:
        return run_job(*inputs, **{"model": str(tiny_model), "output": "out", "max_tokens": 4, **settings})

    return run


def snapshot() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


# Rows in, records out


def test_each_row_is_completed_with_what_the_model_itself_generates(job: Callable[..., int]) -> None:
    write_input(12)
    assert job(max_tokens=6) == OK
    model, tokenizer = make_model(make_config()), make_tokenizer()
    for row, record in enumerate(records()):
        assert {name: record[name] for name in prompt(row)} == prompt(row)
        message = [{"role": "user", "content": prompt(row)["prompt"]}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True)["input_ids"]
        expected = generate(model, ids, 6, eos_token_id=2)
        ended = expected[-1] == 2
        text = tokenizer.decode(expected[:-1] if ended else expected, skip_special_tokens=True)
        assert (record["completion"], record["finish_reason"]) == (text, "stop" if ended else "length")
        assert (record["prompt_tokens"], record["completion_tokens"]) == (len(ids), len(expected) - ended)
        assert (record["row"], record["source"]) == (row, "in.jsonl")
        assert (record["error"], record["error_kind"]) == (None, None)


@every_layout
def test_every_layout_holds_the_same_records(job: Callable[..., int], layout: dict[str, Any]) -> None:
    write_input(9, bad=(4,))
    assert job(output="plain.jsonl") == SOME_FAILED
    assert job(**layout) == SOME_FAILED
    found, expected = records(layout["output"]), records("plain.jsonl")
    if "parquet" in (layout["output"].partition(".")[2], layout.get("format")):
        found = [
            {**record, "meta": json.loads(record["meta"]), "prompt": json.loads(record["prompt"])} for record in found
        ]
    assert found == expected


def test_ids_are_echoed_as_they_are_and_tell_no_rows_apart(job: Callable[..., int]) -> None:
    ids = ["a", "a", 1, "1", 1.0, None, "", "a/../b", "x" * 10_000, [1], True]
    Path("in.jsonl").write_text("".join(json.dumps({"id": row_id, "prompt": "the"}) + "\n" for row_id in ids))
    Path("b.jsonl").write_text('{"id": "a", "prompt": "the"}\n{"prompt": "the"}\n')
    assert job("in.jsonl", "b.jsonl", max_tokens=2) == OK
    found = sorted(records(), key=lambda record: (record["source"] != "in.jsonl", record["row"]))
    assert [(record["source"], record["row"]) for record in found] == [
        *(("in.jsonl", row) for row in range(len(ids))),
        ("b.jsonl", 0),
        ("b.jsonl", 1),
    ]
    assert [repr(record["id"]) for record in found[:-1]] == [*map(repr, ids), "'a'"]
    assert "id" not in found[-1]


def test_rows_in_an_ordered_output_stand_as_in_the_input_whatever_finishes_first(job: Callable[..., int]) -> None:
    rows = [{"prompt": "the", "params": {"max_tokens": 40 - 3 * row, "ignore_eos": True}} for row in range(12)]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job(output="asis.jsonl")
    job(output="ordered.jsonl", ordered=True)
    as_is, ordered = (
        [json.loads(line)["row"] for line in Path(name).read_bytes().splitlines()]
        for name in ("asis.jsonl", "ordered.jsonl")
    )
    assert ordered == list(range(12))
    assert as_is != ordered
    assert sorted(as_is) == ordered


def test_failed_rows_are_records_of_their_own_kind_and_are_counted(job: Callable[..., int]) -> None:
    lines = [
        '{"prompt": "the rain"}',
        '{"prompt": ""}',
        '{"messages": [{"role": "user"}]}',
        '{"prompt": "the", "params": {"temperature": "hot"}}',
        json.dumps({"prompt": "in the rain " * 400}),
        '{"prompt": ',
        '{"prompt": "the end"}',
    ]
    Path("in.jsonl").write_text("\n".join(lines) + "\n")
    assert job(chat=False) == SOME_FAILED
    found = records()
    assert [record["row"] for record in found] == list(range(7))
    failed = found[1:6]
    assert [record["finish_reason"] for record in failed] == ["error"] * 5
    assert [record["completion"] for record in failed] == [None] * 5
    assert all(f"in.jsonl:{record['row'] + 1}: " in record["error"] for record in failed)
    assert len({record["error_kind"] for record in failed}) == 5
    figures = summary()
    assert figures["rows"] == {
        "total": 7,
        "done_earlier": 0,
        "failed_earlier": 0,
        "ok": 2,
        "failed": 5,
        "length_limited": sum(record["finish_reason"] == "length" for record in found),
        "errors": Counter(record["error_kind"] for record in failed),
        "remarks": {},
    }
    assert figures["versions"]["cbatch"] == __version__
    assert figures["finished"]


# Going on


def test_a_finished_job_run_again_changes_no_record_and_loads_no_weights(
    job: Callable[..., int], tiny_model: Path
) -> None:
    write_input(5)
    shutil.copytree(tiny_model, "model")
    assert job(model="model") == OK
    before = {path: path.read_bytes() for path in Path("out").glob("part-*")}
    weights = Path("model/model.safetensors")
    content = weights.read_bytes()
    weights.write_bytes(content)  # the same
    loaded: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        replace_start_engine(loaded.append, patch)
        assert job(model="model") == OK
    assert not loaded
    assert {path: path.read_bytes() for path in Path("out").glob("part-*")} == before
    assert summary()["rows"] | {"errors": 0, "remarks": 0} == {
        "total": 5,
        "done_earlier": 5,
        "failed_earlier": 0,
        "ok": 0,
        "failed": 0,
        "length_limited": 0,
        "errors": 0,
        "remarks": 0,
    }


@every_layout
def test_a_higher_limit_adds_rows(job: Callable[..., int], layout: dict[str, Any]) -> None:
    write_input(9)
    for limit, expected in ((3, 3), (2, 3), (0, 3), (7, 7), (None, 9)):
        assert job(limit=limit, **layout) == OK
        assert row_numbers(layout["output"]) == list(range(expected))


@every_layout
def test_failed_rows_stay_until_a_retry_and_then_stand_once(job: Callable[..., int], layout: dict[str, Any]) -> None:
    """Rows 2 and 4 fail for want of KV cache. That is no setting of the job, so more of it mends them."""
    write_input(6)
    rows = [json.loads(line) for line in Path("in.jsonl").read_text().splitlines()]
    for row in (2, 4):
        rows[row]["prompt"] = "xyz " * 60
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    little = 256 * 128 / 1024**3  # 128 tokens of 2 layers, 2 heads of 8, K and V, 4 bytes
    output = layout["output"]

    assert job(kv_cache_memory=little, **layout) == SOME_FAILED
    failed = [record["row"] for record in records(output) if record["error"]]
    assert failed == [2, 4]
    assert job(**layout) == SOME_FAILED  # nothing to do, but the output still holds failed rows
    assert [record["row"] for record in records(output) if record["error"]] == [2, 4]
    assert summary(output)["rows"]["failed_earlier"] == 2
    good = [record for record in records(output) if not record["error"]]
    assert job(retry_failed=True, **layout) == OK
    found = records(output)
    assert [record["row"] for record in found] == list(range(6))
    assert not any(record["error"] for record in found)
    assert [record for record in found if record["row"] not in (2, 4)] == good
    assert summary(output)["rows"]["ok"] == 2
    assert job(retry_failed=True, **layout) == OK


def test_settings_that_change_completions_are_refused_with_what_differs(
    job: Callable[..., int], tiny_model: Path
) -> None:
    write_input(4)
    shutil.copytree(tiny_model, "model")
    save_model(Path("other"), make_config(num_hidden_layers=1))
    Path("template").write_text("{{ prompt }}")
    given = {"model": "model", "temperature": 1.0}
    assert job(**given) == OK
    before = snapshot()
    changes: dict[str, dict[str, Any]] = {
        "model model.safetensors": {"model": "other"},
        "temperature: 1.0 before, 0.5 now": {"temperature": 0.5},
        "seed: ": {"seed": 3},
        'stop: [] before, ["a"] now': {"stop": ("a",)},
        "max_tokens: 4 before, 5 now": {"max_tokens": 5},
        'system: null before, "Be brief" now': {"system": "Be brief"},
        'template: null before, "{{ prompt }}" now': {"template": "@template"},
        "chat: true before, false now": {"chat": False},
        "prompt_column": {"prompt_column": "id"},
        "max_model_len: 512 before, 100 now": {"max_model_len": 100},
        'dtype: "float32" before, "bfloat16" now': {"dtype": "bfloat16"},
        'quantization: null before, "int8" now': {"quantization": "int8"},
        'kv_cache_dtype: "auto" before, "int8" now': {"kv_cache_dtype": "int8"},
        'format: "jsonl" before, "parquet" now': {"format": "parquet"},
        "ordered: false before, true now": {"ordered": True},
        'prefix: "" before, "gen_" now': {"prefix": "gen_"},
        "inputs: ": {"inputs": ("in.jsonl", "template.jsonl")},
    }
    Path("template.jsonl").write_text('{"prompt": "the"}\n')
    before = snapshot()
    for difference, change in changes.items():
        with pytest.raises(UsageError) as refused:
            job(**{**given, **change})
        assert difference in str(refused.value)
        assert "--overwrite" in str(refused.value)
        assert snapshot() == before
    for file in ("model.safetensors", "tokenizer.json", "config.json", "chat_template.jinja"):
        path = Path("model", file)
        content = path.read_bytes()
        path.write_bytes(content[:-1] + b"\x01" if file == "model.safetensors" else content + b" ")
        with pytest.raises(UsageError, match=f"model {file}"):
            job(**given)
        path.write_bytes(content)
    assert job(**given) == OK


def test_a_job_with_a_cache_of_int8_goes_on_and_its_rows_do_not_depend_on_the_batch(
    job: Callable[..., int], cbatch: Cbatch
) -> None:
    model, root = save_model(Path("model"), make_config(head_dim=16)), str(Path(__file__).parent.parent)
    write_input(9)
    given: dict[str, Any] = {"model": str(model), "max_tokens": 40, "ignore_eos": True}
    eight = {"kv_cache_dtype": "int8", "quantization": "int8"}
    assert job(**given, **eight, limit=4) == OK
    flags = ["--max-tokens", 40, "--ignore-eos", "--kv-cache-dtype", "int8", "--quantization", "int8"]
    done = cbatch("run", "in.jsonl", "-m", model, "-o", "out", *flags, PYTHONPATH=root)
    assert done.returncode == OK, done.stderr
    assert " tokens in int8" in done.stderr
    slices = {"max_num_seqs": 1, "max_num_batched_tokens": 7, "enable_prefix_caching": False}
    assert job(**given, **eight, **slices, output="other") == OK
    assert records("out") == records("other")
    assert job(**given, quantization="int8", output="plain") == OK
    assert records("plain") != records("out")


def test_settings_that_only_change_the_pace_go_on(job: Callable[..., int], tiny_model: Path) -> None:
    write_input(14)
    changes: list[dict[str, Any]] = [
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 16},
        {"block_size": 16, "enable_prefix_caching": False},
        {"kv_cache_memory": 0.01, "threads": 2},
        {"progress": "json"},
        {"shard_rows": 3},
        {"scheduling": "static"},
        {"device": "cpu"},
        {"format": "jsonl", "chat": True, "max_model_len": 512, "dtype": "float32"},  # what they are anyway
        {"model": str(shutil.copytree(tiny_model, "moved"))},
    ]
    for limit, change in enumerate([{}, *changes], 1):
        assert job(limit=limit, **change) == OK
        assert row_numbers() == list(range(limit))


def test_a_chosen_seed_is_kept_when_the_job_goes_on(job: Callable[..., int]) -> None:
    write_input(8)
    assert job(temperature=1.5, limit=4) == OK
    seed = json.loads(Path("out/.cbatch/manifest.json").read_text())["seed"]
    assert job(temperature=1.5) == OK
    assert job(temperature=1.5, seed=seed, output="again") == OK
    assert records() == records("again")
    assert job(temperature=1.5, output="another") == OK
    assert records() != records("another")


def test_a_command_that_was_refused_leaves_no_settings_behind(job: Callable[..., int]) -> None:
    write_input(3)
    for wrong in ({"max_model_len": 9999}, {"device": "abacus"}, {"kv_cache_memory": 0.0}, {"model": "nowhere/at/all"}):
        with pytest.raises(UsageError):
            job(**wrong)
    assert job(max_tokens=2) == OK
    assert row_numbers() == [0, 1, 2]


def test_input_of_another_size_is_refused(job: Callable[..., int]) -> None:
    write_input(5)
    assert job(limit=3) == OK
    before = snapshot()
    with Path("in.jsonl").open("a") as file:
        file.write('{"prompt": "one more"}\n')
    with pytest.raises(UsageError, match="input sizes: "):
        job()
    after = snapshot()
    del before["in.jsonl"], after["in.jsonl"]
    assert after == before


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=["jsonl", "parquet", "ordered"])
def test_a_done_row_with_other_content_is_refused_by_its_line(job: Callable[..., int], layout: dict[str, Any]) -> None:
    write_input(5)
    assert job(limit=3, **layout) == OK
    content = Path("in.jsonl").read_text()
    Path("in.jsonl").write_text(content.replace("rain 4", "pain 4"))  # not done yet
    assert job(limit=4, **layout) == OK
    Path("in.jsonl").write_text(content.replace("rain 1", "pain 1"))
    with pytest.raises(Fatal, match=r"in\.jsonl:2: this row has changed"):
        job(**layout)
    Path("in.jsonl").write_text(content)
    assert job(**layout) == OK
    assert row_numbers() == list(range(5))


def test_overwriting_starts_anew_with_other_settings(job: Callable[..., int]) -> None:
    write_input(5)
    assert job(shard_rows=2) == OK
    Path("out/notes.txt").write_text("mine")
    assert job(shard_rows=100, max_tokens=2, overwrite=True) == OK
    assert row_numbers() == list(range(5))
    assert max(record["completion_tokens"] for record in records()) == 2
    assert sorted(path.name for path in Path("out").iterdir()) == [".cbatch", "notes.txt", "part-00000.jsonl"]
    with pytest.raises(UsageError, match="max_tokens: 2 before"):
        job()


def test_overwriting_removes_nothing_if_the_command_is_wrong(job: Callable[..., int]) -> None:
    write_input(5)
    assert job() == OK
    before = snapshot()
    for wrong in (
        {"max_model_len": 9999},
        {"device": "abacus"},
        {"system": "x", "model": "none"},
        {"format": "parquet"},
    ):
        if "format" in wrong:  # Parquet can't be made of a column that is there already
            Path("in.jsonl").write_text('{"prompt": "the", "completion": "the"}\n')
            before = snapshot()
        with pytest.raises(UsageError):
            job(overwrite=True, **wrong)
        assert snapshot() == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_input_is_never_replaced_by_the_output(job: Callable[..., int], overwrite: bool) -> None:
    write_input(3)
    Path("folder").mkdir()
    write_input(3, "folder/part-00007.jsonl")
    os.link("in.jsonl", "same.jsonl")
    Path("link.jsonl").symlink_to("in.jsonl")
    before = snapshot()
    for given, output in [
        ("in.jsonl", "in.jsonl"),
        ("in.jsonl", "./in.jsonl"),
        ("in.jsonl", "same.jsonl"),
        ("link.jsonl", "in.jsonl"),
        ("folder/part-00007.jsonl", "folder"),
    ]:
        with pytest.raises(UsageError):
            job(given, output=output, overwrite=overwrite)
        after = {name: content for name, content in snapshot().items() if not name.endswith("/lock")}
        assert after == before


def test_an_output_beside_the_input_is_fine(job: Callable[..., int]) -> None:
    Path("work").mkdir()
    write_input(3, "work/in.jsonl")
    assert job("work", output="work/out") == OK
    assert job("work", output="work/out") == OK
    assert job("work/in.jsonl", output="work") == OK
    assert row_numbers("work/out") == row_numbers("work") == [0, 1, 2]


@pytest.mark.parametrize("given", ["out/part-notes.jsonl", "out", "out/*.jsonl"])
def test_a_file_in_the_output_folder_that_is_no_shard_is_an_input_like_any_other(
    job: Callable[..., int], given: str
) -> None:
    Path("out").mkdir()
    write_input(3, "out/part-notes.jsonl")
    content = Path("out/part-notes.jsonl").read_bytes()
    for settings in ({}, {"retry_failed": True}, {"overwrite": True}):
        assert job(given, **settings) == OK
        found = [json.loads(line) for line in Path("out/part-00000.jsonl").read_text().splitlines()]
        assert sorted((record["source"], record["row"]) for record in found) == [
            ("out/part-notes.jsonl", row) for row in range(3)
        ]
        assert Path("out/part-notes.jsonl").read_bytes() == content
    with pytest.raises(UsageError, match="would be overwritten as the output"):
        job("out/part-00000.jsonl")


def damaged_gzip(name: str, num_rows: int) -> int:
    """A gzip file of rows that breaks off; how many can be read."""
    rows = b"".join(json.dumps(prompt(row)).encode() + b"\n" for row in range(num_rows))
    Path(name).write_bytes(gzip.compress(rows)[:-400])
    readable = 0
    try:
        with gzip.open(name) as file:
            for _ in file:
                readable += 1
    except EOFError:
        return readable
    raise AssertionError("it can be read to its end")


def test_an_input_that_breaks_off_is_told_and_never_taken_for_done(job: Callable[..., int]) -> None:
    readable = damaged_gzip("in.jsonl.gz", 300)
    assert 20 < readable < 300
    assert job("in.jsonl.gz") == SOME_FAILED
    assert [(record["row"], record["error_kind"]) for record in records() if record["error"]] == [
        (readable, "read_error")
    ]
    assert job("in.jsonl.gz") == SOME_FAILED  # nothing is left to do, and that is still wrong
    assert row_numbers() == list(range(readable + 1))
    assert job("in.jsonl.gz", output="skipped", skip=readable + 50) == SOME_FAILED
    assert [record["error_kind"] for record in records("skipped")] == ["read_error"]


def test_an_input_that_breaks_off_before_rows_that_are_done_ends_the_job(job: Callable[..., int]) -> None:
    whole = b"".join(json.dumps(prompt(row)).encode() + b"\n" for row in range(300))
    Path("in.jsonl.gz").write_bytes(gzip.compress(whole))
    assert job("in.jsonl.gz", limit=250) == OK
    content = bytearray(Path("in.jsonl.gz").read_bytes())
    content[len(content) // 3 : len(content) // 3 + 30] = bytes(30)
    Path("in.jsonl.gz").write_bytes(content)
    with pytest.raises(Fatal, match=r"Rows from here on were read before|this row has changed since"):
        job("in.jsonl.gz")


def test_a_retry_of_a_part_is_refused(job: Callable[..., int]) -> None:
    write_input(8, bad=(3, 7))
    assert job() == SOME_FAILED
    for part in ({"limit": 4}, {"skip": 5}):
        with pytest.raises(UsageError, match="--retry-failed"):
            job(retry_failed=True, **part)
    assert row_numbers() == list(range(8))


def test_a_refused_retry_changes_nothing(job: Callable[..., int]) -> None:
    write_input(6, bad=(5,))
    assert job() == SOME_FAILED
    right = Path("in.jsonl").read_bytes()
    Path("in.jsonl").write_bytes(b'{"prompt": "new"}\n' + right)
    with pytest.raises(Fatal, match="has changed since"):
        job(retry_failed=True)
    Path("in.jsonl").write_bytes(right)
    assert job() == SOME_FAILED
    assert row_numbers() == list(range(6))


def test_overwriting_waits_for_the_engine(job: Callable[..., int]) -> None:
    write_input(5)
    assert job() == OK
    before = snapshot()
    with pytest.raises(UsageError, match="--kv-cache-memory"):
        job(overwrite=True, kv_cache_memory=0.0, max_tokens=2)
    assert {name: content for name, content in snapshot().items() if "part-" in name} == {
        name: content for name, content in before.items() if "part-" in name
    }
    assert job() == OK


def test_a_job_that_completed_nothing_binds_to_no_settings(job: Callable[..., int]) -> None:
    write_input(4, bad=(0, 1, 2, 3))
    assert job() == SOME_FAILED
    write_input(6)
    assert job(max_tokens=2) == OK
    assert row_numbers() == list(range(6))


def test_copies_of_a_row_differ_whatever_was_skipped_at_first(job: Callable[..., int]) -> None:
    Path("in.jsonl").write_text('{"id": "a", "prompt": "the rain"}\n' * 6)
    settings = {"temperature": 1.0, "seed": 1, "max_tokens": 12}
    assert job(output="whole", **settings) == OK
    assert job(skip=2, **settings) == OK
    assert job(**settings) == OK
    texts = {record["row"]: record["completion"] for record in records()}
    assert texts == {record["row"]: record["completion"] for record in records("whole")}
    assert len(set(texts.values())) == 6


@pytest.mark.parametrize("cut", [-42, -17, -1])
def test_an_index_that_lost_its_end_is_made_anew(job: Callable[..., int], cut: int) -> None:
    write_input(30)
    assert job(limit=20, shard_rows=10) == OK
    index = Path("out/.cbatch/part-00001.idx")
    index.write_bytes(index.read_bytes()[:cut])
    assert job(shard_rows=10) == OK
    assert row_numbers() == list(range(30))


def test_less_memory_costs_rows_but_changes_none(job: Callable[..., int]) -> None:
    write_input(4)
    assert job(max_tokens=100, ignore_eos=True, kv_cache_memory=2**-16, block_size=4) == SOME_FAILED
    assert {record["error_kind"] for record in records()} == {"kv_cache_too_small"}
    assert all("in.jsonl:" in record["error"] for record in records())
    assert job(max_tokens=100, ignore_eos=True, retry_failed=True) == OK
    assert {record["completion_tokens"] for record in records()} == {100}


def test_a_template_that_fits_no_row_is_refused(job: Callable[..., int]) -> None:
    write_input(3)
    with pytest.raises(UsageError, match=r"in.jsonl:1: --template: 'promt' is undefined. Columns: id, prompt"):
        job(template="{{ promt }}")


def test_a_column_called_body_makes_no_request(job: Callable[..., int]) -> None:
    Path("in.jsonl").write_text('{"body": "Dear all", "title": "rain"}\n')
    with pytest.raises(UsageError, match="Columns: body, title"):
        job()
    assert job(prompt_column="title") == OK


@pytest.mark.parametrize("name", ["out/part-00000.jsonl", "out/part-00003.parquet", "out.jsonl"])
def test_files_that_cbatch_did_not_make_are_left_alone(job: Callable[..., int], name: str) -> None:
    write_input(2)
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("mine")
    with pytest.raises(UsageError, match="was not made by cbatch"):
        job(output=name.split("/")[0])
    assert Path(name).read_text() == "mine"


# Nothing to do


def no_engine(*_: object) -> None:
    raise AssertionError("the weights would be loaded")


@pytest.mark.parametrize("kind", ["0 bytes", "blank lines", "0-row Parquet", "limit 0", "skipped", "stdin at its end"])
@pytest.mark.parametrize("output", ["out", "out.parquet"])
def test_an_input_without_rows_gives_an_empty_output_without_the_weights(
    job: Callable[..., int], kind: str, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_start_engine(no_engine, monkeypatch)
    write_input(3)
    inputs, settings = ("in.jsonl",), {}
    if kind == "0 bytes":
        Path("in.jsonl").write_bytes(b"")
    elif kind == "blank lines":
        Path("in.jsonl").write_bytes(b"\n  \n\r\n\n")
    elif kind == "0-row Parquet":
        pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), "in.parquet")
        inputs = ("in.parquet",)
    elif kind == "limit 0":
        settings = {"limit": 0}
    elif kind == "skipped":
        settings = {"skip": 10}
    else:
        if output.endswith("parquet"):
            pytest.skip("Parquet can't be written from standard input")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        assert job("-", output=output) == OK
        assert records(output) == []
        return
    for _ in range(2):
        assert job(*inputs, output=output, **settings) == OK
        assert records(output) == []
    assert summary(output)["rows"]["total"] == 0
    if output.endswith("parquet"):
        known = {"completion", "error"} | ({"prompt"} if kind in ("0-row Parquet", "limit 0", "skipped") else set())
        assert known <= set(pq.read_schema(output).names)


def test_an_input_whose_rows_all_fail_ends_without_the_weights(
    job: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_start_engine(no_engine, monkeypatch)
    write_input(5, bad=(0, 1, 2, 3, 4))
    assert job() == SOME_FAILED
    assert [record["error_kind"] for record in records()] == ["invalid_prompt"] * 5


def test_a_file_without_the_prompt_column_is_an_error_not_an_empty_job(job: Callable[..., int]) -> None:
    Path("in.jsonl").write_text('{"text": "the"}\n')
    with pytest.raises(UsageError, match="no column 'prompt'"):
        job()
    assert not Path("out").exists()


# Where nothing can be written


@contextmanager
def small_disk(megabytes: str = "1m") -> Iterator[Path]:
    folder = Path("disk").absolute()
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}", "tmpfs", str(folder)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: "-".join(map(str, x.values())))
def test_a_full_disk_ends_the_job_in_words_and_it_goes_on_once_there_is_room(
    job: Callable[..., int], layout: dict[str, Any]
) -> None:
    write_input(40)
    with small_disk("256k") as disk:
        (disk / "ballast").write_bytes(bytes(150_000))
        settings = {**layout, "output": str(disk / layout["output"]), "shard_rows": 10}
        noise = {"system": "the rain " * 20}
        rows = [
            {**json.loads(line), "noise": random.Random(7).randbytes(3000).hex()}
            for line in Path("in.jsonl").read_text().splitlines()
        ]
        Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(Fatal, match=r"No space left on device.*run it again"):
            job(**settings, **noise)
        (disk / "ballast").unlink()
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        assert job(**settings, **noise) == OK
        assert row_numbers(settings["output"]) == list(range(40))
        assert all(record["noise"] == rows[record["row"]]["noise"] for record in records(settings["output"]))


def test_a_folder_that_cannot_be_written_is_refused_before_weights_are_loaded(
    job: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_input(2)
    with small_disk() as disk:
        assert job(output=str(disk / "out"), limit=1) == OK
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        replace_start_engine(no_engine, monkeypatch)
        for output in ("new", "out", "new.jsonl"):
            with pytest.raises(UsageError, match="can't write there: Read-only file system"):
                job(output=str(disk / output))


# What is said, and where


def test_lines_of_the_json_view_parse(
    job: Callable[..., int], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.05)
    write_input(40, bad=(3,))
    assert job(progress="json", max_tokens=60, max_num_seqs=4) == SOME_FAILED
    out, err = capfd.readouterr()
    assert out == ""
    lines = [json.loads(line) for line in err.splitlines()]
    counts = [line["rows_done"] for line in lines if "rows_done" in line]
    assert counts == sorted(counts)
    assert any(0 < count < 40 for count in counts)
    final = lines[-1]
    assert (final["rows"]["ok"], final["rows"]["failed"], final["rows"]["total"]) == (39, 1, 40)


def test_plain_lines_are_few_and_hold_no_control_bytes(
    job: Callable[..., int], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    write_input(300)
    assert job(progress="auto", max_tokens=2) == OK
    out, err = capfd.readouterr()
    assert out == ""
    assert not {"\r", "\x1b"} & set(err)
    assert len(err.splitlines()) < 12
    assert "300 completed, 0 failed" in err


def test_a_run_that_dies_leaves_no_figures_of_an_earlier_one(
    job: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_input(4)
    assert job(limit=2) == OK
    assert summary()["finished"]

    def no_engine(*_: object) -> None:
        raise Fatal("no engine today")

    replace_start_engine(no_engine, monkeypatch)
    with pytest.raises(Fatal, match="no engine today"):
        job()
    assert not Path("out/.cbatch/summary.json").exists()


# Processes of their own


def ignore_hangups() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_stops_the_job_and_the_same_command_goes_on(command: list[object], number: int) -> None:
    write_input(600)
    child = Child(*command, *SLOW)
    child.wait_for_records()
    child.send(number)
    assert child.wait() == INTERRUPTED
    assert "run the same command again" in Path("stderr").read_text()
    figures = summary()
    assert not figures["finished"]
    done = figures["rows"]["ok"]
    assert 0 < done < 600
    assert Child(*command, *SLOW[2:]).wait() == OK
    assert row_numbers() == list(range(600))
    assert summary()["rows"]["done_earlier"] == done


def test_a_second_signal_ends_the_job_at_once(command: list[object]) -> None:
    write_input(600)
    child = Child(*command, *SLOW)
    child.wait_for_records()
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):  # both arrive within one step
        child.send(number)
    assert child.wait() in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    assert Child(*command, *SLOW[2:]).wait() == OK
    assert row_numbers() == list(range(600))


def test_a_hangup_that_is_ignored_stays_ignored(command: list[object]) -> None:
    write_input(30)
    child = Child(*command, *SLOW, prepare=ignore_hangups)
    child.wait_for_records()
    child.send(signal.SIGHUP)
    assert child.wait() == OK
    assert row_numbers() == list(range(30))


def test_two_jobs_never_write_to_one_output(command: list[object]) -> None:
    write_input(2000)
    first = Child(*command, *SLOW)
    first.wait_for_records()
    for more in ([], ["--overwrite"], ["--retry-failed"]):
        second = Child(*command, *SLOW, *more, err="stderr2")
        assert second.wait() == USAGE
        assert "another cbatch job is writing there" in Path("stderr2").read_text()
    assert first.process.is_alive()
    first.send(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    done = len(Path("out/.cbatch/part-00000.jsonl").read_bytes().splitlines())
    assert Child(*command, *SLOW, "--limit", done + 5).wait() == OK  # its lock has died with it
    assert set(range(done + 5)) <= set(row_numbers())
    assert len(set(row_numbers())) == len(row_numbers())


@pytest.mark.parametrize(
    "layout", [["--shard-rows", 40], ["--ordered", "--format", "parquet"]], ids=["jsonl", "parquet"]
)
def test_no_kill_loses_doubles_or_changes_a_row(command: list[object], layout: list[object]) -> None:
    num_rows, bad = 500, (17, 200, 333)
    rows = [{**prompt(row), "params": {"max_tokens": 1 + row % 11, "ignore_eos": True}} for row in range(num_rows)]
    for row in bad:
        rows[row]["params"] = {"max_tokens": "many"}
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert Child(*command, "-o", "whole", *layout).wait() == SOME_FAILED
    for kill in range(8):
        child = Child(*command, *layout, "--max-num-seqs", 1)
        if kill > 1:
            child.wait_for_records(count=num_records("out") + random.randrange(1, 20))
        time.sleep(random.uniform(0, 0.05 if kill > 1 else 0.5))
        child.process.kill()
        assert child.wait() == -signal.SIGKILL
    assert Child(*command, *layout).wait() == SOME_FAILED
    found = records()
    assert [record["row"] for record in found] == list(range(num_rows))
    assert found == records("whole")
    assert [record["row"] for record in found if record["error"]] == list(bad)
    for record, given in zip(found, rows, strict=True):
        kept = {
            name: record[name] if isinstance(record[name], type(value)) else json.loads(record[name])
            for name, value in given.items()
        }
        assert kept == given


def test_an_output_that_is_full_ends_the_job_in_words(command: list[object]) -> None:
    write_input(20)
    child = Child(*command, "-o", "-", out="/dev/full")
    assert child.wait() == FATAL
    assert (
        Path("stderr").read_text().splitlines()[-1] == "cbatch: standard output: can't write: No space left on device"
    )


def test_records_go_to_standard_output_and_plain_lines_to_the_other(command: list[object]) -> None:
    write_input(300)
    assert Child(*command, "-o", "-", "--max-tokens", 3, "--progress", "auto").wait() == OK
    out, err = Path("stdout").read_bytes(), Path("stderr").read_bytes()
    assert sorted(json.loads(line)["row"] for line in out.splitlines()) == list(range(300))
    assert not set(b"\r\x1b") & set(out + err)
    assert 1 < len(err.splitlines()) < 12
    assert b"300 completed, 0 failed" in err


# The real thing


def test_standard_output_carries_records_and_a_clean_run_says_nothing_if_told_so(tiny_model: Path) -> None:
    """In the environment of a cron job: almost empty, no terminal."""
    write_input(300)
    args: list[Path | str] = [
        "run",
        "in.jsonl",
        "-m",
        tiny_model,
        "-o",
        "-",
        "--max-tokens",
        "3",
        "--threads",
        "1",
        "--progress",
        "none",
    ]
    ended = subprocess.run(
        [sys.executable, "-m", "cbatch", *args],
        env={"PYTHONPATH": str(Path(__file__).parent.parent), "COLUMNS": "0", "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
    )
    assert ended.returncode == OK
    assert ended.stderr == b""
    assert sorted(json.loads(line)["row"] for line in ended.stdout.splitlines()) == list(range(300))


def test_a_reader_that_leaves_ends_the_job_quietly(tiny_model: Path) -> None:
    write_input(5000)
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "cbatch",
            "run",
            "in.jsonl",
            "-m",
            tiny_model,
            "-o",
            "-",
            "--threads",
            "1",
            "--progress",
            "none",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    assert process.stdout is not None
    assert "completion" in json.loads(process.stdout.readline())
    process.stdout.close()
    assert process.wait(60) == READER_GONE
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()


def test_closed_standard_streams_do_not_stop_a_job_or_leak_into_its_files(tiny_model: Path) -> None:
    write_input(4, bad=(1,))
    script = 'exec "$0" -m cbatch run in.jsonl -m "$1" -o out --threads 1 --max-tokens 2 <&- >&- 2>&-'
    root = str(Path(__file__).parent.parent)
    ended = subprocess.run(["sh", "-c", script, sys.executable, tiny_model], env={**os.environ, "PYTHONPATH": root})
    assert ended.returncode == SOME_FAILED
    assert row_numbers() == list(range(4))
    assert Path("out/.cbatch/lock").read_bytes() == b""
    script = 'exec "$0" -m cbatch run in.jsonl -m "$1" -o - >&-'
    args: list[Path | str] = ["sh", "-c", script, sys.executable, tiny_model]
    refused = subprocess.run(args, env={**os.environ, "PYTHONPATH": root}, stderr=subprocess.PIPE)
    assert (refused.returncode, refused.stderr) == (USAGE, b"cbatch: -o -: standard output is closed\n")


def test_standard_input_resumes_and_a_signal_ends_the_wait_for_it(
    job: Callable[..., int], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_input(6)
    content = Path("in.jsonl").read_bytes()
    args: list[Path | str] = [
        sys.executable,
        "-m",
        "cbatch",
        "run",
        "-",
        "-m",
        tiny_model,
        "-o",
        "out",
        "--threads",
        "1",
    ]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    process = subprocess.Popen(args, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environ)
    assert process.stdin is not None
    process.stdin.write(b"".join(content.splitlines(keepends=True)[:3]))
    process.stdin.flush()  # and then nothing more comes
    deadline = time.monotonic() + 60
    while num_records("out") < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == INTERRUPTED
    process.stdin.close()
    assert process.stderr is not None
    assert b"Fatal Python error" not in process.stderr.read()
    process.stderr.close()

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.replace(b"rain 1", b"pain 1"))))
    with pytest.raises(Fatal, match="-:2: this row has changed since it was completed"):
        job("-", max_tokens=256)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert job("-", max_tokens=256) == OK
    assert row_numbers() == list(range(6))


def test_wrong_commands_end_before_anything_is_written(cbatch: Cbatch, tiny_model: Path, tmp_path: Path) -> None:
    root = str(Path(__file__).parent.parent)
    write_input(2)
    ended = cbatch("run", "missing.jsonl", "-m", tiny_model, "-o", "out", PYTHONPATH=root)
    assert (ended.returncode, ended.stdout) == (USAGE, "")
    assert ended.stderr.startswith("cbatch: missing.jsonl: ")
    assert len(ended.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
