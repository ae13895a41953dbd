"""The C kernels for CPUs in `cpu/`: compiled once for this machine, then called through ctypes.

Same contracts as `reference.py`. They take bfloat16 and float32. Threads are those of torch: its OpenMP library is made
visible first, because a second one in the process would bring threads of its own that fight with the first.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_SOURCES = Path(__file__).parent / "cpu"
_FLAGS = ["-O3", "-fopenmp", "-fPIC", "-fno-math-errno", "-fno-strict-aliasing", "-Wno-psabi"]
_SEAL = 16  # bytes of checksum at the end of a compiled library
_PANEL, _LANES = 32, 16
_MOST_INT8 = 1 << 16  # products of bytes, 255 * 127 at most, that 32 bits hold the sum of
_DTYPES = torch.bfloat16, torch.float32
_GATES = {None: 0, "silu": 1, "gelu": 2}
_ADDRESS, _WORD, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Unavailable(Exception):
    """There is no compiler, or it fails; the text says which."""


class _Linear(ctypes.Structure):
    _fields_ = [(name, _ADDRESS) for name in ("x", "w", "x_scale", "w_scale", "offset", "bias", "y")] + [
        (name, _WORD) for name in ("m", "n", "units", "x_stride", "y_stride", "epilogue", "is_int8", "is_bf16")
    ]


class _Attention(ctypes.Structure):
    _fields_ = [
        (name, kind)
        for kind, names in (
            (
                _ADDRESS,
                "query key value k_cache v_cache out slots tables starts lengths tasks cos sin q_weight k_weight",
            ),
            (_WORD, "num_tokens num_tasks heads kv_heads k_size v_size rotary block_size table_stride"),
            (_WORD, "q_stride k_stride v_stride window is_bf16"),
            (_FLOAT, "scale softcap eps weight_offset"),
        )
        for name in names.split()
    ]


_SIGNATURES = {
    "linear": [_ADDRESS],
    "store_kv": [_ADDRESS],
    "paged_attention": [_ADDRESS],
    "rms_norm": [_ADDRESS] * 4 + [_WORD] * 3 + [_FLOAT] * 2 + [_WORD],
    "quantize_rows": [_ADDRESS] * 3 + [_WORD] * 4,
    "argmax": [_ADDRESS] * 2 + [_WORD] * 4,
}


def load(folder: Path, cpu: str = "native") -> Library:
    """The kernels, compiled into `folder` unless they are there already; Unavailable says why not.

    `cpu`: what the compiler may use, as its -march names it; by default all that this CPU has.
    """
    compiler = next(filter(None, map(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")))), None)
    if compiler is None:
        raise Unavailable("no C compiler (cc, gcc or clang)")
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
        return Library(ctypes.CDLL(str(path)))
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


class Pages:
    """Hands out memory that is in pages of 2 MiB where the system has them, and that is taken when first written.

    With pages of 4 KiB, finding them is a good part of the time that reading them takes.
    """

    _CHUNK = 64 * 1024**2  # bytes mapped at a time

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, or rather one of zeros."""
        size = math.prod(shape) * dtype.itemsize
        if size > len(self._rest):
            memory = mmap.mmap(-1, max(size, self._CHUNK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel without them
                    memory.madvise(mmap.MADV_HUGEPAGE)
            self._rest = torch.frombuffer(memory, dtype=torch.uint8)
        taken, self._rest = self._rest[:size], self._rest[-(-size // 64) * 64 :]
        return taken.view(dtype).view(shape)


@dataclass(frozen=True)
class Packed:
    """Weights [n, k] in panels; all else is [n padded]: `bias` and `scales` float32, `offset` int32."""

    panels: Tensor
    n: int
    k: int
    bias: Tensor | None
    gate: str | None
    scales: Tensor | None = None
    offset: Tensor | None = None


def _interleave(x: Tensor) -> Tensor:
    """Gates and what they scale, in turns of 16."""
    gate, up = x.chunk(2)
    return torch.stack([gate.unflatten(0, (-1, _LANES)), up.unflatten(0, (-1, _LANES))], 1).flatten(0, 2)


class Library:
    """The compiled kernels. Inputs are on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, kinds in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = kinds, None
        self._c: Any = library
        self._pages = Pages()
        self._multiplies_bf16 = bool(library.multiplies_bf16())

    def can_pack(self, weight: Tensor, gate: str | None, int8: bool) -> bool:
        """Whether `pack` takes these weights [n, k], and `linear` is fast with them."""
        n, k = weight.shape
        fast = int8 or (weight.dtype == torch.bfloat16 and self._multiplies_bf16)
        summable = not int8 or k <= _MOST_INT8
        return fast and summable and weight.dtype in _DTYPES and k % _LANES == 0 and (gate is None or n % _PANEL == 0)

    def pack(self, weight: Tensor, bias: Tensor | None, gate: str | None, int8: bool) -> Packed:
        """Weights [n, k] for `linear`. With a `gate` (silu or gelu) the first half of the outputs scales the rest.

        int8: each output has its own scale, and so has each row of the input.
        """
        n, k = weight.shape
        if gate:
            weight, bias = _interleave(weight), None if bias is None else _interleave(bias)
        padding, unit = -n % _PANEL, 4 if int8 else 2
        weight = functional.pad(weight, (0, 0, 0, padding))
        bias = None if bias is None else functional.pad(bias.float(), (0, padding)).contiguous()
        scales = offset = None
        if int8:
            wide = weight.float()
            scales = wide.abs().amax(1).clamp(min=1e-30) / 127
            weight = (wide / scales[:, None]).round().to(torch.int8)
            offset = 128 * weight.sum(1, dtype=torch.int32)
        panels = weight.view(-1, _PANEL, k // unit, unit).permute(0, 2, 1, 3)
        return Packed(self._pages.take(panels.shape, panels.dtype).copy_(panels), n, k, bias, gate, scales, offset)

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        """x [..., k] -> [..., n] of the same dtype, or half as wide if gated."""
        assert x.dtype in (_DTYPES if packed.scales is not None else [packed.panels.dtype])
        rows = _matrix(x)
        m, width, is_bf16 = len(rows), packed.n // 2 if packed.gate else packed.n, x.dtype == torch.bfloat16
        out = torch.empty(m, width, dtype=x.dtype)
        call = _Linear(
            rows.data_ptr(), packed.panels.data_ptr(), None, None, None, _address(packed.bias), out.data_ptr(),
            m, packed.n, packed.panels.shape[1], rows.stride(0) * 2, width, _GATES[packed.gate], 0, is_bf16,
        )  # fmt: skip
        if packed.scales is not None and packed.offset is not None:
            bytes_, scale = torch.empty(m, packed.k, dtype=torch.uint8), torch.empty(m)
            self._c.quantize_rows(
                rows.data_ptr(), bytes_.data_ptr(), scale.data_ptr(), m, packed.k, rows.stride(0), is_bf16
            )
            call.x, call.x_stride, call.is_int8 = bytes_.data_ptr(), packed.k, 1
            call.x_scale, call.w_scale, call.offset = (
                scale.data_ptr(),
                packed.scales.data_ptr(),
                packed.offset.data_ptr(),
            )
        self._c.linear(ctypes.addressof(call))
        return out.view(*x.shape[:-1], width)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, weight_offset: float) -> Tensor:
        """`reference.rms_norm`, for a row size that is a multiple of 16."""
        rows = _matrix(x)
        out = torch.empty(rows.shape, dtype=x.dtype)
        self._c.rms_norm(
            rows.data_ptr(), _address(residual), weight.data_ptr(), out.data_ptr(), *rows.shape, rows.stride(0),
            eps, weight_offset, x.dtype == torch.bfloat16,
        )  # fmt: skip
        return out.view(x.shape)

    def argmax(self, logits: Tensor) -> Tensor:
        """[n, vocabulary] -> [n] int64: the lowest index of the largest, or -1 if it is not finite or one is NaN."""
        logits = _matrix(logits)
        tokens = torch.empty(len(logits), dtype=torch.int64)
        self._c.argmax(
            logits.data_ptr(), tokens.data_ptr(), *logits.shape, logits.stride(0), logits.dtype == torch.bfloat16
        )
        return tokens

    def store_kv(
        self,
        query: Tensor | None,
        key: Tensor,
        value: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        angles: tuple[Tensor, Tensor] | None = None,
        norms: tuple[Tensor | None, Tensor | None, float, float] = (None, None, 0.0, 0.0),
    ) -> None:
        """`reference.rope_store_kv` with `angles`, else `reference.store_kv`; the cache is in the layout of `cpu/`."""
        call = _attention(k_cache, v_cache)
        key, value = _rows(key), _rows(value)
        assert all(x is None or x.dtype == k_cache.dtype for x in (query, key, value, *norms[:2]))
        call.key, call.value, call.k_stride, call.v_stride = (
            key.data_ptr(),
            value.data_ptr(),
            key.stride(0),
            value.stride(0),
        )
        call.slots, call.num_tokens = slot_mapping.data_ptr(), len(key)
        if query is not None:
            assert query is _rows(query)  # it is changed in place
            call.query, call.q_stride, call.heads = query.data_ptr(), query.stride(0), query.shape[1]
        if angles is not None:
            cos, sin = (one.to(key.dtype).contiguous() for one in angles)
            call.cos, call.sin, call.rotary = cos.data_ptr(), sin.data_ptr(), cos.shape[1]
        call.q_weight, call.k_weight = _address(norms[0]), _address(norms[1])
        call.eps, call.weight_offset = norms[2:]
        self._c.store_kv(ctypes.addressof(call))

    def paged_attention(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        where: Sequence[Tensor],
        scale: float,
        window: int,
        softcap: float,
    ) -> Tensor:
        """`reference.paged_attention` in the dtype of `query`.

        `where`: block_tables, cu_seqlens_q, seq_lens, and tasks [n, 3]: sequence, first and last + 1 of its tokens of
        this step. Together they are all the tokens, the longest task first.
        """
        query = _rows(query)
        assert query.dtype == k_cache.dtype
        tables, starts, lengths, tasks = where
        out = query.new_empty(*query.shape[:2], v_cache.shape[3])
        call = _attention(k_cache, v_cache)
        call.query, call.q_stride, call.heads, call.out = (
            query.data_ptr(),
            query.stride(0),
            query.shape[1],
            out.data_ptr(),
        )
        call.tables, call.table_stride, call.starts = tables.data_ptr(), tables.stride(0), starts.data_ptr()
        call.lengths, call.tasks, call.num_tasks = lengths.data_ptr(), tasks.data_ptr(), len(tasks)
        call.scale, call.window, call.softcap = scale, window, softcap
        self._c.paged_attention(ctypes.addressof(call))
        return out


def fits(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether the kernels take caches [num_blocks, block_size, H_kv, D] of this shape and dtype."""
    return (
        k_cache.dtype in _DTYPES
        and k_cache.shape[1] % _PANEL == 0
        and k_cache.shape[3] % _LANES == v_cache.shape[3] % _LANES == 0
    )


def can_norm(x: Tensor, weight: Tensor, residual: Tensor | None) -> bool:
    """Whether `Library.rms_norm` takes tensors of these shapes and dtypes."""
    fits_x = residual is None or (residual.dtype == x.dtype and residual.is_contiguous())
    return fits_x and x.dtype == weight.dtype and x.dtype in _DTYPES and x.shape[-1] % _LANES == 0


def _attention(k_cache: Tensor, v_cache: Tensor) -> _Attention:
    _, block_size, kv_heads, k_size = k_cache.shape
    return _Attention(
        k_cache=k_cache.data_ptr(), v_cache=v_cache.data_ptr(), kv_heads=kv_heads, k_size=k_size,
        v_size=v_cache.shape[3], block_size=block_size, is_bf16=k_cache.dtype == torch.bfloat16,
    )  # fmt: skip


def _matrix(x: Tensor) -> Tensor:
    """x [..., k] as [m, k], rows contiguous in themselves."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _rows(x: Tensor) -> Tensor:
    """[T, H, D] with the heads of a token back to back."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
