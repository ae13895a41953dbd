from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cbatch.model import ceilings as module
from cbatch.model.cache import cache_folder
from cbatch.model.ceilings import Ceilings, ceilings

CPU = "cpu"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and measurements so small that they take no time."""
    monkeypatch.setenv("CBATCH_CACHE", str(tmp_path / "cache"))
    for name, value in {"_BYTES": 256 * 1024, "_WEIGHT_BYTES": 1024, "_STEP": 4, "_WIDTHS": ((16, 8),)}.items():
        monkeypatch.setattr(module, name, value)
    return tmp_path / "cache"


def test_ceilings_are_measured_once_for_each_precision(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ceilings(CPU, "float32")
    assert first is not None
    assert first.bytes_per_second > 0
    assert first.block_bytes_per_second > 0
    assert first.flops > 0
    other = ceilings(CPU, "bfloat16")
    monkeypatch.setattr(module, "_measure", None)  # a call would fail
    assert ceilings(CPU, "float32") == first
    assert ceilings(CPU, "bfloat16") == other
    assert len(json.loads((cache / "ceilings.json").read_text())) == 2
    assert [file.name for file in cache.iterdir()] == ["ceilings.json"]


@pytest.mark.usefixtures("cache")
def test_what_is_measured_anew_replaces_what_was_known(monkeypatch: pytest.MonkeyPatch) -> None:
    ceilings(CPU, "float32")
    monkeypatch.setattr(module, "_measure", lambda *_: Ceilings(1.0, 2.0, 3.0))
    assert ceilings(CPU, "float32", anew=True) == Ceilings(1.0, 2.0, 3.0) == ceilings(CPU, "float32")


@pytest.mark.parametrize("content", ["", "{", "[]", "7", "\x00"])
def test_a_damaged_file_is_measured_again_and_replaced(content: str, cache: Path) -> None:
    cache.mkdir()
    (cache / "ceilings.json").write_text(content)
    assert ceilings(CPU, "float32") is not None
    assert len(json.loads((cache / "ceilings.json").read_text())) == 1


def test_an_entry_of_another_version_is_measured_again(cache: Path) -> None:
    ceilings(CPU, "float32")
    known = json.loads((cache / "ceilings.json").read_text())
    (cache / "ceilings.json").write_text(json.dumps({"other": {"a": 1}, **{key: {"b": 2} for key in known}}))
    assert isinstance(ceilings(CPU, "float32"), Ceilings)
    assert len(json.loads((cache / "ceilings.json").read_text())) == 2


@pytest.mark.parametrize("value", ["1", None, True, -1.0, 0, float("nan"), float("inf"), 1e300, [1.0], {}])
def test_what_no_machine_can_be_is_measured_again(value: object, cache: Path) -> None:
    right = ceilings(CPU, "float32")
    known = json.loads((cache / "ceilings.json").read_text())
    (cache / "ceilings.json").write_text(json.dumps({key: {**entry, "flops": value} for key, entry in known.items()}))
    found = ceilings(CPU, "float32")
    assert right is not None
    assert found is not None
    assert 0 < found.flops < 1e18


def test_a_cache_that_cannot_be_written_costs_nothing_else(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    assert ceilings(CPU, "float32") is not None


def test_a_user_without_a_home_folder_has_ceilings_too(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(_cls: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", classmethod(nowhere))
    monkeypatch.delenv("CBATCH_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert ceilings(CPU, "float32") is not None
    monkeypatch.setenv("CBATCH_CACHE", str(cache))
    assert cache_folder() == cache


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_without_memory_to_measure_in_there_are_no_ceilings(
    error: type[Exception], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object) -> None:
        raise error("no memory")

    monkeypatch.setattr(module, "_measure", full)
    assert ceilings(CPU, "float32") is None
    assert not list(cache.rglob("*.json"))


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CBATCH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "cbatch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "cbatch"
    monkeypatch.setenv("CBATCH_CACHE", str(tmp_path / "here"))
    assert cache_folder() == tmp_path / "here"
