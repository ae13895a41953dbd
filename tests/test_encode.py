from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from cbatch.check import check
from cbatch.errors import OK
from tests.jobs import job_config, read_jsonl, run_job, summary, write_rows
from tests.tiny import make_tokenizer

CONTEXT = 512  # of the tiny model

pytestmark = pytest.mark.usefixtures("empty_folder")


# Truncation


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_that_was_shortened_says_by_how_much(
    side: str, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long, short = "abc " * 400, "abc"
    write_rows([{"prompt": long}, {"prompt": short}, {"custom_id": "a", "body": {"messages": [message(long)]}}])
    settings = {"model": str(tiny_model), "truncate": side, "max_tokens": 12, "progress": "plain"}
    assert run_job(**settings, output="out.jsonl", chat=False) == OK
    counts = "2 shortened by --truncate"
    said = capsys.readouterr().err
    assert said.count("in.jsonl:1 is the first row shortened by --truncate") == 1
    assert counts in said
    first, second, answer = sorted(read_jsonl("out.jsonl"), key=lambda record: record["row"])
    assert first["truncated_tokens"] + CONTEXT - 12 == len(make_tokenizer().encode(long))
    assert first["prompt_tokens"] == CONTEXT - 12
    assert second["truncated_tokens"] == 0
    usage = answer["response"]["body"]["usage"]
    assert usage["prompt_tokens_details"]["truncated_tokens"] > first["truncated_tokens"]
    assert summary("out.jsonl")["rows"]["remarks"] == {"truncated": 2}
    assert check(job_config(**settings, output="other.jsonl")) == OK
    assert counts in capsys.readouterr().out


def test_in_parquet_the_tokens_that_a_prompt_lost_are_a_column_too(tiny_model: Path) -> None:
    write_rows([{"prompt": "abc " * 400}, {"prompt": "abc"}])
    assert run_job(model=str(tiny_model), truncate="left", max_tokens=2, output="out.parquet", chat=False) == OK
    lost = pq.read_table("out.parquet").sort_by("row")["truncated_tokens"].to_pylist()
    assert lost[0] > 0
    assert lost[1] == 0


def message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
