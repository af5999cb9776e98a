"""The fused quantizer against its formula in float64, value by value."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcrshard.native import fused_quantizer as native

BACKENDS = ("auto", "portable")


def dtype_of(values):
    return "bfloat16" if values.dtype == np.uint16 else "float32"


def codes_of(values, step, backend="auto", **how):
    codes = np.full(len(values) + 1, 99, np.int8)
    address = codes.ctypes.data
    count = native.quantize(
        values.ctypes.data, len(values), dtype_of(values), step, address, backend, **how
    )
    assert codes[-1] == 99  # nothing is written past the end
    return codes[:-1], count


def table_of(step):
    code = np.arange(-128, 128)
    return (np.sign(code) * (2 * np.abs(code) - 1) * np.float32(step)).astype(np.float32)


def values_of(codes, table, dtype="float32", **how):
    values = np.full(len(codes) + 1, 7, np.uint16 if dtype == "bfloat16" else np.float32)
    address = values.ctypes.data
    native.dequantize(codes.ctypes.data, len(codes), table.ctypes.data, dtype, address, **how)
    assert values[-1] == 7
    return values[:-1]


def wide(halves):
    return (halves.astype(np.uint32) << 16).view(np.float32)


floats = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)


@settings(max_examples=200)
@given(st.lists(floats, max_size=100), st.floats(2.0**-100, 2.0**100, width=32))
def test_codes_are_exact_in_zero_sign_and_bound(numbers, step):
    """Whatever the floats: zero is zero, signs stay, and what is no escape is within the step; the
    vector kernels and the plain ones agree, on bfloat16 too.
    """
    values = np.array(numbers, np.float32)
    for array in (values, (values.view(np.uint32) >> 16).astype(np.uint16)):
        (first, *_), (second, *_) = (codes_of(array, step, backend) for backend in BACKENDS)
        assert np.array_equal(first, second)
    for backend in BACKENDS:
        codes, escapes = codes_of(values, step, backend)
        escaped = codes == -128
        assert escapes == escaped.sum()
        assert np.isfinite(values[~escaped]).all()
        assert np.array_equal(codes == 0, values == 0)
        decoded = values_of(codes, table_of(step))
        assert np.array_equal(np.sign(decoded[~escaped]), np.sign(values[~escaped]))
        error = np.abs(values[~escaped].astype(np.float64) - decoded[~escaped])
        assert (error <= step * (1 + 2.0**-14)).all()


@pytest.mark.parametrize("shape", [(3, 50), (1, 200_003), (700, 192)])
def test_the_deviation_is_that_of_the_finite_values(shape):
    """Of all or of a sample, in rows with gaps; at most a multiple of the median magnitude."""
    rng = np.random.default_rng(0)
    whole = rng.standard_normal((shape[0], shape[1] + 8)).astype(np.float32)
    whole[0, :3] = [np.nan, np.inf, 0]
    rows = whole[:, : shape[1]]
    for array in (whole, (whole.view(np.uint32) >> 16).astype(np.uint16)):
        name = "float32" if array is whole else "bfloat16"
        layout = (shape[1], shape[1] + 8)
        args = (array.ctypes.data, rows.size, name, layout)
        close = 1e-6 if rows.size < 65_536 and array is whole else 0.02
        expected = rows[np.isfinite(rows)].astype(np.float64).std()
        assert native.deviation(*args, np.inf) == pytest.approx(expected, rel=close)
        assert native.deviation(*args, 1.0) == pytest.approx(0.674, rel=0.15)
    whole[:] = np.nan
    assert np.isnan(native.deviation(whole.ctypes.data, rows.size, "float32", layout, 8.0))
    whole[:] = 0
    assert native.deviation(whole.ctypes.data, rows.size, "float32", layout, 8.0) == 0


def test_rows_with_gaps():
    """The codes of a strided matrix, of several blocks, are those of its copy."""
    matrix = np.random.default_rng(0).standard_normal((4000, 100)).astype(np.float32)
    expected, _ = codes_of(np.ascontiguousarray(matrix[:, :70]).ravel(), 0.01, "auto")
    codes = np.zeros(280_000, np.int8)
    address = codes.ctypes.data
    native.quantize(matrix.ctypes.data, len(codes), "float32", 0.01, address, rows=(70, 100))
    assert np.array_equal(codes, expected)


def test_the_codes_are_those_of_the_formula():
    """sign(x) ceil(|x| / (2 step)), and its inverse, away from the edges of bins."""
    values = np.array([0.0, -0.0, 1e-45, -1e-45, 0.5, -1.5, 2.5, 251.5, -251.5, 252.5], np.float32)
    codes, escapes = codes_of(values, 1.0)
    assert codes.tolist() == [0, 0, 1, -1, 1, -1, 2, 126, -126, -128]
    assert escapes == 1
    decoded = values_of(codes[:9].copy(), table_of(1.0))
    assert decoded.tolist() == [0, 0, 1, -1, 1, -1, 3, 251, -251]


@settings(max_examples=100)
@given(st.lists(floats, min_size=1, max_size=200))
def test_extremes_are_finite_and_have_codes_of_their_own(numbers):
    """The least and the largest finite value, by vectors and without, and no other, get 127."""
    values = np.array(numbers, np.float32)
    halves = (values.view(np.uint32) >> 16).astype(np.uint16)
    for array, exact in ((values, values), (halves, wide(halves))):
        finite = exact[np.isfinite(exact)]
        args = (array.ctypes.data, len(array), dtype_of(array), (len(array), 0))
        low, high = native.extremes(*args)
        assert (low, high) == native.extremes(*args, "portable")
        if len(finite) == 0:
            assert (low, high) == (np.inf, -np.inf)
            continue
        assert (low, high) == (finite.min(), finite.max())
        for backend in BACKENDS:
            codes, _ = codes_of(array, 1.0, backend, extremes=(low, high))
            is_high, is_low = ((exact == end) & (end != 0) for end in (high, low))
            assert np.array_equal(codes == 127, is_high)
            assert np.array_equal(codes == -127, is_low & ~is_high)


@pytest.mark.parametrize("period", [5, 0], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_and_columns_have_lines_of_their_own(period, dtype):
    """Channels of any size keep as many digits as others, and a ReLU's mask is that of its line."""
    rng = np.random.default_rng(0)
    rows, run = 3000, 100
    lines = period or run
    scale = np.exp(rng.normal(0, 3, lines)).astype(np.float32)
    shift = (rng.normal(0, 3, lines) * scale).astype(np.float32)
    by_line = (lambda line: np.tile(line, rows // period)[:, None]) if period else (lambda x: x)
    values = (rng.standard_normal((rows, run)) * by_line(scale) + by_line(shift)).astype(np.float32)
    stored = values if dtype == "float32" else (values.view(np.uint32) >> 16).astype(np.uint16)
    exact = values if dtype == "float32" else wide(stored.ravel()).reshape(rows, run)
    gains, offsets = 1 / scale, -shift / scale
    affine = native.Affine(gains.ctypes.data, offsets.ctypes.data, period)
    how = {"rows": (run, run), "affine": affine}
    codes, escapes = codes_of(stored.ravel(), 0.05, **how)
    assert np.array_equal(codes, codes_of(stored.ravel(), 0.05, "portable", **how)[0])
    assert escapes == 0
    d = exact * by_line(gains) + by_line(offsets)
    assert np.array_equal(np.sign(codes).reshape(rows, run), np.sign(d))
    back = native.Affine(scale.ctypes.data, shift.ctypes.data, period)
    restored = values_of(codes, table_of(0.05), dtype, run=run, affine=back)
    restored = restored if dtype == "float32" else wide(restored)
    room = 0.051 * by_line(scale) + np.abs(exact) * (0 if dtype == "float32" else 2.0**-8)
    assert (np.abs(restored.reshape(rows, run) - exact) <= room).all()
    zeros = np.zeros(lines, np.float32)
    relu = native.Affine(scale.ctypes.data, zeros.ctypes.data, period, True)
    found = values_of(codes, table_of(0.05), dtype, run=run, affine=relu).reshape(rows, run)
    assert np.array_equal(found > 0, d > 0)
