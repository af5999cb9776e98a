"""Codes packed by blocks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcrshard.activation import bits


def round_trip(codes):
    data, widths, signed = bits.pack(codes)
    unpacked = bits.unpack(data, widths, signed, codes.numel())
    assert torch.equal(unpacked, codes)
    return data.numel() + widths.numel()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(-128, 127), st.integers(1, 70)), max_size=12))
def test_any_codes_come_back(runs):
    """Blocks of every width, in any order and length."""
    round_trip(torch.tensor([code for code, times in runs for _ in range(times)], dtype=torch.int8))


@pytest.mark.parametrize("width", range(9))
def test_a_block_takes_the_bits_of_its_largest_code(width):
    """64 codes of w bits are 8 w bytes, and half a byte that says so."""
    largest = (1 << width) - 1
    if largest <= 127:
        codes = torch.full((640,), largest, dtype=torch.int8)
        assert round_trip(codes) == 10 * 8 * width + 5
    signed = torch.full((640,), -((largest + 1) // 2), dtype=torch.int8)
    assert round_trip(signed) == 10 * 8 * width + 5


def test_gaussian_codes_take_fewer_bits_than_a_byte():
    """At a bound of 5 % of the standard deviation: seven bits with a sign, not eight."""
    codes = (torch.randn(64_000, generator=torch.Generator().manual_seed(0)) * 10).round().char()
    assert round_trip(codes) < 0.8 * codes.numel()
