"""Where the cache is, and that code from it is only trusted where nobody else can write."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cbatch.config import EngineConfig
from cbatch.errors import SettingError, UsageError
from cbatch.model import cache
from cbatch.model.cache import cache_folder, code_folder, is_private

ROOT = Path(__file__).parents[1]
OTHER = 65534  # nobody's user id
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as others")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the user's own, in a folder of temporary files as it should be."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    folder = tmp_path / "above" / "cache"
    folder.mkdir(parents=True, mode=0o755)
    monkeypatch.setenv("CBATCH_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def _said_anew() -> Iterator[None]:
    cache._private.cache_clear()
    yield
    cache._private.cache_clear()


def private(folder: Path) -> Path:
    return folder.parents[1] / "tmp" / f"cbatch-{os.geteuid()}"


def test_a_folder_of_the_user_holds_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_folder() == folder
    assert capsys.readouterr().err == ""


def test_a_folder_that_is_not_there_is_made_for_this_user_only(folder: Path) -> None:
    folder.rmdir()
    assert code_folder() == folder
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o757, 0o775])
@pytest.mark.parametrize("which", ["cache", "above"])
def test_code_is_not_kept_where_others_can_write(
    folder: Path, mode: int, which: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_is_own_group", lambda _: False)
    (folder if which == "cache" else folder.parent).chmod(mode)
    if (which, mode) == ("above", 0o1777):  # nobody can move the cache out of a folder with this bit
        assert code_folder() == folder
        return
    for _ in range(2):
        assert code_folder() == private(folder)
    assert private(folder).stat().st_mode & 0o777 == 0o700
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert f"others can write to {folder}; using {private(folder)}" in said[0]


def test_a_group_that_is_the_users_own_is_nobody_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(0o775)
    monkeypatch.setattr(cache, "_is_own_group", lambda _: True)
    assert code_folder() == folder


@needs_root
@pytest.mark.parametrize("which", ["cache", "above"])
def test_a_folder_of_another_user_holds_no_code(folder: Path, which: str) -> None:
    os.chown(folder if which == "cache" else folder.parent, OTHER, OTHER)
    assert not is_private(folder)
    assert code_folder() == private(folder)


@needs_root
@pytest.mark.parametrize("kind", ["folder", "link", "file"])
def test_a_private_folder_that_another_user_has_made_first_is_not_used(folder: Path, kind: str) -> None:
    folder.chmod(0o777)
    theirs = private(folder)
    if kind == "folder":
        theirs.mkdir()
        os.chown(theirs, OTHER, OTHER)
    elif kind == "link":
        theirs.symlink_to(folder)
    else:
        theirs.touch()
    assert code_folder() not in (theirs, folder)
    assert code_folder().stat().st_mode & 0o777 == 0o700


@needs_root
def test_a_library_of_another_user_is_compiled_again(folder: Path) -> None:
    from cbatch.kernels.cpu.build import _is_whole, _seal

    library = folder / "cpu.so"
    library.write_bytes(b"code" + _seal(b"code"))
    assert _is_whole(library)
    os.chown(library, OTHER, OTHER)
    assert not _is_whole(library)


@pytest.fixture
def homeless(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001 the environment changes after it
    def nowhere(path: str) -> str:
        return path

    for name in ("CBATCH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", nowhere)


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_folder_has_a_cache_among_the_temporary_files(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert cache_folder() == code_folder() == private(folder)
    assert capsys.readouterr().err.count("this user has no home folder") == 1


@pytest.mark.usefixtures("homeless")
def test_a_path_from_a_home_folder_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="~/model: no home folder is known for it"):
        EngineConfig(model="~/model")
    monkeypatch.setenv("CBATCH_CACHE", "~/cache")
    with pytest.raises(UsageError, match="CBATCH_CACHE=~/cache: this user has no home folder"):
        cache_folder()


def test_a_cache_in_the_home_folder_may_be_named_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CBATCH_CACHE", "~/here")
    assert cache_folder() == tmp_path / "here"
