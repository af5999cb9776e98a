"""Changed words between two versions of weights: encoded, checked, and applied.

The caller owns all memory; each call releases the GIL.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._core import ffi, lib

Words = NDArray[Any]


def encode(
    now: Words, was: Words, scratch: NDArray[np.uint8], with_crc: bool
) -> tuple[int, bytes, bytes] | None:
    """Encode the changed words, and set ``was`` equal to ``now``.

    Args:
        now: (N,) words of 1, 2 or 4 bytes, contiguous.
        was: (N,) words of the previous version, contiguous and writable.
        scratch: (S,) scratch bytes, for up to S / 2 bytes each of gaps and steps.
        with_crc: Whether to compute the CRC-32C of ``now``, otherwise 0.

    Returns:
        The CRC-32C of ``now``, the gaps and the steps, which are empty if no word changed; ``None``
        if they do not fit.
    """
    half = len(scratch) // 2
    used = ffi.new("size_t[2]")
    gaps, steps = _bytes(scratch[:half]), _bytes(scratch[half:])
    crc = lib.pcr_sparse_encode(
        _bytes(now), _bytes(was), len(now), now.itemsize, gaps, steps, half, used, with_crc
    )
    if crc < 0:
        was[:] = now
        return None
    return crc, ffi.buffer(gaps)[: used[0]], ffi.buffer(steps)[: used[1]]


def apply(words: Words, gaps: Any, steps: Any, with_crc: bool) -> int:
    """Apply the changes in gaps and steps to words.

    Args:
        words: (N,) words of 1, 2 or 4 bytes, contiguous and writable.
        gaps: Bytes from :func:`encode`, possibly malicious.
        steps: Bytes from :func:`encode`, possibly malicious.
        with_crc: Whether to compute the CRC-32C of the words, otherwise 0.

    Returns: The CRC-32C of the words, or -1 if the bytes are invalid, in which case some words may
        have changed.
    """
    crc: int = lib.pcr_sparse_apply(
        _bytes(words),
        len(words),
        words.itemsize,
        _bytes(gaps),
        len(gaps),
        _bytes(steps),
        len(steps),
        with_crc,
    )
    return crc


def _bytes(data: Any) -> Any:
    return ffi.from_buffer("uint8_t[]", data)
