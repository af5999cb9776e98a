"""Integer lattices anchored at zero: a value is stored as the number of a lattice point.

Versions of a tensor on one lattice differ by whole numbers, so that a chain of differences is
exact: the error after a hundred links is that of one. All arithmetic is in float64 and uses
operations that IEEE 754 rounds in one way only, so that every machine restores the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CorruptCheckpoint
from .float_types import Values

Codes = NDArray[np.int32]

# Differences of two codes of this size still are int32.
MAX_CODE = 1 << 30
_MAX_DENOMINATOR = 1 << 20
_MIN_NUMERATOR = 256
# Exponents of float64 reach down to -1074; the code of a magnitude is positive from -1100 up.
_LOWEST_EXPONENT = 1100
# Points of a coarse lattice are looked up: this many float64 are 32 KiB.
_MAX_POINTS = 1 << 12
# With steps of this size in log2, float32's log2 misses the nearest point once in 10,000 values.
_COARSE = 0.05


@dataclass(frozen=True)
class LinearLattice:
    """The points ``code * step``.

    Attributes:
        step: Distance of two points.
        error_bound: The absolute error that no restored value exceeds.
    """

    step: float
    error_bound: float
    kind = "linear"

    def codes(self, values: Values) -> Values:
        """The numbers of the nearest points, (N,) float64 integers; NaN stays NaN."""
        codes = np.divide(values, self.step)
        np.rint(codes, out=codes)
        return codes

    def values(self, codes: Codes) -> Values:
        """The points of codes (N,)."""
        return np.multiply(codes, self.step)

    def tolerance(self, magnitudes: Values) -> Values | float:
        """The largest error that a value of this magnitude may have."""
        return self.error_bound

    def numbers(self) -> list[float | int]:
        """What a file holds of the lattice."""
        return [self.step, self.error_bound]


@dataclass(frozen=True)
class LogLattice:
    """The points ``0`` and ``+-2 ** (k * numerator / denominator)``: the error is relative.

    Attributes:
        numerator, denominator: Their quotient is the distance of two points in log2.
        error_bound: The error relative to the value's magnitude that no restored value exceeds.
    """

    numerator: int
    denominator: int
    error_bound: float
    kind = "log"

    @property
    def _offset(self) -> int:
        # Codes of non-zero magnitudes are positive, whatever the magnitude.
        return _LOWEST_EXPONENT * self.denominator // self.numerator + 1

    def codes(self, values: Values) -> Values:
        """The numbers of the nearest points, (N,) float64 integers; the sign is the value's."""
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = self._log2(np.abs(values)) * (self.denominator / self.numerator)
            codes = np.copysign(np.rint(steps) + self._offset, values)
        return np.where(values == 0, 0.0, codes)

    def _log2(self, magnitudes: Values) -> Values:
        """Return log2, in float32 if that is close enough: it is several times as fast."""
        if self.numerator < _COARSE * self.denominator:
            return np.log2(magnitudes)
        with np.errstate(over="ignore", under="ignore"):
            narrow = magnitudes.astype(np.float32)
        kept = np.isfinite(narrow).all() and not ((narrow == 0) & (magnitudes != 0)).any()
        # A code that is one off is found when the error is compared, and its value is escaped.
        return np.log2(narrow).astype(np.float64) if kept else np.log2(magnitudes)

    def values(self, codes: Codes) -> Values:
        """The points of codes (N,)."""
        points = _points(self)
        places = np.abs(codes)
        if places.max(initial=0) >= len(points):
            return self.computed(codes)
        return np.copysign(points[places], codes)

    def computed(self, codes: Codes) -> Values:
        """The points of codes (N,), each computed."""
        steps = (np.abs(codes.astype(np.int64)) - self._offset) * self.numerator
        exponents, rest = np.divmod(steps, self.denominator)
        fractions = powers_of_two(self.denominator)[rest]
        exponents = np.clip(exponents, -1200, 1200).astype(np.int32)
        with np.errstate(over="ignore", under="ignore"):
            magnitudes = np.ldexp(fractions, exponents)
        return np.where(codes == 0, 0.0, np.copysign(magnitudes, codes))

    def tolerance(self, magnitudes: Values) -> Values | float:
        """The largest error that a value of this magnitude may have."""
        allowed: Values = magnitudes * self.error_bound
        return allowed

    def numbers(self) -> list[float | int]:
        """What a file holds of the lattice."""
        return [self.numerator, self.denominator, self.error_bound]


