"""The tensors of a model as the bytes of a safetensors file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..checkpoint.frame import MAX_HEADER_BYTES, Count, Record, Shape, require
from ..checkpoint.safetensors_file import DTYPES, PACKED, file_entry
from ..checkpoint.tensors import ITEM_BYTES, TensorSpec
from ..errorbound import Words

Bytes = NDArray[np.uint8]
# The tensors of a model in the order of a safetensors file.
Layout = list[tuple[str, TensorSpec]]
# Sized so that a block stays in a core's cache while it is compared and checksummed.
_BLOCK_WORDS = 1 << 19
_FORMAT = {"format": "pt"}  # transformers refuses files without it


def order(item: tuple[str, TensorSpec]) -> tuple[int, str]:
    """Return what the tensors of a :data:`Layout` are sorted by: larger types first, then names."""
    name, spec = item
    return -ITEM_BYTES[spec.dtype], name


def num_bytes(layout: Layout) -> int:
    """Return the size of all tensors in bytes."""
    return sum(spec.num_bytes for _, spec in layout)


def file_header(layout: Layout, metadata: dict[str, str] | None = None) -> bytes:
    """Return the header of a safetensors file."""
    found: dict[str, Any] = {"__metadata__": _FORMAT if metadata is None else metadata}
    start = 0
    for name, spec in layout:
        found[name] = file_entry(spec, start)
        start += spec.num_bytes
    text = json.dumps(found, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class _Entry(Record, frozen=True):
    dtype: str
    shape: Shape
    data_offsets: tuple[Count, Count]


_SPECS = {name: dtype for dtype, name in DTYPES.items()}


def parse_file(data: Any) -> tuple[dict[str, str], dict[str, tuple[TensorSpec, Bytes]]]:
    """Return the metadata of an untrusted safetensors file, and the type and bytes of each tensor.

    Raises:
        CorruptCheckpoint: A size or a place is wrong.
        msgspec.MsgspecError, LookupError: The header is wrong: see :func:`frame.damage_named`.
    """
    data = np.frombuffer(data, np.uint8)
    size = int.from_bytes(bytes(data[:8]), "little")
    is_there = 8 <= 8 + size <= len(data) and size <= MAX_HEADER_BYTES
    require(is_there, "expected the header of a safetensors file")
    raw = msgspec.json.decode(bytes(data[8 : 8 + size]), type=dict[str, dict[str, Any]])
    metadata = msgspec.convert(raw.pop("__metadata__", {}), dict[str, str])
    body, found = data[8 + size :], {}
    for name, value in raw.items():
        entry = msgspec.convert(value, _Entry)
        dtype, shape = _SPECS[entry.dtype], entry.shape
        if dtype == PACKED:
            require(shape[-1] % 2 == 0, "expected whole bytes")
            shape = (*shape[:-1], shape[-1] // 2)
        spec, (start, stop) = TensorSpec(dtype, shape), entry.data_offsets
        is_inside = stop - start == spec.num_bytes and stop <= len(body)
        require(is_inside, f"expected {spec.num_bytes} bytes of {name}")
        found[name] = spec, body[start:stop]
    return metadata, found


def words_in(data: Bytes, layout: Layout) -> list[Words]:
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


def blocks(tensors: Iterable[Words]) -> list[Words]:
    """Split the words of tensors into blocks of words of at most 4 bytes, patched as units."""
    found = []
    for words in tensors:
        narrow = words.view(np.uint32) if words.itemsize == 8 else words
        starts = range(0, len(narrow), _BLOCK_WORDS)
        found += [narrow[start : start + _BLOCK_WORDS] for start in starts]
    return found


def u32(numbers: Iterable[int]) -> bytes:
    """Return numbers as little-endian u32."""
    return np.fromiter(numbers, "<u4").tobytes()
