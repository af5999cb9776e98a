"""Convert the bytes of a field by its last extension, as WebDataset does."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ..errors import FormatError
from .prefix import Sample

Convert = Callable[[Any], Any]
INTEGERS = ("cls", "cls2", "index", "inx", "id")


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


def extension(field: str) -> str:
    """Return the last extension of a field's name.

    >>> extension("left.jpg")
    'jpg'
    """
    return field.rpartition(".")[2]


def convert(
    to_value: Convert | None,
    name: str,
    sample: Sample,
) -> Any:
    """Return a field's converted value, or list of values; ``None`` if the sample lacks the field.

    Raises:
        FormatError: The bytes do not match the extension.
    """
    if to_value is None or name not in sample:
        return sample.get(name)
    try:
        value = sample[name]
        return list(map(to_value, value)) if isinstance(value, list) else to_value(value)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"field {name!r}: {error}", key=sample["__key__"]) from error


def convert_all(sample: Sample) -> Sample:
    """Return a sample with every non-image field converted.

    >>> convert_all({"__key__": "a", "cls": b"3", "json": b"[1]", "jpg": b"..."})
    {'__key__': 'a', 'cls': 3, 'json': [1], 'jpg': b'...'}
    """
    return {name: convert(CONVERSIONS.get(extension(name)), name, sample) for name in sample}
