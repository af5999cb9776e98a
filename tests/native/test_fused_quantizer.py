"""The fused quantizer against its formula in float64, value by value."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcrshard.native import fused_quantizer as native

BACKENDS = ("auto", "portable")


def codes_of(values, step, backend):
    codes = np.full(len(values) + 1, 99, np.int8)
    dtype = "bfloat16" if values.dtype == np.uint16 else "float32"
    address = codes.ctypes.data
    count = native.quantize(values.ctypes.data, len(values), dtype, step, address, backend)
    assert codes[-1] == 99  # nothing is written past the end
    return codes[:-1], count


def values_of(codes, step, backend):
    values = np.full(len(codes) + 1, 7, np.float32)
    native.dequantize(codes.ctypes.data, len(codes), step, values.ctypes.data, backend)
    assert values[-1] == 7
    return values[:-1]


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
        decoded = values_of(codes, step, backend)
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
    values = np.array([0.0, -0.0, 1e-45, -1e-45, 0.5, -1.5, 2.5, 253.5, -253.5, 254.5], np.float32)
    codes, escapes = codes_of(values, 1.0, "auto")
    assert codes.tolist() == [0, 0, 1, -1, 1, -1, 2, 127, -127, -128]
    assert escapes == 1
    decoded = values_of(codes[:9], 1.0, "auto")
    assert decoded.tolist() == [0, 0, 1, -1, 1, -1, 3, 253, -253]
