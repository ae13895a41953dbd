from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cbatch.errors import SOME_FAILED, Fatal
from tests.jobs import records, row_numbers, run_job, write_input
from tests.tiny import save_model


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def broken_model(tmp_path: Path) -> Path:
    """A model whose every output is not a number."""
    folder = save_model(tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], torch.nan)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("engines", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_model_that_gives_no_numbers_ends_the_job_and_what_is_finished_stays(
    broken_model: Path, engines: str
) -> None:
    write_input(300)
    job: dict[str, Any] = {"model": str(broken_model), "max_tokens": 2, "data_parallel_size": engines, "output": "out"}
    job["threads"] = int(engines)
    with pytest.raises(
        Fatal, match=r"^the first 100 rows that ran failed, all for one reason; the last: invalid_logits: "
    ) as end:
        run_job(**job)
    assert end.value.exit_code == 1
    done = records(unfinished=True)
    assert 100 <= len(done) < 300
    assert {record["error_kind"] for record in done} == {"invalid_logits"}
    if engines == "1":
        assert run_job(**job, max_failures="none") == SOME_FAILED
        assert row_numbers() == list(range(300))


@pytest.mark.parametrize(
    ("limit", "num_bad", "ends"),
    [
        ("0", 1, True),
        ("5", 5, False),
        ("5", 6, True),
        ("5%", 11, True),
        ("5%", 4, False),
        ("none", 120, False),
        (None, 120, False),
    ],
)
def test_a_job_ends_when_more_rows_fail_than_may(tiny_model: Path, limit: str | None, num_bad: int, ends: bool) -> None:
    write_input(130, bad=tuple(range(num_bad)))
    job: dict[str, Any] = {"model": str(tiny_model), "max_tokens": 1, "output": "out.jsonl", "max_failures": limit}
    if not ends:
        assert run_job(**job) == SOME_FAILED
        assert row_numbers("out.jsonl") == list(range(130))
        return
    with pytest.raises(Fatal, match=rf"rows failed, and --max-failures is {limit}; the last: invalid_"):
        run_job(**job)
    assert not Path("out.jsonl").exists()
    assert run_job(**{**job, "max_failures": None}) == SOME_FAILED
    assert row_numbers("out.jsonl") == list(range(130))
