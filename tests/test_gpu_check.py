"""The check of the GPU path runs from end to end here too, in Triton's interpreter and with tiny shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_the_dry_run_passes_and_reports_every_check(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu_check", "--dry-run", "--json", path],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["dry_run"]
    assert all(result["ok"] for result in report["results"])
    names = {result["name"] for result in report["results"]}
    assert {"ceilings", "sampler", "8B: prefill 8192", "0.6B: ragged workload, transformers generate_batch"} <= names
    table = done.stdout.rsplit("\n\n", 1)[1].splitlines()
    assert len(table) == len(names) + 1
    assert table[-1].startswith(f"{len(names)} passed, 0 failed")
