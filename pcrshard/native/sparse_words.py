"""Changed words between two versions of weights: encoded, checked, and applied.

The caller owns all memory; each call releases the GIL.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._core import ffi, lib

Words = NDArray[Any]


def encode(now: Words, was: Words, scratch: NDArray[np.uint8]) -> tuple[int, bytes, bytes] | None:
    """Encode the changed words, and set ``was`` equal to ``now``.

    Args:
        now: (N,) words of 1, 2 or 4 bytes.
        was: (N,) words of the previous version, contiguous and writable.
        scratch: (S,) scratch bytes, for up to S / 2 bytes each of gaps and steps.

    Returns:
        The number of changed words, their gaps and their steps; ``None`` if they do not fit.
    """
    half = len(scratch) // 2
    used = ffi.new("size_t[2]")
    changed = lib.pcr_sparse_encode(
        _address(now),
        _address(was),
        len(now),
        now.itemsize,
        _address(scratch),
        _address(scratch[half:]),
        half,
        used,
    )
    if changed < 0:
        was[:] = now
        return None
    return changed, scratch[: used[0]].tobytes(), scratch[half : half + used[1]].tobytes()


def apply(words: Words, gaps: Any, steps: Any) -> int:
    """Apply the changes in gaps and steps to words.

    Args:
        words: (N,) words of 1, 2 or 4 bytes, contiguous and writable.
        gaps: Bytes from :func:`encode`, possibly malicious.
        steps: Bytes from :func:`encode`, possibly malicious.

    Returns: The number of changes, or -1 if the bytes are invalid, in which case some words may
        have changed.
    """
    gap_bytes, step_bytes = ffi.from_buffer("uint8_t[]", gaps), ffi.from_buffer("uint8_t[]", steps)
    return int(
        lib.pcr_sparse_apply(
            _address(words), len(words), words.itemsize, gap_bytes, len(gaps), step_bytes,
            len(steps),
        )
    )  # fmt: skip


def _address(array: NDArray[Any]) -> Any:
    return ffi.cast("void *", array.ctypes.data)
