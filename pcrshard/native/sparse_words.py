"""Changed words between two versions of weights: encoded, checked, applied, and taken back.

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

available: bool = lib is not None and hasattr(lib, "pcr_sparse_apply")
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


def apply(words: Words, gaps: Any, steps: Any, old: Words, done: NDArray[np.uint64]) -> int:
    """Change the words (N,) that gaps and steps name.

    Args:
        words: (N,) words of 1, 2 or 4 bytes, contiguous and writable.
        gaps: Bytes of :func:`encode`, possibly hostile.
        steps: The same.
        old: (N,) words: each changed word is copied there before it changes.
        done: (1,) the number of words in ``old`` that count.

    Returns:
        The number of changes, or -1 if the bytes do not fit: then call :func:`undo`.
    """
    parts = _parts(words, gaps, steps, old)
    return int(lib.pcr_sparse_apply(*parts, ffi.cast("uint64_t *", done.ctypes.data)))


def undo(words: Words, gaps: Any, steps: Any, old: Words, done: NDArray[np.uint64]) -> None:
    """Take an :func:`apply` back, also one whose process was killed; arguments as there."""
    lib.pcr_sparse_undo(*_parts(words, gaps, steps, old), int(done[0]))
    done[0] = 0


def _parts(words: Words, gaps: Any, steps: Any, old: Words) -> tuple[Any, ...]:
    return (
        _address(words),
        len(words),
        words.itemsize,
        ffi.from_buffer("uint8_t[]", gaps),
        len(gaps),
        ffi.from_buffer("uint8_t[]", steps),
        len(steps),
        _address(old),
    )


def _address(array: NDArray[Any]) -> Any:
    return ffi.cast("void *", array.ctypes.data)
