"""Compiles the C kernels of `cpu/` for this machine, once, and loads them.

Threads are those of torch: its OpenMP library is made visible first, because a second one in the process would bring
threads of its own that fight with the first.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch  # noqa: F401 brings its OpenMP library

_SOURCES = Path(__file__).parent
_FLAGS = ["-O3", "-fopenmp", "-fPIC", "-fno-math-errno", "-fno-strict-aliasing", "-Wno-psabi"]
_SEAL = 16  # bytes of checksum at the end of a compiled library


class Unavailable(Exception):
    """There is no compiler, or it fails; the text says which."""


def load(folder: Path, cpu: str = "native") -> ctypes.CDLL:
    """The kernels, compiled into `folder` unless they are there already; Unavailable says why not.

    `cpu`: what the compiler may use, as its -march names it; by default all that this CPU has.
    """
    compiler = next(filter(None, map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "cc")))), None)
    if compiler is None:
        raise Unavailable("no C compiler (gcc or cc)")
    sources = sorted(_SOURCES.glob("*.[ch]"))
    if not sources:
        raise Unavailable(f"their source is not in {_SOURCES}")
    command = [compiler, *_FLAGS, f"-march={cpu}" if platform.machine() in ("x86_64", "AMD64") else f"-mcpu={cpu}"]
    key = hashlib.blake2b(digest_size=12)
    for part in [*(path.read_bytes() for path in sources), " ".join(command).encode(), _cpu()]:
        key.update(part)
    path = folder / f"cpu-{key.hexdigest()}.so"
    try:
        if not _is_whole(path):
            _compile(command, [str(one) for one in sources if one.suffix == ".c"], path)
        if openmp := _openmp():
            ctypes.CDLL(openmp, mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(str(error)) from None


def _is_whole(path: Path) -> bool:
    """Whether a library is there as it was compiled: loading what a crash or a full disk left of one can kill."""
    content = path.read_bytes() if path.exists() else b""
    return content[-_SEAL:] == _seal(content[:-_SEAL])


def _seal(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_SEAL).digest()


def _compile(command: list[str], sources: list[str], path: Path) -> None:
    """Compile into a file of another name first, so that no other process finds a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    own_openmp = [] if _openmp() else ["-fopenmp"]
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        objects = [str(Path(scratch) / f"{index}.o") for index in range(len(sources))]
        made = Path(scratch) / path.name
        _run(*([*command, "-c", source, "-o", one] for source, one in zip(sources, objects, strict=True)))
        _run([command[0], "-shared", *own_openmp, *objects, "-lm", "-o", str(made)])
        content = made.read_bytes()
        made.write_bytes(content + _seal(content))
        made.replace(path)


def _run(*commands: list[str]) -> None:
    """Run them side by side; Unavailable with the first line of what one that failed said."""
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") for command in commands]
    problems = [process.communicate()[1].strip() for process in running]
    for command, process, problem in zip(commands, running, problems, strict=True):
        if process.returncode:
            reason = problem.splitlines()[0] if problem else f"it ended with {process.returncode}"
            raise Unavailable(f"{command[0]} fails: {reason}")


def _cpu() -> bytes:
    """What tells this kind of CPU from others; a home folder may be shared by several."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor(), platform.machine()]
    return "\n".join(
        sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))} or lines)
    ).encode()


def _openmp() -> str | None:
    """The OpenMP library in this process that is torch's; others may have brought theirs too."""
    try:
        mapped = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    except OSError:
        return None
    found = [path for path in mapped if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))]
    return min(found, key=lambda path: ("torch" not in path, Path(path).name), default=None)
