"""No traceback for anything that a user can do: see tests/fuzz.py for what must be true of every ending.

CBATCH_TEST_FUZZ is the number of cases in all. The same number tries the same cases.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cbatch.errors import INTERRUPTED, OK, SOME_FAILED
from cbatch.rows.openai import is_failure
from tests import damage, fuzz
from tests.fuzz import check_good, command, good_row, lines
from tests.ggufs import save_gguf
from tests.jobs import read_jsonl
from tests.tiny import save_model

_NUM_ROWS = 20  # in a file
CASES = int(os.environ.get("CBATCH_TEST_FUZZ", "2000"))
README = (Path(__file__).parents[1] / "README.md").read_text()
KINDS = README[README.index("Its `error_kind` is one of") : README.index("The first three errors of a run")].split("`")[
    3::2
]
COMMON = ["--max-tokens", fuzz.MAX_TOKENS, "--threads", 1]

pytestmark = pytest.mark.slow


def cases(share: float) -> Callable[[Any], Any]:
    """Try this share of all cases, the same ones each time."""
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large,
              HealthCheck.function_scoped_fixture, HealthCheck.large_base_example]  # fmt: skip
    number = max(1, round(CASES * share))
    return settings(max_examples=number, derandomize=True, database=None, deadline=None, suppress_health_check=checks)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models `tiny` and `tiny.gguf`, of files that are small."""
    folder = tmp_path_factory.mktemp("fuzz")
    save_model(folder / "tiny")
    (folder / "tiny" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2], "temperature": 0.5, "top_k": 5, "max_new_tokens": 3, "do_sample": True})
    )
    save_gguf(folder / "tiny.gguf")
    return folder


