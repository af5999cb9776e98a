"""No restored value is farther off than its bound, whatever the type and the values."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pcrshard.errorbound import (
    FLOAT_TYPES,
    Absolute,
    LinearLattice,
    PointwiseRelative,
    RelativeStd,
    dequantize,
    quantize,
)

BOUNDS = [RelativeStd(0.01), RelativeStd(0.1), Absolute(1e-3), PointwiseRelative(0.1)]


def worst_error(words, restored, kind, lattice):
    """The largest error over what is allowed for the value; infinite if a special value differs."""
    values = kind.widen(words)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.abs(kind.widen(restored) - values) / lattice.tolerance(np.abs(values))
    return np.where(words == restored, 0, np.nan_to_num(share, nan=np.inf)).max()


def there_and_back(words, kind, lattice):
    quantized = quantize(words, kind, lattice)
    restored = dequantize(quantized.codes, kind, lattice)
    restored[quantized.escape_index] = quantized.escape_words
    return quantized, restored


@settings(max_examples=60)
@given(data=st.data(), name=st.sampled_from(sorted(FLOAT_TYPES)), bound=st.sampled_from(BOUNDS))
def test_any_bits_come_back_within_the_bound(data, name, bound):
    """Arbitrary bits of any floating type: all errors within the bound, special values exact."""
    kind = FLOAT_TYPES[name]
    words = data.draw(hnp.arrays(kind.word, st.integers(1, 200)))
    lattice = bound.lattice(words, kind)
    if lattice is None:
        return
    quantized, restored = there_and_back(words, kind, lattice)
    assert worst_error(words, restored, kind, lattice) <= 1
    values = kind.widen(words)
    special = ~np.isfinite(values) | (np.abs(values) < kind.smallest_normal)
    assert np.array_equal(restored[special], words[special])
    points = np.empty_like(words)
    again = quantize(words, kind, lattice, points)
    assert np.array_equal(again.codes, quantized.codes)
    assert np.array_equal(points, restored)


def test_the_core_chooses_the_codes_that_numpy_chooses():
    """A NaN makes numpy quantize its block; the codes of all other values stay the same."""
    kind = FLOAT_TYPES["float32"]
    values = np.random.default_rng(0).normal(0, 1, 40_000).astype(np.float32)
    values[5:9] = 0.0, 0.015, 0.025, 1e7  # among them two halfway between points
    lattice = LinearLattice(0.01, 0.0051)
    codes = quantize(values.view(np.uint32), kind, lattice).codes
    values[0] = np.nan
    assert np.array_equal(quantize(values.view(np.uint32), kind, lattice).codes[1:], codes[1:])


@pytest.mark.parametrize("name", FLOAT_TYPES)
@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: f"{bound}")
def test_normal_tensors_hold_the_bound_after_the_cast(name, bound):
    """300,000 values cross the blocks; the cast to 16 bits would break 1 % bounds by far."""
    kind = FLOAT_TYPES[name]
    values = np.random.default_rng(0).normal(0, 0.02, 300_000)
    words = kind.narrow(values)
    lattice = bound.lattice(words, kind)
    if lattice is None:
        assert name == "bfloat16"
        return
    quantized, restored = there_and_back(words, kind, lattice)
    worst = worst_error(words, restored, kind, lattice)
    assert 0.9 < worst <= 1
    if name in ("float32", "float64"):
        assert len(quantized.escape_index) < 100
