"""No file of the current folder is ever executed, by the command or by the processes that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cbatch.isolation import python
from tests.jobs import records, write_rows

pytestmark = pytest.mark.usefixtures("empty_folder")

ROOT = Path(__file__).parents[1]
SCRIPT = "import sys\nfrom cbatch.__main__ import run\nif __name__ == '__main__':\n    sys.exit(run())\n"
# Modules that children import early, that torch and transformers look for, and that a folder of data may well have
NAMES = [
    "torch",
    "transformers",
    "numpy",
    "typer",
    "pip",
    "cbatch",
    "random",
    "queue",
    "socket",
    "typing",
    "multiprocessing",
]
NAMES += ["tokenizers", "kernels", "triton", "peft", "optimum", "sentencepiece"]


@pytest.fixture
def environ() -> dict[str, str]:
    """Modules that say when they are run lie in the current folder, and PYTHONPATH has an empty entry, which means it."""
    for name in NAMES:
        Path(f"{name}.py").write_text(f"open({str(Path('ran').absolute())!r}, 'a').write({name!r} + ' ')")
    others = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *others, ""])}


@pytest.fixture
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The installed command: a script in a folder of its own."""
    script = tmp_path_factory.mktemp("bin") / "cbatch"
    script.write_text(SCRIPT)
    return [sys.executable, str(script)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_engines",
    [1, pytest.param(2, marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="multiprocessing of Python 3.10"))],
)
def test_a_job_runs_nothing_of_the_current_folder(
    num_engines: int, command: list[str], environ: dict[str, str], tiny_model: Path
) -> None:
    write_rows([{"prompt": "the rain"}])
    args = ["run", "in.jsonl", "-m", str(tiny_model), "-o", "out", "--max-tokens", "2", "--threads", "2"]
    done = subprocess.run(
        [*command, *args, "--data-parallel-size", str(num_engines)], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(records()) == 1
    assert not Path("ran").exists(), Path("ran").read_text()


def test_a_module_is_run_without_the_current_folder(environ: dict[str, str]) -> None:
    done = subprocess.run(python("cbatch", "--version"), env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cbatch ")
    assert not Path("ran").exists(), Path("ran").read_text()
