"""The sample job script, with commands in place of Slurm's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "samples" / "slurm" / "array.sh"


def command(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [(0, None, False), (3, None, False), (75, None, True), (75, "7", True), (75, "100", False)],
)
def test_a_task_is_requeued_only_if_it_was_interrupted(
    tmp_path: Path, code: int, restarts: str | None, requeued: bool
) -> None:
    command(tmp_path / "srun", f'for one; do echo "$one"; done >"{tmp_path}/started"\nexit {code}')
    command(tmp_path / "scontrol", f'echo "$@" >"{tmp_path}/asked"')
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "123"}
    if restarts:
        environ["SLURM_RESTART_COUNT"] = restarts
    ended = subprocess.run(["bash", str(SCRIPT), "my prompts.jsonl", "-o", "out"], env=environ)
    assert ended.returncode == code
    started = (tmp_path / "started").read_text().splitlines()
    assert started[started.index("cbatch") :] == ["cbatch", "run", "my prompts.jsonl", "-o", "out", "--grace", "120"]
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == ("requeue 123\n" if requeued else "")


def test_slurm_tells_a_task_early_enough_for_its_grace() -> None:
    lines = SCRIPT.read_text().splitlines()
    (signal,) = [line for line in lines if line.startswith("#SBATCH --signal=USR1@")]
    (grace,) = [line.split("--grace ")[1] for line in lines if "--grace " in line]
    assert int(signal.split("@")[1]) >= int(grace) + 10
