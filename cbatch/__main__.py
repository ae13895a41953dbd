"""The `cbatch` command, and `python -m cbatch`."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from cbatch.isolation import isolate

TYPE_CHECKING = False  # typing's own is not imported before `isolate`
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def run() -> None:
    """Run the command, and exit without unloading libraries: everything is written, and torch takes most of a second."""
    _ensure_utf8()
    isolate()
    from cbatch.cli import main
    from cbatch.errors import FATAL, OK
    from cbatch.model.cache import ensure_cache
    from cbatch.streams import end_with_standard_output

    end_with_standard_output()
    ensure_cache()
    code = _exit_code(main)
    code = _exit_code(_flush) or code
    if "torch" not in sys.modules or isinstance(code, str):
        sys.exit(code)
    os._exit(code if isinstance(code, int) else OK if code is None else FATAL)


def _exit_code(act: Callable[[], None]) -> Any:
    """Do something; the code with which it ends the process, or None."""
    try:
        act()
    except SystemExit as end:
        return end.code
    return None


def _flush() -> None:
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):  # closed, or full
            stream.flush()


def _ensure_utf8() -> None:
    """Start anew in Python's UTF-8 mode where the locale says otherwise, so that prompts and file names never depend on it."""
    if sys.getfilesystemencoding().lower() not in ("utf-8", "utf8"):
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


if __name__ == "__main__":
    run()
