"""Convert the bytes of a field by its last extension, as WebDataset does."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ..errors import FormatError
from .prefix import Sample

Convert = Callable[[Any], Any]
INTEGERS = ("cls", "cls2", "count", "index", "inx", "id")


def _integer(data: bytes) -> int:
    """Parse an integer that fits 64 bits."""
    number = int(data)
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"expected a number of 64 bits, got {number}")
    return number


CONVERSIONS: dict[str, Convert] = {
    **dict.fromkeys(INTEGERS, _integer),
    **dict.fromkeys(("json", "jsn"), json.loads),
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
}


@lru_cache
def extension(field: str) -> str:
    """Return the last extension of a field's name.

    >>> extension("left.jpg")
    'jpg'
    """
    return field.rpartition(".")[2]


def convert(name: str, value: Any, key: str) -> Any:
    """Convert the value of a field, or each value of a list, by the field's last extension.

    Args:
        name: Name of the field.
        value: Bytes, or ``None``; images are returned unchanged.
        key: Key of the sample, named in errors.

    Raises:
        FormatError: The bytes do not match the extension.
    """
    to_value = CONVERSIONS.get(extension(name))
    if to_value is None or value is None:
        return value
    try:
        return list(map(to_value, value)) if isinstance(value, list) else to_value(value)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"field {name!r}: {error}", key=key) from error


def convert_all(sample: Sample) -> Sample:
    """Return a sample with every non-image field converted.

    >>> convert_all({"__key__": "a", "cls": b"3", "json": b"[1]", "jpg": b"..."})
    {'__key__': 'a', 'cls': 3, 'json': [1], 'jpg': b'...'}
    """
    return {name: convert(name, value, sample["__key__"]) for name, value in sample.items()}
