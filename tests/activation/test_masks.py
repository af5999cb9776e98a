"""Masks and indices come back exactly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcrshard.activation.codecs import make_codec
from pcrshard.activation.masks import pack_exactly

CODECS = [make_codec("zstd"), make_codec("int8")]


def round_trip(values, codec):
    packed = pack_exactly(values, codec)
    if packed is not None:
        decoded = packed.decode()
        assert decoded.dtype == values.dtype
        assert torch.equal(decoded, values)
    return packed


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50),
    st.sampled_from([torch.int16, torch.int32, torch.int64]),
    st.integers(0, 63),
    st.sampled_from(CODECS),
)
def test_any_integers_come_back(numbers, dtype, shift, codec):
    """Every range, extremes of the type included; what cannot be narrowed is left alone."""
    bits = torch.iinfo(dtype).bits
    values = [(number >> shift) >> (64 - bits) for number in numbers]
    round_trip(torch.tensor(values, dtype=dtype), codec)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), max_size=100), st.sampled_from(CODECS))
def test_masks_come_back(flags, codec):
    """Any number of booleans, eight to a byte."""
    packed = round_trip(torch.tensor(flags, dtype=torch.bool), codec)
    if codec.name == "int8":
        assert packed.num_bytes == -(-len(flags) // 8)


@pytest.mark.parametrize(("codec", "ratio"), [(CODECS[0], 12), (CODECS[1], 4)])
def test_indices_of_max_pooling_shrink(codec, ratio):
    """Real indices, int64, of 2x2 windows."""
    images = torch.randn(4, 16, 32, 32, generator=torch.Generator().manual_seed(0))
    _, indices = torch.nn.functional.max_pool2d(images, 2, return_indices=True)
    packed = round_trip(indices.flatten(), codec)
    assert indices.numel() * 8 / packed.num_bytes >= ratio


def test_floats_are_not_its_business():
    """Other types are refused, not damaged."""
    assert pack_exactly(torch.zeros(10), CODECS[0]) is None
    assert pack_exactly(torch.zeros(10, dtype=torch.uint8), CODECS[0]) is None
