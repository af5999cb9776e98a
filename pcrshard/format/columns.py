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
_DTYPES = {name: np.dtype(name) for name in ("<u1", "<u2", "<u4", "<u8")}


class Columns:
    """A cursor over columns; it checks each length before using it."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.pos = 0

    def take(self, size: int) -> int:
        """Advance by ``size`` bytes; return their offset."""
        start = self.pos
        require(size <= len(self.body) - start, "a column is longer than the index")
        self.pos = start + size
        return start

    def array(self, dtype: str, *shape: int) -> npt.NDArray[Any]:
        """Return an array of this shape, a view of the body."""
        kind = _DTYPES[dtype]
        start = self.take(math.prod(shape) * kind.itemsize)
        return np.ndarray(shape, kind, self.body, start)

    def byte_strings(self, count: int) -> tuple[bytes | None, ...]:
        """Return ``count`` values, ``None`` for absent ones."""
        sizes = self.array("<u4", count).tolist()
        total = sum(sizes)
        # Most samples have the field, so the common case takes one pass.
        if total < ABSENT:
            return self._read(sizes, total)
        stored = [0 if size == ABSENT else size for size in sizes]
        values = self._read(stored, sum(stored))
        pairs = zip(values, sizes, strict=True)
        return tuple(None if size == ABSENT else value for value, size in pairs)

    def _read(self, sizes: list[int], total: int) -> tuple[bytes, ...]:
        start = self.take(total)
        return tuple(map(io.BytesIO(memoryview(self.body)[start : self.pos]).read, sizes))


def encode_array(array: npt.NDArray[Any]) -> bytes:
    """Return the little-endian bytes of an array."""
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


def encode_sizes(values: Sequence[bytes | None]) -> bytes:
    """Return the sizes of byte strings, u32 each."""
    sizes = [ABSENT if value is None else len(value) for value in values]
    return np.array(sizes, "<u4").tobytes()


def encode_byte_strings(values: Sequence[bytes | None]) -> bytes:
    """Return the sizes of values, then the values."""
    return b"".join([encode_sizes(values), *filter(None, values)])
