"""Changed words between two versions of weights: encoded, checked, and applied.

Both sides work on memory that the caller owns; each call runs without the GIL.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    from pcrshard.native._core import ffi, lib
except ImportError:  # built without a compiler
    ffi = lib = None

Words = NDArray[Any]


def encode(now: Words, was: Words, scratch: NDArray[np.uint8]) -> tuple[int, bytes, bytes] | None:
    """Find the words that changed, and make ``was`` equal to ``now``.

    Args:
        now: (N,) words of 1, 2 or 4 bytes.
        was: (N,) words of the version before, contiguous and writable.
        scratch: (S,) bytes to work in; more than S / 2 bytes of gaps or of steps do not fit.

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
    """Change the words (N,) that gaps and steps name.

    Args:
        words: (N,) words of 1, 2 or 4 bytes, contiguous and writable.
        gaps: Bytes of :func:`encode`, possibly hostile.
        steps: The same.

    Returns:
        The number of changes, or -1 if the bytes do not fit: some words may then have changed.
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
