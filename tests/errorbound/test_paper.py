"""The paper's equations and coder as printed, so that tables can compare them."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pcrshard.errorbound import paper
from pcrshard.errors import CorruptCheckpoint

# Other jobs may have the machine.
PATIENT = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def test_the_equations_are_those_of_the_paper():
    """By hand: epsilon 0.1, 2 log(1.1) = 0.19062."""
    target = np.array([1.0, 0.5, 0.0], np.float32)
    reference = np.array([0.0, 0.45, 0.3], np.float32)
    factors = paper.quantisation_factors(target, reference, 0.1)
    assert factors.tolist() == [5, 0, -2]
    back = paper.recover(factors, reference, 0.1)
    assert back.tolist() == pytest.approx([0.953102, 0.45, -0.08124], rel=1e-5)
    assert np.abs(back - target).max() <= math.log(1.1)


@pytest.mark.parametrize("coder", paper.CODERS)
@pytest.mark.parametrize("spread", [0, 0.2, 90, 40_000])
def test_factors_come_back_by_each_coder(coder, spread):
    """Figure 5's four coders, for factors of 8, 16 and 32 bits."""
    factors = np.rint(np.random.default_rng(0).normal(0, 1, 5000) * spread).astype(np.int32)
    payload = paper.encode_factors(factors, coder)
    assert np.array_equal(paper.decode_factors(payload, len(factors), coder), factors)
    with pytest.raises(CorruptCheckpoint):
        paper.decode_factors(payload, len(factors) + 1, coder)


@PATIENT
@given(st.lists(st.tuples(st.integers(0, 255), st.integers(1, 600)), max_size=20))
def test_runs_come_back(runs):
    """Runs of any length, longer than a byte counts included."""
    data = b"".join(bytes([value]) * length for value, length in runs)
    assert paper.expand_runs(paper.run_lengths(data)) == data


def test_an_unknown_coder_is_refused():
    """With the names of those that there are."""
    with pytest.raises(ValueError, match="rle\\+lzma"):
        paper.encode_factors(np.zeros(3, np.int32), "lz4")
