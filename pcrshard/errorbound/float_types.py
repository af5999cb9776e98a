"""Floating-point types as words of bits, including bfloat16, which numpy lacks.

Every value is handled both as its bits, an unsigned integer ("word"), so that NaN payloads and the
sign of zero survive, and as float64, in which all arithmetic is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[Any]  # (N,) uint8, uint16, uint32 or uint64
Values = NDArray[np.float64]


@dataclass(frozen=True)
class FloatType:
    """A floating-point type.

    Attributes:
        name: The type's name in torch and numpy.
        word: The unsigned integer type of the same size.
        mantissa_bits: Number of stored mantissa bits.
        smallest_normal: The smallest positive normal value.
        largest: The largest finite value.
    """

    name: str
    word: np.dtype[Any]
    mantissa_bits: int
    smallest_normal: float
    largest: float

    @property
    def half_ulp(self) -> float:
        """Largest relative error of rounding a normal value to this type."""
        return float(2.0 ** -(self.mantissa_bits + 1))

    def widen(self, words: Words) -> Values:
        """Return the values of words (N,) as float64, exactly."""
        if self.name == "bfloat16":
            floats = (words.astype(np.uint32) << 16).view(np.float32)
        else:
            floats = words.view(self.name)
        with np.errstate(invalid="ignore"):  # a signaling NaN becomes a quiet one
            return floats.astype(np.float64)

    def narrow(self, values: Values) -> Words:
        """Return the words of finite float64 values (N,), rounded to nearest, ties to even.

        Values that are too large become infinity.
        """
        with np.errstate(over="ignore", under="ignore"):
            if self.name == "bfloat16":
                words = values.astype(np.float32).view(np.uint32)
                # Half of the discarded range, minus one if the last kept bit is even.
                rounding = ((words >> 16) & 1) + np.uint32(0x7FFF)
                return ((words + rounding) >> 16).astype(np.uint16)
            return values.astype(self.name).view(self.word)


def _numpy_type(name: str) -> FloatType:
    info = np.finfo(name)
    return FloatType(
        name,
        np.dtype(f"u{info.bits // 8}"),
        info.nmant,
        float(info.smallest_normal),
        float(info.max),
    )


FLOAT_TYPES = {
    "float16": _numpy_type("float16"),
    "bfloat16": FloatType(
        "bfloat16",
        np.dtype("u2"),
        mantissa_bits=7,
        smallest_normal=2.0**-126,
        largest=(2 - 2**-7) * 2.0**127,
    ),
    "float32": _numpy_type("float32"),
    "float64": _numpy_type("float64"),
}
