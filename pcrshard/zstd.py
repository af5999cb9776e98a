"""Zstandard compression of buffers, with sizes checked before memory is allocated."""

from __future__ import annotations

import threading
from typing import Any

import zstandard

from .errors import FormatError

# Like level 1, but the table of matches is tiny, so that it finds runs and little else: 15 %
# faster and 2 % smaller on codes of activations.
_CODES = zstandard.ZstdCompressionParameters.from_level(
    1, hash_log=6, min_match=7, write_content_size=1
)


class _Coders(threading.local):
    """What each thread has of its own; a compressor for each level."""

    def __init__(self) -> None:
        self.compressors: dict[int, zstandard.ZstdCompressor] = {}
        self.codes = zstandard.ZstdCompressor(compression_params=_CODES)
        self.decompressor = zstandard.ZstdDecompressor()


_coders = _Coders()


def compress(data: Any, level: int = 1) -> bytes:
    """One frame that says how long its content is.

    Args:
        data: A contiguous bytes-like object.
        level: 1 is fast, 19 small; below 0 is faster still.
    """
    compressors = _coders.compressors
    if level not in compressors:
        compressors[level] = zstandard.ZstdCompressor(level=level, write_content_size=True)
    return compressors[level].compress(data)


def compress_codes(data: Any) -> bytes:
    """A frame of quantized values, which are drawn from few and repeat in runs of zeros only."""
    return _coders.codes.compress(data)


def decompress(data: Any, num_bytes: int) -> bytes:
    """The content of one frame.

    Args:
        data: A frame of :func:`compress`.
        num_bytes: How long its content is to be; more memory than that is never taken.

    Raises:
        FormatError: The bytes are no such frame, or its content has another length.
    """
    try:
        promised = content_bytes(data)
    except FormatError as error:
        raise FormatError(f"expected {num_bytes} bytes: {error}") from error
    if promised != num_bytes:
        raise FormatError(f"expected a frame of {num_bytes} bytes, got one of {promised}")
    try:
        return _coders.decompressor.decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"expected a Zstandard frame of {num_bytes} bytes: {error}") from error


def content_bytes(data: Any) -> int:
    """How long the content of a frame says it is.

    Raises:
        FormatError: The bytes are no frame, or one that does not say so.
    """
    try:
        promised = zstandard.frame_content_size(bytes(data[:18]))
    except zstandard.ZstdError as error:
        raise FormatError(f"expected a Zstandard frame: {error}") from error
    if promised < 0:
        raise FormatError("expected a Zstandard frame that states its content's size")
    return int(promised)
