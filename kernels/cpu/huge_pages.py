"""Memory in huge pages."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch


class HugePages:
    """Hands out memory in pages of 2 MiB, where the system has them; the system provides a page when it is first written.

    With pages of 4 KiB, finding them takes a good part of the time that reading them takes.
    """

    _CHUNK = 64 * 1024**2  # bytes mapped at a time

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor; its values are not to be relied on."""
        size = math.prod(shape) * dtype.itemsize
        if size > len(self._rest):
            memory = mmap.mmap(-1, max(size, self._CHUNK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel without them
                    memory.madvise(mmap.MADV_HUGEPAGE)
            self._rest = torch.frombuffer(memory, dtype=torch.uint8)
        taken, self._rest = self._rest[:size], self._rest[-(-size // 64) * 64 :]
        return taken.view(dtype).view(shape)
