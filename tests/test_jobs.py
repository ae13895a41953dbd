"""Whole jobs, for faults that no single part would show."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from cbatch.errors import OK, SOME_FAILED, UsageError
from tests.jobs import records, run_job, summary, write_rows
from tests.tiny import make_config, save_model

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_sampled_rows_follow_their_ids_when_the_input_is_shuffled_cut_or_moved(tiny_model: Path) -> None:
    rows = [{"id": number, "prompt": "the rain"} for number in range(64)]
    settings: dict[str, Any] = {"model": str(tiny_model), "temperature": 1.0, "seed": 7, "max_tokens": 12}
    write_rows(rows)
    assert run_job("in.jsonl", output="out", **settings) == OK
    texts = {record["id"]: record["completion"] for record in records()}
    assert len(set(texts.values())) > 60
    random.Random(1).shuffle(rows)
    Path("elsewhere").mkdir()
    write_rows(rows[:32], "elsewhere/other.jsonl")
    assert run_job("elsewhere/other.jsonl", output="half", **settings, max_num_seqs=3) == OK
    assert {record["id"]: record["completion"] for record in records("half")} == {
        row["id"]: texts[row["id"]] for row in rows[:32]
    }
    assert run_job("in.jsonl", output="seed", **{**settings, "seed": 8}) == OK
    assert {record["id"]: record["completion"] for record in records("seed")} != texts


def test_a_model_without_an_end_of_sequence_token_runs_and_says_so_once(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(Path("endless"), make_config(eos_token_id=None))
    Path("endless/generation_config.json").unlink(missing_ok=True)
    path = Path("endless/tokenizer_config.json")
    path.write_text(
        json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != "eos_token"})
    )
    write_rows([{"prompt": f"the rain {number}"} for number in range(5)])
    for model, times in (("endless", 1), (str(tiny_model), 0)):
        assert run_job("in.jsonl", model=model, output=f"out-{times}", max_tokens=3, progress="plain") == OK
        assert capsys.readouterr().err.count("the model names no end-of-sequence token") == times
    assert {record["finish_reason"] for record in records("out-1")} == {"length"}


def test_the_first_line_names_what_was_not_set_and_the_last_how_many_rows_it_cut(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(
        [{"prompt": "the rain", "params": {"ignore_eos": True, "max_tokens": n} if n else {}} for n in (None, 5, 5, 5)]
    )
    assert run_job("in.jsonl", model=str(tiny_model), output="out", ignore_eos=True, progress="plain") == OK
    said = capsys.readouterr().err
    assert "max_tokens 256, greedy" in said.splitlines()[0]
    assert "100% of rows ended by --max-tokens or the context" in said
    assert [record["completion_tokens"] for record in records()] == [256, 5, 5, 5]


def test_every_row_is_counted_as_completed_or_failed_through_stops_retries_and_mended_lines(tiny_model: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": number, "prompt": f"the rain {number}"} for number in range(100)]
    bad: dict[int, dict[str, Any]] = {3: {"prompt": "x" * 2000}, 17: {"prompt": ""}, 40: {"prompt": 5}, 41: {"params": []}, 59: {"prompt": None},
           77: {"messages": "x", "prompt": None}, 99: {"prompt": "y" * 3000}}  # fmt: skip
    kinds = {3: "prompt_too_long", 17: "empty_prompt", 40: "invalid_prompt", 41: "invalid_params", 59: "invalid_prompt",
             77: "invalid_prompt", 99: "prompt_too_long"}  # fmt: skip
    write_rows([{**row, **bad.get(row["id"], {})} for row in rows])
    settings: dict[str, Any] = {"model": str(tiny_model), "output": "out", "max_tokens": 3, "chat": False}
    assert run_job("in.jsonl", **settings, limit=60) == SOME_FAILED
    assert summary()["rows"].items() >= {"total": 60, "ok": 55, "failed": 5, "done_earlier": 0}.items()
    assert run_job("in.jsonl", **settings) == SOME_FAILED
    assert (
        summary()["rows"].items()
        >= {"total": 100, "ok": 38, "failed": 2, "done_earlier": 60, "failed_earlier": 5}.items()
    )
    before = records()
    assert {record["row"]: record["error_kind"] for record in before if record["error"]} == kinds
    assert all(record["error"].startswith(f"in.jsonl:{record['row'] + 1}: ") for record in before if record["error"])
    assert all((record["completion"] is None) == bool(record["error"]) for record in before)

    write_rows([{**row, **({} if row["id"] in (3, 17, 40) else bad.get(row["id"], {}))} for row in rows])
    with pytest.raises(UsageError, match="--retry-failed"):
        run_job("in.jsonl", **settings)
    assert run_job("in.jsonl", **settings, retry_failed=True) == SOME_FAILED
    after = records()
    assert [record["id"] for record in after] == list(range(100))
    assert {record["row"] for record in after if record["error"]} == {41, 59, 77, 99}
    assert [record for record in after if record["row"] not in bad] == [
        record for record in before if record["row"] not in bad
    ]
    assert summary()["rows"].items() >= {"total": 100, "ok": 3, "failed": 4}.items()


def test_records_without_the_settings_they_were_made_under_are_left_alone(tiny_model: Path) -> None:
    write_rows([{"prompt": f"the rain {number}"} for number in range(6)])
    settings: dict[str, Any] = {"model": str(tiny_model), "output": "out", "max_tokens": 3}
    assert run_job("in.jsonl", **settings, limit=4) == OK
    state = Path("out/.cbatch")
    shutil.move("out/part-00000.jsonl", state / "part-00000.jsonl")  # as it was while it grew
    (state / "manifest.json").unlink()
    content = (state / "part-00000.jsonl").read_bytes()
    with pytest.raises(UsageError, match="its state is gone"):
        run_job("in.jsonl", **settings)
    assert (state / "part-00000.jsonl").read_bytes() == content


def test_an_empty_growing_file_is_no_obstacle(tiny_model: Path) -> None:
    write_rows([{"prompt": f"the rain {number}"} for number in range(6)])
    Path("out/.cbatch").mkdir(parents=True)
    Path("out/.cbatch/part-00000.jsonl").touch()
    assert run_job("in.jsonl", model=str(tiny_model), output="out", max_tokens=3, overwrite=True) == OK
    shutil.move("out/part-00000.jsonl", "whole.jsonl")
    Path("out/.cbatch/part-00000.jsonl").touch()
    assert run_job("in.jsonl", model=str(tiny_model), output="out", max_tokens=3) == OK
    assert sorted(Path("out/part-00000.jsonl").read_text()) == sorted(Path("whole.jsonl").read_text())