Lattice = LinearLattice | LogLattice


@lru_cache(maxsize=4)
def _points(lattice: LogLattice) -> Values:
    """The points of the first codes, as many as stay in a core's cache."""
    return lattice.computed(np.arange(_MAX_POINTS, dtype=np.int32))


@lru_cache(maxsize=4)
def powers_of_two(denominator: int) -> Values:
    """``2 ** (i / denominator)`` for i in [0, denominator), by additions and multiplications only.

    ``exp2`` of two machines may differ in the last bit, and then so would a restored tensor.

    >>> powers_of_two(2)
    array([1.        , 1.41421356])
    """
    exponents = np.arange(denominator, dtype=np.float64) / denominator * math.log(2)
    # exp(x / 4) ** 4: sixteen terms of the series are exact to float64 for x / 4 below 0.18.
    root = _exp(exponents / 4)
    squared = root * root
    powers: Values = squared * squared
    powers.flags.writeable = False
    return powers


def _exp(exponents: Values) -> Values:
    """Sixteen terms of the exponential series."""
    total = np.ones(len(exponents))
    for term in range(16, 0, -1):
        total = 1 + total * exponents / term
    return total


def log_lattice(error_bound: float, margin: float) -> LogLattice | None:
    """The coarsest lattice with points within ``error_bound - margin``, relative.

    Returns:
        ``None`` if the bound leaves no room for the margin, or asks for too fine a lattice.
    """
    if error_bound <= 2 * margin:
        return None
    step = 2 * math.log2(1 + error_bound - margin)
    denominator = _fine_enough(step)
    if denominator > _MAX_DENOMINATOR:
        return None
    return LogLattice(int(step * denominator), denominator, error_bound)


def _fine_enough(step: float) -> int:
    """A denominator that a step needs, so that its numerator is near enough."""
    denominator = 1024
    while step * denominator < _MIN_NUMERATOR:
        denominator *= 2
    return denominator


def lattice_from(kind: Any, numbers: Any) -> Lattice:
    """The lattice that a file describes.

    Raises:
        CorruptCheckpoint: There is no such lattice.
    """
    lattice = _parse_lattice(kind, numbers) if _are_numbers(numbers) else None
    if lattice is None:
        raise CorruptCheckpoint(f"expected a lattice, got {kind!r} with {numbers!r}")
    return lattice


def _are_numbers(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(number) in (int, float) for number in numbers)


def _is_positive(number: float) -> bool:
    return 0 < number < math.inf


def _parse_lattice(kind: Any, numbers: list[Any]) -> Lattice | None:
    if not numbers or not _is_positive(numbers[-1]):
        return None
    if kind == LinearLattice.kind and len(numbers) == 2 and _is_positive(numbers[0]):
        return LinearLattice(float(numbers[0]), float(numbers[1]))
    if kind == LogLattice.kind and len(numbers) == 3:
        return _parse_log_lattice(numbers)
    return None


def _parse_log_lattice(numbers: list[Any]) -> LogLattice | None:
    numerator, denominator, error_bound = numbers
    whole = type(numerator) is int and type(denominator) is int
    if whole and 0 < denominator <= _MAX_DENOMINATOR and 0 < numerator <= 64 * denominator:
        return LogLattice(numerator, denominator, float(error_bound))
    return None
