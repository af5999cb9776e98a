"""Error bounds, and the lattices that satisfy them for a given tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..native import linear_codes
from .float_types import FloatType, Words
from .lattice import LinearLattice, LogLattice, log_lattice

# Median magnitude of a normal distribution, in standard deviations.
MEDIAN_OF_NORMAL = 0.6744897501960817
_SAMPLE = 1 << 14
# Below this fraction of the mean square, too few digits of a variance are left.
_CANCELED = 1e-8
_BLOCK = 1 << 15


def check_positive(name: str, value: float) -> None:
    """Check that a value is a positive finite number.

    Raises:
        ValueError: The value is not positive or not finite.
    """
    if isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"expected {name} to be positive and finite, got {value!r}")


def check_fraction(name: str, value: float) -> None:
    """Check that a value is a fraction between 0 and 1, to catch 5 written for 5 %.

    Raises:
        ValueError: The value is not above 0 or not below 1.
    """
    check_positive(name, value)
    if value >= 1:
        raise ValueError(
            f"expected {name} below 1, got {value!r}: an error as large as the standard deviation "
            f"leaves nothing of a tensor (0.05 allows 5 %)"
        )


class _StdBound:
    """A bound on the absolute error, which may depend on the tensor's standard deviation.

    Attributes:
        outlier_guard: Upper limit of the standard deviation; see :class:`RelativeStd`.
    """

    outlier_guard = math.inf

    def absolute(self, std: Any) -> Any:
        """Return the largest absolute error for a tensor of this standard deviation."""
        raise NotImplementedError

    def lattice(self, words: Words, float_type: FloatType) -> LinearLattice | None:
        """Return the lattice for a tensor's words (N,), or ``None`` if there is no bound above 0.

        It meets the bound after rounding to the type, up to three standard deviations. The rare
        larger values that rounding pushes beyond the bound are escaped.
        """
        scale = min(_deviation(words, float_type), self.outlier_guard * _typical(words, float_type))
        error_bound = self.absolute(scale)
        if not 0 < error_bound < math.inf:
            return None
        margin = 3 * scale * float_type.half_ulp
        step = 2 * (error_bound - margin) if margin <= error_bound / 2 else 2 * error_bound
        return LinearLattice(step, error_bound)


@dataclass(frozen=True)
class RelativeStd(_StdBound):
    """An absolute error of at most ``fraction`` of the tensor's own standard deviation.

    Attributes:
        fraction: 0.01 allows 1 % of the standard deviation.
        outlier_guard: Cap the standard deviation at this multiple of the one implied by the median
            magnitude of the nonzero values (for a normal distribution the two agree). Otherwise a
            few huge outliers would yield a bound that erases all other values.
    """

    fraction: float
    outlier_guard: float = 8.0

    def __post_init__(self) -> None:
        check_fraction("fraction", self.fraction)
        check_positive("outlier_guard", self.outlier_guard)

    def absolute(self, std: Any) -> Any:
        """Return the fraction of a standard deviation, a number or a tensor."""
        return std * self.fraction


@dataclass(frozen=True)
class Absolute(_StdBound):
    """An absolute error of at most ``error_bound``.

    Attributes:
        error_bound: The bound, in the unit of the values.
    """

    error_bound: float

    def __post_init__(self) -> None:
        check_positive("error_bound", self.error_bound)

    def absolute(self, std: Any) -> float:
        """Return the bound, whatever the standard deviation."""
        return self.error_bound


@dataclass(frozen=True)
class PointwiseRelative:
    """An error of at most ``rel_error_bound`` of each value's own magnitude.

    For values that span many orders of magnitude, such as Adam's second moment (``exp_avg_sq``).

    Attributes:
        rel_error_bound: 0.1 allows 10 % of each value.
    """

    rel_error_bound: float

    def __post_init__(self) -> None:
        check_positive("rel_error_bound", self.rel_error_bound)

    def lattice(self, words: Words, float_type: FloatType) -> LogLattice | None:
        """Return the lattice, which depends only on the tensor's type."""
        return log_lattice(self.rel_error_bound, float_type.half_ulp)


Bound = RelativeStd | Absolute | PointwiseRelative


def _deviation(words: Words, float_type: FloatType, center: float = 0.0) -> float:
    """Return the standard deviation of the finite values, in float64, from sums about a center."""
    sums = np.zeros(3)
    for start in range(0, len(words), _BLOCK):
        block = words[start : start + _BLOCK]
        linear_codes.add_moments(float_type.widen(block), center, sums)
    mean, square = (sums[1:] / max(sums[0], 1)).tolist()
    variance = square - mean * mean
    if variance < _CANCELED * square and not center:
        return _deviation(words, float_type, center=mean)
    return math.sqrt(max(variance, 0.0))


def _typical(words: Words, float_type: FloatType) -> float:
    """Return the std of a normal distribution with the same median magnitude.

    Zeros are excluded so that a sparse tensor is judged by its nonzero values.
    """
    sample = words[:: max(1, len(words) // _SAMPLE)]
    magnitudes = np.abs(float_type.widen(sample))
    magnitudes = magnitudes[(magnitudes > 0) & np.isfinite(magnitudes)]
    return float(np.median(magnitudes)) / MEDIAN_OF_NORMAL if len(magnitudes) else math.inf
