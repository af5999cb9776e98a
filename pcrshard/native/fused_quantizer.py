"""The fused quantizer: floats to one-byte codes within an error bound, and back.

It takes addresses, because NumPy has no bfloat16. The caller owns the memory and keeps it alive;
each call makes one pass over it with the GIL released.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from . import Backend
from ._core import ffi, lib

# The address of a function like GOMP_parallel, and the number of threads that it may use.
Team = tuple[int, int]
_ALONE = (0, 1)


class Affine(NamedTuple):
    """A line for each row, or for each column, of the values.

    Attributes:
        gains, offsets: Addresses of as many float32 as there are lines.
        period: Row r has the line r % period; 0 for one line a column.
        is_relu: Whether restored values below 0 become 0.
    """

    gains: int
    offsets: int
    period: int
    is_relu: bool = False


def _lines(affine: Affine | None) -> Any:
    if affine is None:
        return ffi.NULL
    gains, offsets = (ffi.cast("const float *", place) for place in affine[:2])
    return ffi.new("pcr_affine *", (gains, offsets, affine.period, affine.is_relu))


def quantize(
    values: int,
    count: int,
    dtype: str,
    step: float,
    codes: int,
    backend: Backend = "auto",
    *,
    rows: tuple[int, int] | None = None,
    affine: Affine | None = None,
    extremes: tuple[float, float] | None = None,
    team: Team = _ALONE,
) -> int:
    """Write int8 codes of d = gain * x + offset: 0 for 0, else sign(d) * ceil(|d| / (2 step)).

    Args:
        values: Address of the floats.
        count: Number of floats.
        dtype: ``float32`` or ``bfloat16``.
        step: Half the width of a bin, a positive normal float32.
        codes: Address of ``count`` writable bytes.
        backend: ``portable`` forces the plain C code.
        rows: Number of contiguous floats in a row, and floats from one row to the next; ``None`` if
            all are contiguous.
        affine: The lines; ``None`` for d = x.
        extremes: The values that get the codes -127 and 127, unless they are 0.
        team: Threads that share the work.

    Returns: The number of codes equal to -128: values not finite, or too large for a code.
    """
    return int(
        lib.pcr_quantize(
            ffi.cast("const void *", values),
            count,
            *(rows or (max(count, 1), 0)),
            dtype == "bfloat16",
            step,
            ffi.NULL if extremes is None else ffi.new("float[2]", extremes),
            _lines(affine),
            ffi.cast("int8_t *", codes),
            backend == "portable",
            ffi.cast("pcr_parallel", team[0]),
            team[1],
        )
    )


def extremes(
    values: int,
    count: int,
    dtype: str,
    rows: tuple[int, int],
    backend: Backend = "auto",
    *,
    team: Team = _ALONE,
) -> tuple[float, float]:
    """Return the least and the largest finite value; ``(inf, -inf)`` if there is none."""
    found = ffi.new("float[2]")
    source = ffi.cast("const void *", values)
    parallel = ffi.cast("pcr_parallel", team[0])
    kind, force = dtype == "bfloat16", backend == "portable"
    if lib.pcr_range(source, count, *rows, kind, found, force, parallel, team[1]):
        raise MemoryError
    return found[0], found[1]


def deviation(values: int, count: int, dtype: str, rows: tuple[int, int], guard: float) -> float:
    """Estimate the standard deviation of the finite values, from a sample if there are many.

    Args:
        values: Address of the floats.
        count: Number of floats.
        dtype: ``float32`` or ``bfloat16``.
        rows: As in :func:`quantize`.
        guard: Upper limit, in median magnitudes of the values that are not 0.

    Returns: The standard deviation; NaN if no value is finite.
    """
    source = ffi.cast("const void *", values)
    return float(lib.pcr_deviation(source, count, *rows, dtype == "bfloat16", guard))


def dequantize(
    codes: int,
    count: int,
    table: int,
    dtype: str,
    values: int,
    *,
    run: int | None = None,
    affine: Affine | None = None,
    team: Team = _ALONE,
) -> None:
    """Write ``table[code + 128] * gain + offset`` for each code.

    Args:
        codes: Address of ``count`` int8 codes.
        count: Number of codes.
        table: Address of 256 float32.
        dtype: ``float32`` or ``bfloat16``, of the values.
        values: Address of ``count`` writable floats.
        run: Number of values in a row.
        affine: The lines; ``None`` for the values of the table.
        team: Threads that share the work.
    """
    lib.pcr_restore(
        ffi.cast("const int8_t *", codes),
        count,
        run or max(count, 1),
        ffi.cast("const float *", table),
        _lines(affine),
        dtype == "bfloat16",
        ffi.cast("void *", values),
        ffi.cast("pcr_parallel", team[0]),
        team[1],
    )
