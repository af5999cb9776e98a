"""What the bytes of a field mean, by its last extension, as WebDataset has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ..errors import FormatError
from .prefix import Sample

Convert = Callable[[Any], Any]
INTEGERS = ("cls", "cls2", "index", "inx", "id")


def _integer(data: bytes) -> int:
    """A number that 64 bits can hold."""
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
    """The last extension of a field's name.

    >>> extension("left.jpg")
    'jpg'
    """
    return field.rpartition(".")[2]


def convert(name: str, value: Any, key: str) -> Any:
    """The value of a field, or of each of a list, by the field's last extension.

    Args:
        name: Name of the field.
        value: Bytes, or ``None``; what is an image stays as it is.
        key: Key of the sample, named in errors.

    Raises:
        FormatError: The bytes are not what the name of the field says.
    """
    to_value = CONVERSIONS.get(extension(name))
    if to_value is None or value is None:
        return value
    try:
        return list(map(to_value, value)) if isinstance(value, list) else to_value(value)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"field {name!r}: {error}", key=key) from error


def convert_all(sample: Sample) -> Sample:
    """A sample with every field that is no image converted.

    >>> convert_all({"__key__": "a", "cls": b"3", "json": b"[1]", "jpg": b"..."})
    {'__key__': 'a', 'cls': 3, 'json': [1], 'jpg': b'...'}
    """
    return {name: convert(name, value, sample["__key__"]) for name, value in sample.items()}
