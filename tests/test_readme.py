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


def test_every_recipe_named_exists() -> None:
    recipes = re.findall(r"^([a-z-]+)(?: [*a-z]+)?:", (ROOT / "Justfile").read_text(), re.MULTILINE)
    assert set(re.findall(r"\bjust ([a-z-]+)", "\n".join(re.findall(r"`+[^`]*`+", README)))) <= set(recipes)


def test_the_two_commands_are_those_that_ci_runs() -> None:
    section = README.partition("## Two commands")[2].partition("\n## ")[0]
    commands = [line for block in re.findall(r"```sh\n(.*?)```", section, re.DOTALL) for line in block.splitlines()]
    assert commands == [".ci/just demo", ".ci/just test"]
    assert set(commands) <= set((ROOT / ".ci/run").read_text().splitlines())


FAKE = """#!/bin/sh
case "$*" in
    -V) echo "Python $VERSION" ;;
    *version_info*) [ "$VERSION" = 3.10.1 ] ;;
    *) exit 1 ;;
esac
"""


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "there is no {python}; install Python 3.10 or later"),
        ("3.9.1", "cbatch needs Python 3.10 or later, and {python} is Python 3.9.1"),
        ("3.10.1", "{python} can't make virtual environments; on Debian and Ubuntu: sudo apt install python3-venv"),
    ],
)
def test_a_python_that_will_not_do_is_named_in_one_line(tmp_path: Path, version: str | None, said: str) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/just", tmp_path / ".ci/just")
    python = tmp_path / "python"
    if version:
        python.write_text(FAKE)
        python.chmod(0o755)
    environ = {"PATH": os.environ["PATH"], "PYTHON": str(python), "VERSION": version or ""}
    done = subprocess.run([tmp_path / ".ci/just", "demo"], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert said.format(python=python) in done.stderr


def test_every_option_named_exists(cbatch) -> None:  # type: ignore[no-untyped-def]
    text = "".join(cbatch(command, "--help", COLUMNS="200", TERM="dumb").stdout for command in ("run", "bench"))
    for option in set(re.findall(r"--[a-z][a-z-]+", README)) - {"--help", "--dry-run"}:
        assert option in text, option


GUIDES = [ROOT / "README.md", ROOT / ".github/CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_files_and_names_in_the_guides_exist(guide: Path) -> None:
    text = guide.read_text()
    for path in re.findall(r"`((?:cbatch|kernels|tests|samples|\.ci|\.github)/[\w./-]*)", text):
        assert (ROOT / path).exists(), path
    for name, path in re.findall(r"`(\w+)`[\w ,`]* (?:in|of)\s+`((?:cbatch|kernels|tests)/[\w/]+\.py)`", text):
        defined = rf"^\s*(?:def|class) {name}\b|^{name}\b.*="
        assert re.search(defined, (ROOT / path).read_text(), re.MULTILINE), f"{name} in {path}"
