"""Patches: a byte-oriented encoding of the words that changed between two versions.

See docs/checkpoints-format.md, section 2.4. Both functions accept words of any size;
an 8-byte word is handled as two 4-byte words.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from .. import zstd
from ..checksum import crc32c
from ..errorbound import Words
from ..native import sparse_words
from .frame import require

_GAPS = struct.Struct("<I")
# Maximum size of a patch relative to its words: for one-byte words, a gap and an escaped step per
# word, plus the number of gaps.
MAX_GROWTH = 4


def encode_patch(
    now: Words, was: Words, level: int = zstd.CODES, *, with_crc: bool = False
) -> tuple[bytes | None, int]:
    """Encode the words that changed, and update ``was`` in place to equal ``now``.

    Args:
        now: (N,) words.
        was: (N,) words of the previous version, contiguous and writable.
        level: Compression level, as for :func:`pcrshard.zstd.compress`.
        with_crc: Whether to compute the CRC-32C of ``now``, otherwise 0.

    Returns:
        The patch, which is empty if no word changed, or ``None`` if most words changed; and the
        CRC-32C of ``now`` unless most changed.
    """
    now, was = _narrow(now), _narrow(was)
    # Only what is written of it takes memory, and a pool would keep it.
    scratch = np.empty(max(now.nbytes, 64), np.uint8)
    found = sparse_words.encode(now, was, scratch, with_crc)
    if found is None:
        return None, 0
    crc, gaps, steps = found
    if not gaps:
        return b"", crc
    return zstd.compress(_GAPS.pack(len(gaps)) + gaps + steps, level), crc


def apply_patch(words: Words, patch: Any, *, with_crc: bool = False) -> int:
    """Apply an untrusted patch in place to words (N,), which are contiguous and writable.

    Returns:
        The CRC-32C of the words; 0 unless ``with_crc``.

    Raises:
        CorruptCheckpoint: The patch does not match; some words may already have been changed.
    """
    if len(patch) == 0:
        return crc32c(words) if with_crc else 0
    words = _narrow(words)
    size = zstd.content_bytes(patch)
    require(size <= MAX_GROWTH * words.nbytes + 64, "a patch is larger than its words")
    content = memoryview(zstd.decompress(patch, size))
    require(size >= _GAPS.size, "a patch is truncated")
    start = _GAPS.size + _GAPS.unpack_from(content)[0]
    require(start <= size, "a patch is truncated")
    crc = sparse_words.apply(words, content[_GAPS.size : start], content[start:], with_crc)
    require(crc >= 0, "a patch does not fit its words")
    return crc


def _narrow(words: Words) -> Words:
    return words.view(np.uint32) if words.itemsize == 8 else words
