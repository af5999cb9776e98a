"""Codes of float32 values on a linear lattice; the call releases the GIL."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ._core import ffi, lib


def quantize(
    words: NDArray[Any],
    step: float,
    error_bound: float,
    codes: NDArray[Any],
    restored: NDArray[Any],
) -> bool:
    """Quantize the words of float32 values (N,).

    Args:
        words: (N,) uint32.
        step: Distance between the points of the lattice.
        error_bound: Largest error of a restored value.
        codes: (N,) int32 output.
        restored: (N,) uint32 output, the words of the points.

    Returns:
        Whether every value is within the bound; if not, the output is meaningless.
    """
    return not lib.pcr_quantize_linear(
        ffi.from_buffer("uint32_t[]", words),
        len(words),
        step,
        error_bound,
        ffi.from_buffer("int32_t[]", codes, require_writable=True),
        ffi.from_buffer("uint32_t[]", restored, require_writable=True),
    )
