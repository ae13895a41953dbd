"""Triton's interpreter, made to compute bfloat16 and fp8 as a GPU does. Import after TRITON_INTERPRET=1 is set.

As shipped (3.6 and 3.9) it keeps bfloat16 as uint16 and does integer arithmetic on that, cuts instead of rounding, and
scans a module again at every call of a device function. Here bfloat16 operands become float32, the result is rounded to
nearest even, and a module is scanned once a launch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from cbatch.model.ops import TritonBackend

Builder, Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
_FP8 = {tl.float8e4nv: (torch.float8_e4m3fn, 448.0), tl.float8e5: (torch.float8_e5m2, 57344.0)}


def _is_bf16(value: Any) -> bool:
    return isinstance(value, Handle) and value.dtype.scalar.name == "bf16"


def _widened(value: Any) -> Any:
    if not _is_bf16(value):
        return value
    return Handle((value.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _rounded(data: Any) -> Any:
    """float32 -> bfloat16, through torch."""
    bits = torch.from_numpy(np.ascontiguousarray(data, np.float32)).bfloat16().view(torch.uint16).numpy()
    return Handle(bits.reshape(np.shape(data)), tl.bfloat16)


def _in_float32(name: str) -> None:
    original = getattr(Builder, name)

    def operation(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(map(_is_bf16, args)):
            return original(self, *args, **kwargs)
        result = original(self, *map(_widened, args), **kwargs)
        return result if result.data.dtype == np.bool_ else _rounded(result.data)

    setattr(Builder, name, operation)


for _name in ("binary_op", "unary_op", "create_clampf", "create_fma", "create_rsqrt"):
    _in_float32(_name)

_dot, _cast, _fp_to_fp = Builder.create_dot, Builder.cast_impl, Builder.create_fp_to_fp


def _create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
    return _dot(self, _widened(a), _widened(b), d, *rest)


def _cast_impl(self: Any, source: Any, target: Any) -> Any:
    if _is_bf16(source) and target.scalar == tl.float32:
        return _widened(source)
    if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
        return _rounded(source.data)
    return _cast(self, source, target)


def _create_fp_to_fp(self: Any, source: Any, target: Any, mode: Any) -> Any:
    kind = target.scalar
    if kind in _FP8:
        dtype, limit = _FP8[kind]
        data = np.clip(_widened(source).data.astype(np.float32), -limit, limit)
        bits = torch.from_numpy(np.ascontiguousarray(data)).to(dtype).view(torch.uint8).numpy()
        return Handle(bits.reshape(source.data.shape), kind)
    if tl.bfloat16 in (kind, source.dtype.scalar) and tl.float32 in (kind, source.dtype.scalar):
        return _cast_impl(self, source, target)
    return _fp_to_fp(self, source, target, mode)


Builder.create_dot, Builder.cast_impl, Builder.create_fp_to_fp = _create_dot, _cast_impl, _create_fp_to_fp
Builder.get_bf16 = lambda _self, value: _rounded(np.array([value], np.float32))

# A third of all work: every integer operation a second time in 64 bits, for an assertion that only `debug` looks at.
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)

_np_dtype_of, _np_dtypes = interpreter._get_np_dtype, dict[str, Any]()


def _get_np_dtype(kind: Any) -> Any:
    """A table of all types is made at every call; here it is made once for each type."""
    name = kind.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _np_dtype_of(kind)
    return _np_dtypes[name]


interpreter._get_np_dtype = _get_np_dtype

_scan, _launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
_scanned: set[int] = set()


class _Kept:
    def restore(self) -> None:
        """Nothing: the module stays patched until the launch ends."""


def _scan_once(function: Any) -> Any:
    if id(function.__globals__) in _scanned:
        return _Kept()
    _scanned.add(id(function.__globals__))
    scope = _scan(function)
    tl.tensor.__index__ = lambda self: int(self.handle.data.squeeze())  # numpy 2.4 refuses int() of an array of one
    return scope


def _launch_once(self: Any, *args: Any, **kwargs: Any) -> Any:
    _scanned.clear()
    try:
        with np.errstate(over="ignore"):  # a GPU says nothing of exp() becoming infinite
            return _launch(self, *args, **kwargs)
    finally:
        _scanned.clear()


interpreter._patch_lang, interpreter.GridExecutor.__call__ = _scan_once, _launch_once

INTERPRETER = TritonBackend(torch.device("cpu"), min_head_size=1)  # the Triton kernels, on any machine
