"""Decode the sparse lossless deltas of older stores: the changed words and their differences.

The form suits bfloat16 weights of which about one in a hundred changes between two versions, as in
reinforcement learning with a small learning rate. The difference is an exclusive or, so it can be
applied in both directions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import CorruptCheckpoint
from ..memory import Buffer
from .byte_codes import content_bytes, decompress
from .float_types import Words
from .integer_codes import decode_integers

Index = NDArray[np.int64]


def decode_index(
    payload: Buffer,
    count: int,
    limit: int,
) -> Index:
    """Decode the ``count`` indices of a payload, which increase and are below ``limit``.

    Raises:
        CorruptCheckpoint: The payload is damaged, or the indices are out of order or range.
    """
    if count > limit:
        raise CorruptCheckpoint(f"expected at most {limit} numbers, got {count}")
    gaps = decode_integers(payload, count, np.uint32)
    index: Index = np.cumsum(gaps, dtype=np.int64) - 1
    smallest = int(gaps.min(initial=1))
    if count and (smallest < 1 or int(index[-1]) >= limit):
        raise CorruptCheckpoint(f"expected increasing numbers below {limit}, got {index[-1]}")
    return index


def decode_words(
    payload: Buffer,
    count: int,
    word: np.dtype[np.generic],
) -> Words:
    """Decode the ``count`` words of a payload.

    Raises:
        CorruptCheckpoint: The payload is damaged or holds a different number of words.
    """
    if word.itemsize > 1:
        return decode_integers(payload, count, word)
    if content_bytes(payload) != count:
        raise CorruptCheckpoint(f"expected {count} words, got {content_bytes(payload)}")
    return np.frombuffer(decompress(payload, count), word)
