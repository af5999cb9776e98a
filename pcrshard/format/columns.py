"""Raw columns of an index or a table: arrays and byte strings, one after the other (SPEC 2.3)."""

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
    """A cursor over columns; it refuses a length before it takes it.

    Args:
        body: All columns, and what is before them.
        start: Where the first one begins.
    """

    def __init__(self, body: bytes, start: int) -> None:
        self.body = body
        self.pos = start

    def take(self, size: int) -> int:
        """Go on by ``size`` bytes; returns where they begin."""
        start = self.pos
        require(size <= len(self.body) - start, "a column is longer than the index")
        self.pos = start + size
        return start

    def array(self, dtype: str, *shape: int) -> npt.NDArray[Any]:
        """An array of this shape; a view of the body."""
        kind = _DTYPES[dtype]
        start = self.take(math.prod(shape) * kind.itemsize)
        return np.ndarray(shape, kind, self.body, start)

    def present(self, count: int, most: int) -> tuple[bytes, ...]:
        """So many values, none of which may be absent or longer than ``most`` bytes."""
        sizes = self.array("<u4", count).tolist()
        require(max(sizes, default=0) <= most, f"a value has more than {most} bytes")
        return self._read(sizes, sum(sizes))

    def byte_strings(self, count: int) -> tuple[bytes | None, ...]:
        """So many values, ``None`` for one that is absent."""
        sizes = self.array("<u4", count).tolist()
        total = sum(sizes)
        # Most fields are there in each sample, so nothing is looked at twice without need.
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
    """The little-endian bytes of an array."""
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


def encode_sizes(values: Sequence[bytes | None]) -> bytes:
    """The sizes of byte strings, u32 each."""
    sizes = [ABSENT if value is None else len(value) for value in values]
    return np.array(sizes, "<u4").tobytes()


def encode_byte_strings(values: Sequence[bytes | None]) -> bytes:
    """Sizes of values, then the values."""
    return b"".join([encode_sizes(values), *filter(None, values)])