@pytest.fixture(autouse=True)
def place(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in an empty folder, with a home of its own and models that cost nothing."""
    work = tmp_path / "a" / "b" / "work"
    work.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(work)
    fuzz.in_place_of_models(monkeypatch, [models / "tiny"])
    with fuzz.bounded_memory():
        yield work


# What is typed


def _write_inputs(place: Path) -> None:
    fuzz.empty(place)
    (place / "in.jsonl").write_bytes(lines([good_row(number) for number in range(3)]))
    (place / "empty.jsonl").touch()
    (place / "folder").mkdir()
    (place / "folder" / "a.txt").write_text("the rain\n")


_commands = st.sampled_from(["run"] * 6 + ["check"] * 3)
_inputs = damage.mostly(
    st.sampled_from([["in.jsonl"]] * 8 + [["folder"], ["in.jsonl", "folder"]]), st.lists(damage.texts, max_size=2)
)
_outputs = damage.mostly(st.sampled_from(["out"] * 4 + ["out.jsonl", "out.parquet", "-"]), damage.texts)
_names = damage.mostly(_commands, st.sampled_from(["", "runn", "bench", "--version", "-h", "-m"]))


@cases(0.42)
@given(name=_names, inputs=_inputs, output=_outputs, flags=st.lists(damage.flags(), max_size=4))
def test_any_command_line(
    models: Path, place: Path, name: str, inputs: list[str], output: str, flags: list[list[str]]
) -> None:
    assume(not output.startswith(("/", "~")))
    _write_inputs(place)
    words = [text.replace("\0", "") for flag in flags for text in flag]
    given = [*(text.replace("\0", "") for text in inputs), "-m", models / "tiny", "-o", output.replace("\0", "")]
    command(name, *given, *words, *(["--compare", ""] if name == "bench" else []))


@cases(0.27)
@given(name=_commands, content=damage.tomls())
def test_any_file_of_settings(models: Path, place: Path, name: str, content: bytes) -> None:
    _write_inputs(place)
    (place / "settings.toml").write_bytes(content)
    command(name, "in.jsonl", "-m", models / "tiny", "-o", "out", "--config", "settings.toml")


# Rows and files


@cases(0.12)
@given(
    bad=st.lists(st.tuples(damage.bad_lines(), st.integers(0, 2)), min_size=1, max_size=8),
    output=st.sampled_from(["out.jsonl", "out.jsonl", "out.jsonl", "out.parquet"]),
    more=st.sampled_from([[], [], ["--ordered"], ["--truncate", "left", "--max-model-len", "100"]]),
)
def test_any_row_costs_no_other(
    models: Path, place: Path, bad: list[tuple[bytes, int]], output: str, more: list[str]
) -> None:
    fuzz.empty(place)
    good = iter(range(100))
    written = [line for _ in range(2) for line in lines([good_row(next(good))]).splitlines()]
    for line, num_good in bad:
        written += [line, *(lines([good_row(next(good))])[:-1] for _ in range(num_good))]
    (place / "in.jsonl").write_bytes(b"\n".join(written))
    args = ["in.jsonl", "-m", models / "tiny", "--prefix", "zz_", *COMMON, *more]
    ending = command("run", *args, "-o", output)
    assert ending.code in (OK, SOME_FAILED), ending
    _check_rows(
        output, [line for line in written if line.removeprefix(b"\xef\xbb\xbf").strip(b" \t\r")], next(good), ending
    )
    if output == "out.jsonl":
        assert command("check", *args).code == ending.code, ending


def _check_rows(output: str, written: list[bytes], num_good: int, ending: fuzz.Ending) -> None:
    """Each line has a record, each good one its completion, and each error a documented kind."""
    found = pq.read_table(output).to_pylist() if output.endswith(".parquet") else read_jsonl(output)
    assert sorted(record["zz_row"] for record in found) == list(range(len(written))), (written, found, ending)
    answers = [record for record in found if "zz_error_kind" not in record]  # in OpenAI's form
    records = [{key.removeprefix("zz_"): value for key, value in r.items()} for r in found if "zz_error_kind" in r]
    for record in records:  # a column of mixed values holds JSON text in Parquet
        for name in ("id", "prompt") if output.endswith(".parquet") else ():
            record[name] = _from_json(record.get(name))
    mine = [r for r in records if str(r.get("id")) in {f"good {number}" for number in range(num_good)}]
    unchanged = [r for r in mine if lines([good_row(int(r["id"].split()[1]))])[:-1] == written[r["row"]]]
    assert len(check_good(unchanged)) == num_good, (written, found, ending)
    failed = [record for record in records if record["error"] is not None]
    assert {record["error_kind"] for record in failed} <= set(KINDS), failed
    assert (ending.code == SOME_FAILED) == bool(failed or any(map(is_failure, answers))), ending


def _from_json(value: Any) -> Any:
    try:
        return json.loads(value)
    except (TypeError, ValueError):
        return value


def _zstd(content: bytes) -> bytes:
    return pa.compress(content, "zstd", asbytes=True)


@cache
def _files() -> dict[str, bytes]:
    """Files of all kinds with good rows."""
    rows = [good_row(number) for number in range(_NUM_ROWS)]
    plain, table, arrow = lines(rows), io.BytesIO(), io.BytesIO()
    pq.write_table(
        pa.Table.from_pylist([{**row, "n": [1, 2], "s": {"a": 1.5}} for row in rows]), table, row_group_size=8
    )
    with pa.ipc.new_stream(arrow, pa.Table.from_pylist(rows).schema) as stream:
        stream.write_table(pa.Table.from_pylist(rows), max_chunksize=8)
    return {
        "in.jsonl": plain,
        "in.txt": b"the rain\nin spain\n" * 4,
        "in.jsonl.gz": gzip.compress(plain[:700], mtime=0) + gzip.compress(plain[700:], mtime=0),
        "in.jsonl.zst": _zstd(plain[:700]) + _zstd(plain[700:]),
        "in.parquet": table.getvalue(),
        "saved/data-00000-of-00001.arrow": arrow.getvalue(),
    }


_SAVED = {"state.json": {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_fingerprint": "x", "_format_columns": None,
                         "_format_kwargs": {}, "_format_type": None, "_output_all_columns": False, "_split": None},
          "dataset_info.json": {"features": {name: {"dtype": "string", "_type": "Value"} for name in ("id", "prompt")}}}  # fmt: skip


@cases(0.09)
@given(data=st.data())
def test_any_damaged_input(models: Path, place: Path, data: st.DataObject) -> None:
    fuzz.empty(place)
    name = data.draw(st.sampled_from(sorted(_files())))
    path = place / name
    path.parent.mkdir(exist_ok=True)
    for file, content in _SAVED.items() if path.parent != place else ():
        (path.parent / file).write_text(json.dumps(content))
    whole = _files()[name]
    path.write_bytes(data.draw(damage.damaged(whole, first=data.draw(st.sampled_from([16, 200, len(whole)])))))
    ending = command(
        "run", path if path.parent == place else "saved", "-m", models / "tiny", "-o", "out.jsonl", *COMMON
    )
    if ending.code in (OK, SOME_FAILED):
        found = read_jsonl("out.jsonl")
        mine = {good_row(number)["id"]: good_row(number)["prompt"] for number in range(_NUM_ROWS)}
        whole_rows = [r for r in found if not r["error"] and mine.get(str(r.get("id")), "") == r.get("prompt")]
        assert len({record["row"] for record in found}) == len(found)
        assert all(record["completion"] == fuzz.completion_of(int(record["id"].split()[1])) for record in whole_rows)


# Models


def _run_model(model: Path, place: Path, run: bool) -> None:
    (place / "in.jsonl").write_bytes(lines([good_row(number) for number in range(2)]))
    (place / "work").mkdir()
    args = ["in.jsonl", "-m", model, "--max-tokens", 1, "--threads", 1, "--kv-cache-memory", 0.01]
    ending = command("check", *args)
    if run and ending.code in (OK, SOME_FAILED):
        command("run", *args, "-o", "out")


@cases(0.06)
@given(data=st.data())
def test_any_damaged_folder_of_a_model(models: Path, place: Path, data: st.DataObject) -> None:
    fuzz.empty(place)
    shutil.copytree(models / "tiny", place / "model")
    for _ in range(data.draw(st.integers(1, 2))):
        names = sorted(path.name for path in (place / "model").iterdir() if path.suffix != ".safetensors")
        file = place / "model" / data.draw(st.sampled_from(names))
        content, how = file.read_bytes(), data.draw(st.integers(0, 9))
        if how == 0:
            file.unlink()
        elif how == 1:
            file.write_bytes(
                data.draw(st.sampled_from([b"", b"{}", b"[]", b"null", b"\xef\xbb\xbf" + content, b"[" * 5000]))
            )
        elif how < 4 or file.suffix != ".json":
            file.write_bytes(data.draw(damage.damaged(content)))
        else:
            try:
                settings = json.loads(content)
            except ValueError:
                continue
            file.write_bytes(damage.dumped(data.draw(damage.changed(settings))))
    _run_model(place / "model", place, run=data.draw(st.integers(0, 2)) == 0)


@cases(0.02)
@given(data=st.data())
def test_any_damaged_header_of_safetensors(models: Path, place: Path, data: st.DataObject) -> None:
    fuzz.empty(place)
    shutil.copytree(models / "tiny", place / "model")
    file = place / "model" / "model.safetensors"
    content = file.read_bytes()
    (size,) = struct.unpack_from("<Q", content)
    if data.draw(st.booleans()):
        header = damage.dumped(data.draw(damage.changed(json.loads(content[8 : 8 + size]))))
        file.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + size :])
    else:
        file.write_bytes(data.draw(damage.damaged(content, first=data.draw(st.sampled_from([10, size])))))
    _run_model(place / "model", place, run=True)


@cases(0.01)
@given(data=st.data())
def test_any_damaged_gguf(models: Path, place: Path, data: st.DataObject) -> None:
    fuzz.empty(place)
    content = (models / "tiny.gguf").read_bytes()
    model = place / "model.gguf"
    model.write_bytes(data.draw(damage.damaged(content, first=data.draw(st.sampled_from([24, 1000, len(content)])))))
    _run_model(model, place, run=True)


# Jobs


@cases(0.01)
@given(
    data=st.data(),
    layout=st.sampled_from([["out"], ["out", "--ordered"], ["out", "--format", "parquet"], ["out.jsonl"]]),
)
def test_any_damage_to_the_state_of_a_job(models: Path, place: Path, data: st.DataObject, layout: list[str]) -> None:
    fuzz.empty(place)
    (place / "in.jsonl").write_bytes(lines([good_row(number) for number in range(20)]))
    same = ["--seed", 1, "--date", "2026-01-31"]  # what is damaged must be the same each time
    args = ["run", "in.jsonl", "-m", models / "tiny", "--shard-rows", 6, *same, *COMMON, "-o", *layout]
    assert command(*args, *(["--limit", 9] if data.draw(st.booleans()) else [])).code == OK
    state = place / (".out.jsonl.cbatch" if layout == ["out.jsonl"] else "out/.cbatch")
    for _ in range(data.draw(st.integers(1, 2))):
        file = data.draw(
            st.sampled_from(sorted(path for path in state.iterdir() if path.name not in ("lock", "summary.json")))
        )
        content, how = file.read_bytes(), data.draw(st.integers(0, 4))
        if how == 0:
            file.unlink()
            break
        if how < 3 and file.suffix == ".json":
            try:
                file.write_bytes(damage.dumped(data.draw(damage.changed(json.loads(content)))))
            except ValueError:
                continue
        else:
            file.write_bytes(data.draw(damage.damaged(content)))
    ending = command(*args)
    if ending.code in (OK, SOME_FAILED, INTERRUPTED):
        files = [Path("out.jsonl")] if layout == ["out.jsonl"] else sorted(Path("out").glob("part-*"))
        found = [r for f in files for r in (pq.read_table(f).to_pylist() if f.suffix == ".parquet" else read_jsonl(f))]
        assert len(check_good(found)) == 20 == len(found), ending
