"""Raw columns of an index or a table: concatenated arrays and byte strings (SPEC 2.3)."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .shard_head import require

ABSENT = 0xFFFFFFFF
_TOO_LONG = "a column is longer than the index"


class Columns(io.BytesIO):
    """A stream of columns; it checks each length."""

    def array(self, dtype: str, *shape: int) -> npt.NDArray[Any]:
        """Return an array of this shape."""
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        data = self.read(size)
        require(len(data) == size, _TOO_LONG)
        return np.ndarray(shape, kind, data)

    def byte_strings(self, count: int) -> tuple[bytes | None, ...]:
        """Return ``count`` values, ``None`` for absent ones."""
        sizes = self.array("<u4", count).tolist()
        # Most samples have the field, so the common case takes one pass.
        some_absent = ABSENT in sizes
        stored = [0 if size == ABSENT else size for size in sizes] if some_absent else sizes
        stop = self.tell() + sum(stored)
        values = tuple(map(self.read, stored))
        require(self.tell() == stop, _TOO_LONG)
        if not some_absent:
            return values
        pairs = zip(values, sizes, strict=True)
        return tuple(None if size == ABSENT else value for value, size in pairs)


def encode_byte_strings(values: Sequence[bytes | None]) -> bytes:
    """Return the sizes of values, then the values."""
    sizes = [ABSENT if value is None else len(value) for value in values]
    return b"".join([np.array(sizes, "<u4").tobytes(), *filter(None, values)])
