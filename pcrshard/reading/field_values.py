"""Convert the bytes of a field to what its schema says."""

from __future__ import annotations

import functools
import io
import json
import math
import tokenize
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import FormatError
from ..format.schema import PART_KINDS, Field, Schema
from .prefix import Sample

Convert = Callable[[Any], Any]
INTEGER_KINDS = ("class", "integer")


def _integer(data: bytes) -> int:
    """Parse an integer that fits 64 bits."""
    number = int(data)
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"expected a number of 64 bits, got {number}")
    return number


def _array(data: bytes) -> Any:
    """Parse an array in NumPy's format; nothing is unpickled."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"expected version 1 or 2 of NumPy's format, got {version}")
    read = (np.lib.format.read_array_header_1_0, np.lib.format.read_array_header_2_0)
    shape, is_fortran, dtype = read[version[0] - 1](file)
    if dtype.hasobject:
        raise ValueError("expected numbers, got Python objects")
    # Before memory is taken.
    expected = math.prod(shape) * dtype.itemsize
    if expected != len(data) - file.tell():
        raise ValueError(f"expected {expected} bytes, got {len(data) - file.tell()}")
    values = np.frombuffer(data, dtype, offset=file.tell()).copy()
    return values.reshape(shape, order="F" if is_fortran else "C")


# NumPy parses the header of an array as Python literals.
_UNREADABLE = (ValueError, RecursionError, SyntaxError, tokenize.TokenError)
_BY_KIND: dict[str, Convert] = {
    **dict.fromkeys(INTEGER_KINDS, _integer),
    "json": json.loads,
    "text": bytes.decode,
    "array": _array,
}
_BY_EXTENSION: dict[str, Convert] = {"json": json.loads, "jsn": json.loads, "npy": _array}


@functools.cache
def converter(field: Field) -> Convert | None:
    """Return the function from a field's bytes to its value; ``None`` if it stays bytes."""
    if field.kind in PART_KINDS:
        return _BY_EXTENSION.get(field.name.rpartition(".")[2])
    return _BY_KIND.get(field.kind)


def convert(field: Field, value: Any, key: str) -> Any:
    """Convert the value of a field.

    Args:
        field: The field, from the schema of the dataset.
        value: Bytes, or ``None``; images are returned unchanged.
        key: Key of the sample, named in errors.

    Raises:
        FormatError: The bytes are not what the schema says.
    """
    to_value = converter(field)
    if to_value is None or value is None:
        return value
    try:
        return to_value(value)
    except _UNREADABLE as error:
        raise FormatError(f"field {field.name!r}: {error}", key=key) from error


def convert_all(sample: Sample, schema: Schema) -> Sample:
    """Return a sample with every field converted except images."""
    key = sample["__key__"]
    return {"__key__": key} | {
        name: convert(schema.by_name[name], value, key)
        for name, value in sample.items()
        if name != "__key__"
    }
