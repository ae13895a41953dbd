"""The kernels compile for GPUs that are not here, fit them, and are not compiled anew at every step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.aot import TARGETS

pytestmark = pytest.mark.slow


def compile_for(*args: str) -> list[dict[str, Any]]:
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.aot", *args],
        env={**environ, "TRITON_DEFAULT_FP_FUSION": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[dict[str, Any]]]:
    """What each target's binaries need; two compile at a time."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(TARGETS, pool.map(compile_for, TARGETS), strict=True))


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_and_fit(target: str, compiled: dict[str, list[dict[str, Any]]]) -> None:
    kernels = compiled[target]
    assert {
        "_attend",
        "_reduce_splits",
        "_store",
        "_norm",
        "_gate",
        "_matmul",
        "_threshold",
        "_block_max",
        "_row_max",
    } <= {kernel["name"] for kernel in kernels}
    assert not [kernel for kernel in kernels if kernel["spills"]]
    assert not [kernel for kernel in kernels if kernel["shared"] > TARGETS[target][2]]
    if target == "sm_90":
        assert any(kernel["name"] == "_attend" and kernel["wgmma"] for kernel in kernels)


def test_what_changes_every_step_compiles_nothing() -> None:
    kernels = compile_for("sm_90", "--sweep")
    names = [kernel["name"] for kernel in kernels]
    # Attention: prefill, and decode with each number of splits up to 16. All else once.
    assert names.count("_attend") <= 6
    assert all(names.count(name) == 1 for name in ("_store", "_norm", "_gate", "_threshold", "_block_max", "_row_max"))
