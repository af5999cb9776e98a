"""The tensors of a model in the bytes of a safetensors file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from ..checkpoint.frame import require
from ..checkpoint.safetensors_file import Bytes, FileLayout, file_header
from ..errorbound import Words

# Sized so that a block stays in a core's cache while it is compared and checksummed.
_BLOCK_WORDS = 1 << 19


def num_bytes(layout: FileLayout) -> int:
    """Return the size of all tensors in bytes."""
    return sum(spec.num_bytes for _, spec in layout)


def words_in(data: Bytes, layout: FileLayout) -> list[Words]:
    """Return the words of each tensor in the bytes of a file; they share its memory.

    Raises:
        CorruptCheckpoint: The file does not hold these tensors.
    """
    start = len(data) - num_bytes(layout)
    header = file_header(layout)
    require(start == len(header), "expected a file of these tensors")
    require(bytes(data[:start]) == header, "expected a file of these tensors")
    stops = np.cumsum([spec.num_bytes for _, spec in layout], dtype=np.int64)
    parts = np.split(data[start:], stops)
    return [part.view(spec.word) for part, (_, spec) in zip(parts, layout, strict=False)]


def blocks(tensors: Iterable[Words]) -> Iterator[Words]:
    """Yield the words of tensors in blocks of words of at most 4 bytes, patched as units."""
    for words in tensors:
        narrow = words.view(np.uint32) if words.itemsize == 8 else words
        for start in range(0, len(narrow), _BLOCK_WORDS):
            yield narrow[start : start + _BLOCK_WORDS]


def u32(numbers: Iterable[int]) -> bytes:
    """Return numbers as little-endian u32."""
    return np.fromiter(numbers, "<u4").tobytes()
