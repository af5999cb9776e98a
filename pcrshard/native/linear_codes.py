"""The spread of values, and their codes on a linear lattice; the calls release the GIL."""

from __future__ import annotations

from typing import Any

import numpy as np
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


def add_moments(values: NDArray[np.float64], center: float, sums: NDArray[np.float64]) -> None:
    """Add count, sum, and sum of squares of finite values (N,) minus a center to ``sums`` (3,)."""
    lib.pcr_add_moments(
        ffi.from_buffer("double[]", values),
        len(values),
        center,
        ffi.from_buffer("double[]", sums, require_writable=True),
    )
