"""The types of the columns of Parquet output, and the values of records in them."""

from __future__ import annotations

import base64
from decimal import Decimal
from typing import Any

import pyarrow as pa

from cbatch.rows.moment import is_moment, stored_number

_INTEGERS = (pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64())
_FLOATS = ((pa.float16(), 11), (pa.float32(), 24), (pa.float64(), 53))  # and the bits of an integer that each holds
_UNITS = ("s", "ms", "us")  # of timestamps; the years that nanoseconds hold are too few to widen to them

types = pa.types


def output_type(kind: pa.DataType) -> pa.DataType | None:
    """The type of an output column for an input column of type `kind`: the same, or that of its values where it is a
    dictionary or an extension. None if only JSON text can hold it.
    """
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return output_type(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return pa.string() if str(kind) == "extension<arrow.uuid>" else output_type(kind.storage_type)
    if types.is_map(kind):
        key, item = output_type(kind.key_type), output_type(kind.item_type)
        return None if key is None or item is None else pa.map_(key, item)
    if types.is_struct(kind):
        fields = [(field.name, output_type(field.type)) for field in kind]
        return pa.struct(fields) if fields and all(field for _, field in fields) else None
    if types.is_union(kind) or types.is_interval(kind):
        return None
    return _list_type(kind, output_type(kind.value_type)) if types.is_nested(kind) else kind


def common_type(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """The type that holds all values of both exactly; None if only JSON text can."""
    if a == b or types.is_null(b):
        return a
    if types.is_null(a):
        return b
    if _is_text(a) and _is_text(b):
        return pa.string()
    if _is_bytes(a) and _is_bytes(b):
        return pa.binary()
    if _is_number(a) and _is_number(b):
        return _common_number(a, b)
    if types.is_timestamp(a) and types.is_timestamp(b) and a.tz == b.tz and {a.unit, b.unit} <= set(_UNITS):
        return max(a, b, key=lambda kind: _UNITS.index(kind.unit))
    if types.is_struct(a) and types.is_struct(b):
        fields = {field.name: field.type for field in a}
        for field in b:
            fields[field.name] = common_type(fields.get(field.name, pa.null()), field.type)
        return pa.struct(list(fields.items())) if all(fields.values()) else None
    if _is_list(a) and _is_list(b):
        return _list_type(pa.list_(pa.null()), common_type(a.value_type, b.value_type))
    return None


def _list_type(kind: pa.DataType, values: pa.DataType | None) -> pa.DataType | None:
    """The list type of these values that is most like `kind`."""
    if values is None:
        return None
    if types.is_fixed_size_list(kind):
        return pa.list_(values, kind.list_size)
    return pa.large_list(values) if types.is_large_list(kind) else pa.list_(values)


def _is_list(kind: pa.DataType) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    is_large = types.is_large_binary(kind) or types.is_binary_view(kind)
    return bool(types.is_binary(kind) or types.is_fixed_size_binary(kind) or is_large)


def _is_number(kind: pa.DataType) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind))


def _common_number(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """The smallest number type that holds both exactly: int32 and int64 make int64, int64 and a float have none."""
    if types.is_floating(a) and types.is_floating(b):
        return max(a, b, key=lambda kind: kind.bit_width)
    if types.is_integer(a) and types.is_integer(b):
        return next((kind for kind in _INTEGERS if _holds(kind, a) and _holds(kind, b)), None)
    whole, real = (a, b) if types.is_integer(a) else (b, a)
    return next((kind for kind, bits in _FLOATS if bits >= whole.bit_width and kind.bit_width >= real.bit_width), None)


def _holds(wide: pa.DataType, narrow: pa.DataType) -> bool:
    """Whether an integer type holds all values of another."""
    if types.is_signed_integer(wide) == types.is_signed_integer(narrow):
        return bool(wide.bit_width >= narrow.bit_width)
    return types.is_signed_integer(wide) and bool(wide.bit_width > narrow.bit_width)


def arrow_value(value: Any, kind: pa.DataType) -> Any:
    """A value of a record, as it was read or as JSON keeps it, as Arrow takes it for a column of this type."""
    if value is None:
        return None
    if types.is_map(kind):
        return [(arrow_value(key, kind.key_type), arrow_value(item, kind.item_type)) for key, item in value]
    if types.is_struct(kind):
        return {field.name: arrow_value(value.get(field.name), field.type) for field in kind}
    if _is_list(kind):
        return [arrow_value(item, kind.value_type) for item in value]
    if _is_bytes(kind):
        return base64.b64decode(value) if isinstance(value, str) else value
    if is_moment(kind):
        return stored_number(value, kind)
    return Decimal(value) if types.is_decimal(kind) else value
