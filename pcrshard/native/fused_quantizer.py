"""The fused quantizer: floats to one-byte codes within an error bound, and back.

It takes addresses, because NumPy has no bfloat16. The caller owns the memory and keeps it alive;
each call makes one pass over it with the GIL released.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import Backend
from ._core import ffi, lib

# The address of a function like GOMP_parallel, and the number of threads that it may use.
Team = tuple[int, int]
_ALONE = (0, 1)


def quantize(
    values: int,
    count: int,
    dtype: str,
    step: float,
    codes: int,
    backend: Backend = "auto",
    *,
    rows: tuple[int, int] | None = None,
    team: Team = _ALONE,
) -> int:
    """Write int8 codes: 0 for 0, else sign(x) * ceil(|x| / (2 step)).

    Args:
        values: Address of the floats.
        count: Number of floats.
        dtype: ``float32`` or ``bfloat16``.
        step: Half the width of a bin, a positive normal float32.
        codes: Address of ``count`` writable bytes.
        backend: ``portable`` forces the plain C code.
        rows: Number of contiguous floats in a row, and floats from one row to the next; ``None`` if
            all are contiguous.
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
            ffi.cast("int8_t *", codes),
            backend == "portable",
            ffi.cast("pcr_parallel", team[0]),
            team[1],
        )
    )


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
    step: float,
    values: int,
    backend: Backend = "auto",
    *,
    team: Team = _ALONE,
) -> None:
    """Write ``count`` float32 values: sign(q) * (2 |q| - 1) * step.

    Args:
        codes: Address of ``count`` int8 codes.
        count: Number of codes.
        step: The step passed to :func:`quantize`.
        values: Address of ``4 * count`` writable bytes.
        backend: ``portable`` forces the plain C code.
        team: Threads that share the work.
    """
    lib.pcr_dequantize(
        ffi.cast("const int8_t *", codes),
        count,
        step,
        ffi.cast("float *", values),
        backend == "portable",
        ffi.cast("pcr_parallel", team[0]),
        team[1],
    )


def shift(
    codes: int,
    sources: Sequence[int],
    tables: int,
    sizes: tuple[int, int, int],
    most: int,
    sign: int,
) -> None:
    """Add ``sign`` times a prediction from other codes to each code, modulo 256.

    The prediction is the sum over sources of ``tables[channel][source][code]``, in 32nds of a code,
    rounded up and clipped to [0, ``most``].

    Args:
        codes: Address of the codes, with shape ``sizes``, changed in place.
        sources: One or two addresses of the same number of bytes.
        tables: Address of 256 int16 for each channel and source.
        sizes: (outer, channels, inner), the shape of all code arrays.
        most: The largest prediction.
        sign: 1 or -1.
    """
    first, second = (*sources, 0)[:2]
    lib.pcr_shift_codes(
        ffi.cast("uint8_t *", codes),
        ffi.cast("const uint8_t *", first),
        ffi.cast("const uint8_t *", second),
        ffi.cast("const int16_t *", tables),
        *sizes,
        most,
        sign,
    )
