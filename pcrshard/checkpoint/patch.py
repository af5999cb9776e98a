"""Patches: the words that changed between two versions of weights, in one byte-oriented form.

See docs/checkpoints-format.md, section 2.4. Both functions work on words of any size; words of 8
bytes are handled as two of 4.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from .. import zstd
from ..errorbound import Words
from ..memory import borrow_array
from ..native import sparse_words
from .frame import require

_GAPS = struct.Struct("<I")
# Content bytes of a patch by bytes of its words: a gap and an escaped step for every word of one
# byte, and the count of gaps.
_MAX_GROWTH = 4


def encode_patch(now: Words, was: Words, level: int = 1) -> tuple[int, bytes] | None:
    """Find the words that changed, and make ``was`` equal to ``now``.

    Args:
        now: (N,) words.
        was: (N,) words of the version before, contiguous and writable.
        level: Effort of compression, as for :func:`pcrshard.zstd.compress`.

    Returns:
        The number of changed words and the patch, which is empty for none; ``None`` if most words
        changed.
    """
    now, was = _narrow(now), _narrow(was)
    found = sparse_words.encode(now, was, borrow_array(max(now.nbytes, 64)))
    if found is None:
        return None
    changed, gaps, steps = found
    if not changed:
        return 0, b""
    return changed, zstd.compress(_GAPS.pack(len(gaps)) + gaps + steps, level)


def apply_patch(words: Words, patch: Any) -> None:
    """Change the words (N,), contiguous and writable, that a possibly hostile patch names.

    Raises:
        CorruptCheckpoint: The patch does not fit; some words may have changed.
    """
    if len(patch) == 0:
        return
    words = _narrow(words)
    size = zstd.content_bytes(patch)
    require(size <= _MAX_GROWTH * words.nbytes + 64, "a patch is larger than its words")
    content = memoryview(zstd.decompress(patch, size))
    require(size >= _GAPS.size, "a patch is truncated")
    start = _GAPS.size + _GAPS.unpack_from(content)[0]
    require(start <= size, "a patch is truncated")
    changed = sparse_words.apply(words, content[_GAPS.size : start], content[start:])
    require(changed >= 0, "a patch does not fit its words")


def _narrow(words: Words) -> Words:
    return words.view(np.uint32) if words.itemsize == 8 else words
