"""The config.json of widely used checkpoints, with tiny random weights, through `cbatch check` and `cbatch run`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cbatch.check import check
from cbatch.errors import OK, UsageError
from tests.checkpoints import REFUSED, RUN
from tests.jobs import job_config, read_jsonl, run_job, write_rows
from tests.tiny import generate, make_model, make_tokenizer

pytestmark = pytest.mark.usefixtures("empty_folder")

NUM_TOKENS = 8
PROMPTS = [[5, 9, 30, 77, 14] * 5, [100, 7, 8]]  # the first is longer than the sliding windows


def save(config: dict[str, Any]) -> Path:
    """A model folder with just this config.json, random weights and a tokenizer."""
    folder = Path("model")
    folder.mkdir()
    described = folder / "config.json"
    described.write_text(json.dumps(config))
    make_model(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    described.write_text(json.dumps(config))
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", RUN)
def test_completions_are_those_of_transformers(name: str) -> None:
    folder = save(RUN[name])
    write_rows({"token_ids": prompt} for prompt in PROMPTS)
    settings = {"model": str(folder), "dtype": "float32", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    assert check(job_config(**settings)) == OK
    assert run_job(**settings, output="out.jsonl", kv_cache_memory=0.01) == OK
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    decode = make_tokenizer().decode
    records = sorted(read_jsonl("out.jsonl"), key=lambda record: record["row"])
    for record, prompt in zip(records, PROMPTS, strict=True):
        expected = generate(own, prompt, NUM_TOKENS)
        assert record["completion"] == decode(expected, skip_special_tokens=True)
        assert record["completion_tokens"] == NUM_TOKENS


@pytest.mark.parametrize("name", REFUSED)
def test_what_cbatch_can_not_run_is_refused_in_one_line_by_check_and_run(name: str) -> None:
    config, reason = REFUSED[name]
    folder = Path("model")
    folder.mkdir()
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    write_rows([{"prompt": "the rain"}])
    for refuse in (lambda: check(job_config(model="model")), lambda: run_job(model="model", output="out")):
        with pytest.raises(UsageError) as refused:
            refuse()
        line = str(refused.value)
        assert line.startswith("model: ")
        assert reason in line
        assert len(line.splitlines()) == 1
        assert "no weights" not in line  # which would be another reason
    assert not Path("out").exists()
