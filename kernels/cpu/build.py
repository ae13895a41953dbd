"""Compiles the C kernels of this folder for this machine, once, and loads them.

They run on torch's threads: its OpenMP library is made visible first, because a second one in the process would start
threads of its own, which compete with the first's.
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
    """The kernels, compiled into `folder` unless they are there already; Unavailable says why they can't be.

    What lies in `folder` is loaded, so it must be one that only this user and root can write to.

    `cpu`: the instruction set that the compiler may use, as its -march names it; by default all that this CPU has.
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
    library = folder / f"cpu-{key.hexdigest()}.so"
    try:
        if not _is_whole(library):
            _compile(command, [str(path) for path in sources if path.suffix == ".c"], library)
        if openmp := _openmp():
            ctypes.CDLL(openmp, mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise Unavailable(str(error)) from None


def _is_whole(path: Path) -> bool:
    """Whether a library is there, undamaged: loading a part of it, after a crash or with a full disk, can kill the process.

    The checksum says nothing about who made it, so it must be this user's, or root's.
    """
    if not path.exists() or path.stat().st_uid not in (0, os.geteuid()):
        return False
    content = path.read_bytes()
    return content[-_SEAL:] == _seal(content[:-_SEAL])


def _seal(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_SEAL).digest()


def _compile(command: list[str], sources: list[str], path: Path) -> None:
    """Compile into a file of another name first, so that no other process loads it half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    own_openmp = [] if _openmp() else ["-fopenmp"]
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        objects = [str(Path(scratch) / f"{index}.o") for index in range(len(sources))]
        linked = Path(scratch) / path.name
        _run(*([*command, "-c", source, "-o", made] for source, made in zip(sources, objects, strict=True)))
        _run([command[0], "-shared", *own_openmp, *objects, "-lm", "-o", str(linked)])
        content = linked.read_bytes()
        linked.write_bytes(content + _seal(content))
        linked.replace(path)


def _run(*commands: list[str]) -> None:
    """Run commands side by side; if one fails, Unavailable quotes the first line of its errors."""
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") for command in commands]
    problems = [process.communicate()[1].strip() for process in running]
    for command, process, problem in zip(commands, running, problems, strict=True):
        if process.returncode:
            reason = problem.splitlines()[0] if problem else f"it ended with {process.returncode}"
            raise Unavailable(f"{command[0]} fails: {reason}")


def _cpu() -> bytes:
    """The model and the features of this CPU: machines of several kinds may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor(), platform.machine()]
    return "\n".join(
        sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))} or lines)
    ).encode()


def _openmp() -> str | None:
    """The path of torch's OpenMP library; others in this process may have brought their own."""
    try:
        mapped = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    except OSError:
        return None
    found = [path for path in mapped if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))]
    return min(found, key=lambda path: ("torch" not in path, Path(path).name), default=None)
