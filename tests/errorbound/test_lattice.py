"""Lattices restore the same bits everywhere, and refuse descriptions that make none."""

import math
from decimal import Decimal, getcontext

import msgspec
import numpy as np
import pytest

from pcrshard.errorbound import LinearLattice, LogLattice, lattice_from
from pcrshard.errorbound.lattice import log_lattice, powers_of_two


def test_powers_of_two_are_right_to_the_last_bits():
    """The table agrees with 50 decimal digits within four units in the last place."""
    getcontext().prec = 50
    table = powers_of_two(1000)
    for i in range(0, 1000, 37):
        exact = (Decimal(2).ln() * i / 1000).exp()
        assert abs(Decimal(float(table[i])) - exact) < Decimal(2) ** -50


@pytest.mark.parametrize("bound", [1e-4, 1e-3, 0.01, 0.1, 0.5, 3.0])
def test_a_log_lattice_keeps_its_bound_over_all_magnitudes(bound):
    """From the smallest to the largest float64, with sign, relative to the value itself."""
    rng = np.random.default_rng(0)
    values = 2.0 ** rng.uniform(-1020, 1020, 20_000) * rng.choice([-1, 1], 20_000)
    lattice = log_lattice(bound, 0.0)
    codes = lattice.codes(values)
    assert np.abs(codes).max() < 2**31
    back = lattice.values(codes.astype(np.int32))
    assert (np.abs(back - values) <= bound * np.abs(values) * (1 + 1e-12)).all()
    assert np.array_equal(np.sign(back), np.sign(values))


def test_a_bound_finer_than_the_type_has_no_lattice():
    """Then the tensor is stored losslessly, and no bound is claimed that rounding breaks."""
    assert log_lattice(1e-9, 2.0**-24) is None
    assert log_lattice(1e-7, 0.0) is None


@pytest.mark.parametrize("lattice", [LinearLattice(0.1, 0.05), LogLattice(281, 1024, 0.1)])
def test_a_description_makes_the_same_lattice(lattice):
    """What a file holds of a lattice is all of it."""
    assert lattice_from(lattice.kind, lattice.numbers()) == lattice


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("linear", [0.0, 1.0]),
        ("linear", [math.nan, 1.0]),
        ("linear", [math.inf, 1.0]),
        ("linear", [1.0, -1.0]),
        ("linear", [1.0]),
        ("linear", [True, 1.0]),
        ("linear", "ab"),
        ("linear", []),
        ("log", [1, 2, math.nan]),
        ("log", [0, 1024, 0.1]),
        ("log", [1, 1 << 40, 0.1]),
        ("log", [1 << 40, 1024, 0.1]),
        ("log", [1.5, 1024, 0.1]),
        ("cubic", [1.0, 1.0]),
        (None, None),
    ],
)
def test_other_descriptions_are_refused(kind, numbers):
    """A hostile file cannot ask for a table of any size, or for a step of nothing."""
    with pytest.raises((msgspec.ValidationError, TypeError)):
        lattice_from(kind, numbers)
