"""What the README tells a user to type works as it stands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = [block for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) if "just " not in block]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "samples", folder / "samples")
    return folder


def shell(block: str, folder: Path) -> subprocess.CompletedProcess[str]:
    tools = Path(sys.executable).parent
    environ = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block], cwd=folder, env=environ, capture_output=True, text=True, timeout=600
    )


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.strip().splitlines()[-1][:60])
def test_block_runs(block: str, folder: Path) -> None:
    done = shell(block, folder)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_the_two_commands_are_recipes() -> None:
    recipes = re.findall(r"^([a-z-]+)(?: [*a-z]+)?:", (ROOT / "Justfile").read_text(), re.MULTILINE)
    assert set(re.findall(r"^just ([a-z-]+)", README, re.MULTILINE)) <= set(recipes)


def test_every_option_named_exists(cbatch) -> None:  # type: ignore[no-untyped-def]
    text = "".join(cbatch(command, "--help", COLUMNS="200", TERM="dumb").stdout for command in ("run", "bench"))
    for option in set(re.findall(r"--[a-z][a-z-]+", README)) - {"--help", "--dry-run"}:
        assert option in text, option
