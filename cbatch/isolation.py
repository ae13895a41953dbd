"""Nothing is imported from the current folder, which may hold anybody's files: not here, nor by Pythons started here."""

from __future__ import annotations

import os
import sys

_HOME = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))  # noqa: PTH120 pathlib is not imported yet


def isolate() -> None:
    """Take the current folder from the places that modules are imported from; where cbatch itself is in it, it comes last.

    Python puts it first for `python -m` and `python -c`, and where PYTHONPATH has an empty entry.
    """
    sys.path[:] = _elsewhere(sys.path)
    os.environ["PYTHONPATH"] = os.pathsep.join(_elsewhere(os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    os.environ["PYTHONSAFEPATH"] = "1"  # for processes started from here, by Python 3.11 and later


def python(module: str, *arguments: str, interpreter: str = sys.executable) -> list[str]:
    """The command that runs a module as `python -m` does, but without the current folder, also in Python 3.10."""
    code = "import sys; sys.path = [entry for entry in sys.path if entry]; import runpy; "
    code += f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [interpreter, "-c", code, *arguments]


def _elsewhere(entries: list[str]) -> list[str]:
    try:
        here = os.path.realpath(os.curdir)
    except OSError:  # it has been removed
        return [entry for entry in entries if entry]
    kept = [entry for entry in entries if os.path.realpath(entry or os.curdir) != here]
    return [*kept, _HOME] if here == _HOME else kept
