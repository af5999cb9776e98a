"""Quantize values to lattice codes and back; escaped values are stored bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import ErrorBoundViolated
from .float_types import FloatType, Values, Words
from .lattice import MAX_CODE, Codes, Lattice

# 32 Ki float64 are 256 KiB, so a block's arrays stay in a core's cache. Blocks of 64 Ki take three
# times as long (274 instead of 824 MB/s, measured on a core with 1 MiB of private cache).
_BLOCK = 1 << 15


ArrayT = TypeVar("ArrayT")


@dataclass(frozen=True)
class Quantized(Generic[ArrayT]):
    """A flat quantized tensor, in numpy arrays (checkpoints) or torch tensors (activations).

    Attributes:
        codes: (N,) integers: int32 here, int8 for activations; 0 where a value is escaped.
        escape_index: (E,) increasing positions of the values stored bit for bit.
        escape_words: (E,) bits of these values, or the values themselves.
    """

    codes: ArrayT
    escape_index: ArrayT
    escape_words: ArrayT


def quantize(
    words: Words,
    float_type: FloatType,
    lattice: Lattice,
    restored: Words | None = None,
) -> Quantized[NDArray[Any]]:
    """Quantize a tensor's words (N,), in about eight passes over blocks in cache.

    Each value is restored, cast to its type, and compared. NaN, infinities, -0.0, subnormals, and
    values that exceed the bound because of the cast or the range of codes are escaped.

    Args:
        words: The tensor's words (N,).
        float_type: The words' floating-point type.
        lattice: The lattice.
        restored: (N,) output for the result of :func:`restore`, available here at no extra cost.
    """
    codes = np.empty(len(words), np.int32)
    escaped = []
    for start in range(0, len(words), _BLOCK):
        block = words[start : start + _BLOCK]
        found, kept, near = _quantize_block(block, float_type, lattice)
        if restored is not None:
            restored[start : start + _BLOCK] = np.where(kept, near, block)
        codes[start : start + _BLOCK] = found
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
        if not kept.all():
            wide = np.where(kept, wide, 0.0)
        codes: Codes = wide.astype(np.int32)
        restored = float_type.narrow(lattice.values(codes))
        error = np.abs(float_type.widen(restored) - values)
        near = error <= lattice.tolerance(magnitudes)
    kept &= near
    if not kept.all():
        codes[~kept] = 0
    return codes, kept, restored


def restore(
    quantized: Quantized[NDArray[Any]],
    float_type: FloatType,
    lattice: Lattice,
) -> Words:
    """Return the words (N,) of a tensor; the inverse of :func:`quantize` within the bound."""
    words = np.empty(len(quantized.codes), float_type.word)
    for start in range(0, len(words), _BLOCK):
        codes = quantized.codes[start : start + _BLOCK]
        words[start : start + _BLOCK] = float_type.narrow(lattice.values(codes))
    words[quantized.escape_index] = quantized.escape_words
    return words


def check_error(
    original: Words,
    restored: Words,
    float_type: FloatType,
    lattice: Lattice,
) -> float:
    """Compare every restored value with its original.

    Returns:
        The largest error as a fraction of the allowed error, at most 1.

    Raises:
        ErrorBoundViolated: An error exceeds the bound, or a special value differs.
    """
    worst = 0.0
    for start in range(0, len(original), _BLOCK):
        block = original[start : start + _BLOCK]
        back = restored[start : start + _BLOCK]
        share = _error_share(block, back, float_type, lattice)
        largest = float(share.max(initial=0.0))
        if not largest <= 1:
            raise _violation(largest, start + int(np.argmax(~(share <= 1))))
        worst = max(worst, largest)
    return worst


def _violation(share: float, where: int) -> ErrorBoundViolated:
    return ErrorBoundViolated(
        f"expected an error of at most one bound, got {share:g} bounds at value {where}"
    )


def _error_share(
    original: Words,
    restored: Words,
    float_type: FloatType,
    lattice: Lattice,
) -> Values:
    """Return each error as a fraction of the allowed error; 0 if all bits are equal."""
    values = float_type.widen(original)
    wide = float_type.widen(restored)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.abs(wide - values) / lattice.tolerance(np.abs(values))
    # A NaN here is a special value that was not preserved.
    share = np.where(np.isnan(share), np.inf, share)
    return np.where(original != restored, share, 0.0)
