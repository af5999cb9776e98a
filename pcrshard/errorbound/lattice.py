"""Integer lattices anchored at zero: a value is stored as the index of a lattice point.

Versions of a tensor on the same lattice differ by integers, so a chain of deltas is exact: the
error after a hundred deltas equals the error after one. All arithmetic is in float64 and uses only
operations whose rounding IEEE 754 defines exactly, so every machine restores the same bits.
"""

from __future__ import annotations

import math
import sys
from functools import lru_cache
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from .float_types import Values

Codes = NDArray[np.int32]

# The difference of two codes of this size still fits into int32.
MAX_CODE = 1 << 30
_MAX_DENOMINATOR = 1 << 20
_MIN_NUMERATOR = 256
# Exponents of float64 go down to -1074; codes of magnitudes are positive from -1100 up.
_LOWEST_EXPONENT = 1100
# Size of the lookup table for the points of a coarse lattice: 32 KiB of float64.
_MAX_POINTS = 1 << 12

_Positive = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]


class _Numbers(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The parameters of a lattice, which are stored in a file in this order."""

    def numbers(self) -> list[float | int]:
        """Return the lattice parameters stored in a file."""
        return list(msgspec.structs.astuple(self))


class LinearLattice(_Numbers, frozen=True, tag="linear"):
    """The points ``code * step``.

    Attributes:
        step: Distance between adjacent points.
        error_bound: Upper bound on the absolute error of a restored value.
    """

    step: _Positive
    error_bound: _Positive
    kind = "linear"

    def codes(self, values: Values) -> Values:
        """Return the codes of the nearest points, (N,) float64 integers; NaN stays NaN."""
        codes: Values = np.divide(values, self.step)
        return np.rint(codes, out=codes)

    def values(self, codes: Codes) -> Values:
        """Return the points of codes (N,)."""
        return np.multiply(codes, self.step)

    def tolerance(self, magnitudes: Values) -> Values | float:
        """Return the largest error allowed for a value of this magnitude."""
        return self.error_bound


class LogLattice(_Numbers, frozen=True, tag="log"):
    """The points ``0`` and ``+-2 ** (k * numerator / denominator)``, with a relative error bound.

    Attributes:
        numerator, denominator: Their quotient is the distance between adjacent points in log2.
        error_bound: Upper bound on the error relative to the value's magnitude.
    """

    numerator: Annotated[int, msgspec.Meta(gt=0, le=64 * _MAX_DENOMINATOR)]
    denominator: Annotated[int, msgspec.Meta(gt=0, le=_MAX_DENOMINATOR)]
    error_bound: _Positive
    kind = "log"

    @property
    def _offset(self) -> int:
        # Offset that makes the codes of all nonzero magnitudes positive.
        return _LOWEST_EXPONENT * self.denominator // self.numerator + 1

    def codes(self, values: Values) -> Values:
        """Return the codes of the nearest points, (N,) float64 integers with the values' signs."""
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = np.log2(np.abs(values)) * (self.denominator / self.numerator)
            codes = np.copysign(np.rint(steps) + self._offset, values)
        return np.where(values == 0, 0.0, codes)

    def values(self, codes: Codes) -> Values:
        """Return the points of codes (N,)."""
        points = _points(self)
        places = np.abs(codes)
        if places.max(initial=0) >= len(points):
            return self.computed(codes)
        return np.copysign(points[places], codes)

    def computed(self, codes: Codes) -> Values:
        """Compute the points of codes (N,) without the lookup table."""
        steps = (np.abs(codes.astype(np.int64)) - self._offset) * self.numerator
        exponents, rest = np.divmod(steps, self.denominator)
        fractions = powers_of_two(self.denominator)[rest]
        exponents = np.clip(exponents, -1200, 1200).astype(np.int32)
        with np.errstate(over="ignore", under="ignore"):
            magnitudes = np.ldexp(fractions, exponents)
        return np.where(codes == 0, 0.0, np.copysign(magnitudes, codes))

    def tolerance(self, magnitudes: Values) -> Values | float:
        """Return the largest error allowed for a value of this magnitude."""
        return magnitudes * self.error_bound


Lattice = LinearLattice | LogLattice


@lru_cache(maxsize=4)
def _points(lattice: LogLattice) -> Values:
    """Return the points of the first codes, as many as fit into a core's cache."""
    return lattice.computed(np.arange(_MAX_POINTS, dtype=np.int32))


@lru_cache(maxsize=4)
def powers_of_two(denominator: int) -> Values:
    """Return ``2 ** (i / denominator)`` for i in [0, denominator), using only + and *.

    ``exp2`` may differ in the last bit between machines, and so would restored tensors.

    >>> powers_of_two(2)
    array([1.        , 1.41421356])
    """
    exponents = np.arange(denominator, dtype=np.float64) / denominator * math.log(2)
    # exp(x / 4) ** 4: sixteen terms of the series are exact in float64 for x / 4 below 0.18.
    root = np.ones(denominator)
    for term in range(16, 0, -1):
        root = 1 + root * (exponents / 4) / term
    squared = root * root
    powers: Values = squared * squared
    powers.flags.writeable = False
    return powers


def log_lattice(error_bound: float, margin: float) -> LogLattice | None:
    """Return the coarsest lattice whose relative error is within ``error_bound - margin``.

    Returns:
        The lattice; ``None`` if the bound does not exceed the margin or needs too fine a lattice.
    """
    if error_bound <= 2 * margin:
        return None
    step = 2 * math.log2(1 + error_bound - margin)
    # Large enough to approximate the step closely.
    denominator = 1024
    while step * denominator < _MIN_NUMERATOR:
        denominator *= 2
    if denominator > _MAX_DENOMINATOR:
        return None
    return LogLattice(int(step * denominator), denominator, error_bound)


def lattice_from(kind: Any, numbers: Any) -> Lattice:
    """Return the lattice described by a file.

    Raises:
        msgspec.ValidationError, TypeError: The description is invalid.
    """
    lattice: Lattice = msgspec.convert((kind, *numbers), Lattice)
    return lattice
