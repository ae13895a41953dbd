"""Folders for what is fetched, compiled or measured once and then kept."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from contextlib import suppress
from functools import cache
from multiprocessing import parent_process
from pathlib import Path

from cbatch.errors import UsageError

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """Where cbatch keeps what it fetched or measured: $CBATCH_CACHE, else the user's cache folder.

    A user without a home folder, as in a container, has one in the folder for temporary files.
    """
    given = os.environ.get("CBATCH_CACHE")
    try:
        if given:
            return Path(given).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cbatch"
    except RuntimeError:
        if given:
            raise UsageError(f"CBATCH_CACHE={given}: this user has no home folder; name the whole path") from None
        return _private("this user has no home folder")


def ensure_cache() -> None:
    """Give all libraries a folder for their caches where there is no home folder; they would make one that is named ~."""
    if not os.environ.get("XDG_CACHE_HOME") and os.path.expanduser("~") == "~":  # noqa: PTH111
        os.environ["XDG_CACHE_HOME"] = str(_private("this user has no home folder"))


def code_folder() -> Path:
    """Where compiled code is kept: the cache, or a folder of this user's own where others can write to the cache.

    What lies there is loaded into the process, so whoever can write there could run code as this user.
    """
    folder = cache_folder()
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder if is_private(folder) else _private(f"others can write to {folder}")


def is_private(folder: Path) -> bool:
    """Whether only this user and root can change what is in a folder, or put another in its place."""
    path, is_inside = folder.absolute().resolve(), False
    for part in (path, *path.parents):
        try:
            status = part.stat()
        except OSError:
            return False
        guarded = status.st_mode & stat.S_ISVTX and is_inside  # in such a folder nobody can move what is another's
        if status.st_uid not in (0, os.geteuid()) or (_others_write(status) and not guarded):
            return False
        is_inside = True
    return True


def _others_write(status: os.stat_result) -> bool:
    """Whether a folder's mode lets others write; a group that has the user's name has nobody else in it."""
    writable = status.st_mode & _WRITABLE_BY_OTHERS
    return bool(writable) and not (writable == stat.S_IWGRP and _is_own_group(status.st_gid))


def _is_own_group(group_id: int) -> bool:
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(group_id), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


@cache
def _private(reason: str) -> Path:
    """A folder of this user's own among the temporary files, the same each time unless somebody else has made it."""
    folder = Path(tempfile.gettempdir()) / f"cbatch-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid() or not is_private(folder):
            raise PermissionError
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="cbatch-"))
    if parent_process() is None:  # else the process that started this one has said it
        print(f"cbatch: {reason}; using {folder} (set CBATCH_CACHE to another of your own)", file=sys.stderr)
    return folder
