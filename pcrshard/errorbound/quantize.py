"""Quantize values to lattice codes and back; escaped values are stored bit for bit."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..native import linear_codes
from .float_types import FloatType, Words
from .lattice import MAX_CODE, Codes, Lattice, LinearLattice

# 32 Ki float64 are 256 KiB, so a block's arrays stay in a core's cache. Blocks of 64 Ki take three
# times as long (274 instead of 824 MB/s, measured on a core with 1 MiB of private cache).
_BLOCK = 1 << 15


class Quantized(NamedTuple):
    """A flat quantized tensor, in numpy arrays (checkpoints) or torch tensors (activations).

    Attributes:
        codes: (N,) integers: int32 here, int8 for activations; 0 where a value is escaped.
        escape_index: (E,) increasing positions of the values stored bit for bit.
        escape_words: (E,) bits of these values, or the values themselves.
    """

    codes: Any
    escape_index: Any
    escape_words: Any


def quantize(
    words: Words,
    float_type: FloatType,
    lattice: Lattice,
    restored: Words | None = None,
) -> Quantized:
    """Quantize a tensor's words (N,) in blocks that stay in cache.

    Each value is restored, cast to its type, and compared. NaN, infinities, -0.0, subnormals, and
    values that exceed the bound because of the cast or the range of codes are escaped.

    Args:
        words: The tensor's words (N,).
        float_type: The words' floating-point type.
        lattice: The lattice.
        restored: (N,) output for the result of :func:`dequantize`, available here at no extra cost.
    """
    codes = np.empty(len(words), np.int32)
    points = np.empty_like(words) if restored is None else restored
    escaped = []
    for start in range(0, len(words), _BLOCK):
        place = slice(start, start + _BLOCK)
        block = words[place]
        if isinstance(lattice, LinearLattice) and float_type.name == "float32":
            numbers = lattice.step, lattice.error_bound
            if linear_codes.quantize(block, *numbers, codes[place], points[place]):
                continue
        codes[place], kept, near = _quantize_block(block, float_type, lattice)
        points[place] = np.where(kept, near, block)
        if not kept.all():
            escaped.append(start + np.flatnonzero(~kept))
    index = np.concatenate(escaped) if escaped else np.empty(0, np.int64)
    return Quantized(codes, index, words[index])


def _quantize_block(
    block: Words,
    float_type: FloatType,
    lattice: Lattice,
) -> tuple[Codes, NDArray[np.bool_], Words]:
    values = float_type.widen(block)
    magnitudes = np.abs(values)
    # Comparisons with NaN are false. The word of +0.0 is 0, that of -0.0 is not.
    kept = (magnitudes >= float_type.smallest_normal) & (magnitudes <= float_type.largest)
    kept |= block == 0
    with np.errstate(invalid="ignore", over="ignore"):
        wide = lattice.codes(values)
        kept &= np.abs(wide) <= MAX_CODE
        codes: Codes = np.where(kept, wide, 0).astype(np.int32)
        restored = float_type.narrow(lattice.values(codes))
        error = np.abs(float_type.widen(restored) - values)
        kept &= error <= lattice.tolerance(magnitudes)
    codes *= kept
    return codes, kept, restored


def dequantize(codes: Codes, float_type: FloatType, lattice: Lattice) -> Words:
    """Return the words (N,) of codes (N,): what :func:`quantize` made, without escaped values."""
    words = np.empty(len(codes), float_type.word)
    for start in range(0, len(words), _BLOCK):
        place = slice(start, start + _BLOCK)
        words[place] = float_type.narrow(lattice.values(codes[place]))
    return words
