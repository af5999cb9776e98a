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


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_of_dropout_are_bits(codec, dtype):
    """Floats of two values, exactly; on a CPU dropout saves such a tensor."""
    mask = (torch.rand(10_000) < 0.9).to(dtype).div_(0.9)
    packed = round_trip(mask, codec)
    assert packed.num_bytes <= 10_000 / 8 + 8


def test_other_floats_are_left_alone():
    """Three values, one value, NaN, negative zero."""
    values = torch.zeros(5000)
    assert pack_exactly(values, CODECS[0]) is None
    values[::2] = 3
    assert pack_exactly(values, CODECS[0]) is not None
    for odd in (1.0, float("nan"), -0.0):
        values[4998] = odd
        assert pack_exactly(values, CODECS[0]) is None
    assert pack_exactly(torch.randn(5000), CODECS[0]) is None
    assert pack_exactly(torch.zeros(10), CODECS[0]) is None


def test_bytes_are_left_alone():
    """There is nothing narrower."""
    assert pack_exactly(torch.zeros(10, dtype=torch.uint8), CODECS[0]) is None
