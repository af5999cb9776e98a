"""Zstandard frames of known size, and streams; the only module that imports zstandard."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import zstandard

from .errors import FormatError

# The level of quantized values and patches, which repeat in runs only: 1 with a tiny match table,
# which finds runs and little else; 15 % faster, and 2 % smaller on codes of activations.
CODES = 0
_CODES = zstandard.ZstdCompressionParameters.from_level(
    1, hash_log=9, min_match=7, write_content_size=1
)

# Idle compressors by level, and decompressors by None. Not kept by thread: threads of OpenMP are
# new to Python each time. Errors drop what they used.
_idle: defaultdict[int | None, deque[Any]] = defaultdict(deque)


StreamError = zstandard.ZstdError


def open_stream(file: Any) -> Any:
    """Return the content of a file of frames, as a file to be read once."""
    return zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)


def _take(level: int | None) -> Any:
    """Return a coder that no other thread uses."""
    try:
        return _idle[level].pop()
    except IndexError:
        if level is None:
            return zstandard.ZstdDecompressor()
        if level == CODES:
            return zstandard.ZstdCompressor(compression_params=_CODES)
        return zstandard.ZstdCompressor(level=level, write_content_size=True)


def clear() -> None:
    """Free the memory of idle compressors and decompressors."""
    _idle.clear()


def compress(data: Any, level: int = 1) -> bytes:
    """Return one frame that states the size of its content.

    Args:
        data: A contiguous bytes-like object.
        level: 1 is fast, 19 gives the smallest result; negative levels are faster than 1;
            :data:`CODES` is for quantized values and patches.
    """
    coder = _take(level)
    frame: bytes = coder.compress(data)
    _idle[level].append(coder)
    return frame


def decompress(data: Any, num_bytes: int) -> bytes:
    """Return the content of one frame.

    Args:
        data: A frame of :func:`compress`.
        num_bytes: Expected size of the content; no more memory is allocated.

    Raises:
        FormatError: The bytes are not such a frame, or the content has another size.
    """
    promised = content_bytes(data)
    if promised != num_bytes:
        raise FormatError(f"expected a frame of {num_bytes} bytes, got one of {promised}")
    coder = _take(None)
    try:
        content: bytes = coder.decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"expected a Zstandard frame of {num_bytes} bytes: {error}") from error
    _idle[None].append(coder)
    return content


def content_bytes(data: Any) -> int:
    """Return the size of the content that a frame states.

    Raises:
        FormatError: The bytes are not a frame, or the frame does not state it.
    """
    try:
        promised = zstandard.frame_content_size(bytes(data[:18]))
    except zstandard.ZstdError as error:
        raise FormatError(f"expected a Zstandard frame: {error}") from error
    if promised < 0:
        raise FormatError("expected a Zstandard frame that states its content's size")
    return int(promised)
