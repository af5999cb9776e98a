"""Lossless coding of words and plain bytes: byte planes and zstd."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import zstd
from ..errors import FormatError
from ..memory import Buffer
from .float_types import Words

_LEVEL = 3
_RAW = b"\x00"
_ZSTD = b"\x01"


def compress(data: Buffer, level: int = _LEVEL) -> bytes:
    """Compress bytes to one zstd frame with its content size, or store them if that is smaller.

    The first byte of the payload says which.
    """
    packed = zstd.compress(data, level)
    if len(packed) < len(data):
        return _ZSTD + packed
    return _RAW + bytes(data)


def decompress(payload: Buffer, size: int) -> bytes:
    """Return the ``size`` bytes of a payload; the caller must have limited ``size``.

    Raises:
        FormatError: The payload is damaged or holds a different number of bytes.
    """
    data = bytes(payload[1:])
    if _is_frame(payload):
        return zstd.decompress(data, size)
    if len(data) != size:
        raise FormatError(f"expected {size} bytes, got {len(data)}")
    return data


def _is_frame(payload: Buffer) -> bool:
    """Return whether a payload is a zstd frame, according to its first byte."""
    kind = bytes(payload[:1])
    if kind not in (_RAW, _ZSTD):
        raise FormatError(f"expected the mark of a coder, got {kind!r}")
    return kind == _ZSTD


def encode_planes(words: Words) -> bytes:
    """Encode words (N,) as byte planes: the first bytes of all words, then the second, and so on.

    This separates the compressible exponents from the incompressible low bits of the mantissas.
    """
    planes = words.view(np.uint8).reshape(len(words), words.itemsize).T
    return compress(planes.tobytes())


def decode_planes(
    payload: Buffer,
    count: int,
    word: np.dtype[Any],
) -> Words:
    """Decode the ``count`` words of a payload; the caller must have limited ``count``.

    Raises:
        FormatError: The payload is damaged or holds a different number of words.
    """
    data = decompress(payload, count * word.itemsize)
    planes = np.frombuffer(data, np.uint8).reshape(word.itemsize, count)
    return np.ascontiguousarray(planes.T).view(word).reshape(count)
