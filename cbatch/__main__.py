"""The `cbatch` command, and `python -m cbatch`."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from cbatch.isolation import isolate


def run() -> None:
    """Run the command, and exit without unloading libraries: everything is written, and torch takes most of a second."""
    _ensure_utf8()
    isolate()
    from cbatch.cli import main
    from cbatch.errors import FATAL, OK
    from cbatch.model.cache import ensure_cache

    ensure_cache()
    try:
        main()
    except SystemExit as end:
        if "torch" not in sys.modules or isinstance(end.code, str):
            raise
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with suppress(OSError, ValueError):  # closed, or nobody reads it any more; the exit code says so
                stream.flush()
        os._exit(end.code if isinstance(end.code, int) else OK if end.code is None else FATAL)


def _ensure_utf8() -> None:
    """Start anew in Python's UTF-8 mode where the locale says otherwise, so that prompts and file names never depend on it."""
    if sys.getfilesystemencoding().lower() not in ("utf-8", "utf8"):
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


if __name__ == "__main__":
    run()
