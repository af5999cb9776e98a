"""Bounds mean what they say for tensors of all shapes of distribution."""

import math

import numpy as np
import pytest

from pcrshard.errorbound import (
    FLOAT_TYPES,
    Absolute,
    PointwiseRelative,
    RelativeStd,
)

F32 = FLOAT_TYPES["float32"]


def words(values):
    return np.asarray(values, np.float32).view(np.uint32)


def test_huge_outliers_do_not_erase_the_other_values():
    """Ten values of 1000 in a tensor of deviation 0.02: the bound follows the others."""
    values = np.random.default_rng(0).normal(0, 0.02, 100_000)
    values[:10] = 1000
    guarded = RelativeStd(0.01).lattice(words(values), F32)
    assert guarded.error_bound == pytest.approx(0.01 * 8 * 0.02, rel=0.02)
    blind = RelativeStd(0.01, outlier_guard=1e9).lattice(words(values), F32)
    assert blind.error_bound > 4 * 0.02  # every ordinary value would become 0


def test_a_large_mean_leaves_the_deviation_exact():
    """Times in seconds since 1970 that differ by one keep a bound of a fraction of a second."""
    values = np.random.default_rng(0).normal(1.7e9, 1, 100_000)
    lattice = RelativeStd(0.01).lattice(values.view(np.uint64), FLOAT_TYPES["float64"])
    assert lattice.error_bound == pytest.approx(0.01 * values.std(), rel=1e-3)


@pytest.mark.parametrize("values", [[], [0.0] * 9, [2.5] * 9, [math.nan] * 9, [math.inf, 1.0]])
def test_without_a_deviation_there_is_no_lattice(values):
    """Such tensors are stored losslessly."""
    assert RelativeStd(0.01).lattice(words(values), F32) is None


def test_special_values_do_not_count():
    """One NaN or infinity does not take the bound away."""
    values = np.random.default_rng(0).normal(0, 1, 1000)
    clean = RelativeStd(0.1).lattice(words(values), F32)
    values = np.append(values, [math.nan, math.inf, -math.inf])
    dirty = RelativeStd(0.1).lattice(words(values), F32)
    assert dirty.error_bound == pytest.approx(clean.error_bound)


@pytest.mark.parametrize("make", [RelativeStd, Absolute, PointwiseRelative])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf])
def test_a_bound_is_positive(make, value):
    """A bound of nothing is a misunderstanding: lossless is ``bound=None``."""
    with pytest.raises(ValueError, match=r"expected .* positive and finite"):
        make(value)


def test_a_fraction_is_below_one():
    """5 for 5 % is a misunderstanding that would erase a tensor."""
    for value in (1, 5, 100.0):
        with pytest.raises(ValueError, match=r"below 1, got .*0.05 allows 5 %"):
            RelativeStd(value)
    with pytest.raises(ValueError, match="positive"):
        RelativeStd(True)
