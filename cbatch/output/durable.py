"""File operations that leave a whole file or the one before, however the process or the machine dies."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def append(file: int, data: bytes) -> None:
    """Write all of `data` at the end of an open file, or raise OSError and leave the file as it was."""
    size = os.fstat(file).st_size
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError:
        os.ftruncate(file, size)
        raise


def replace(path: Path, chunks: Iterable[bytes]) -> None:
    """Put a whole file in place, made of these chunks, or leave what was there."""
    with replacing(path, path.with_name(path.name + ".tmp")) as scratch, scratch.open("wb") as file:
        file.writelines(chunks)


@contextmanager
def replacing(path: Path, scratch: Path) -> Iterator[Path]:
    """Let the block write to `scratch`, a file beside `path` or on the same disk; then put it in place of `path`."""
    yield scratch
    with scratch.open("rb") as file:
        os.fsync(file.fileno())
    publish(scratch, path)


def publish(scratch: Path, final: Path) -> None:
    """Rename a file whose content is safe to its final name, and make the name safe too."""
    scratch.replace(final)
    folder = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
