"""Masks and indices come back exactly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcrshard.activation.codecs import make_codec
from pcrshard.activation.masks import pack_exactly, pack_nonzero

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


def bits_of(values):
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(words[values.element_size()])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, -0.0, 1.5, -3e38, float("nan"), float("inf")]), max_size=70),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.sampled_from(CODECS),
)
def test_floats_without_their_zeros_come_back(numbers, dtype, codec):
    """Every bit: NaN, infinity, negative zero, nothing but zeros, nothing at all."""
    values = torch.tensor(numbers, dtype=dtype)
    packed = pack_nonzero(values, codec)
    if packed is not None:
        assert torch.equal(bits_of(packed.decode()), bits_of(values))
        assert packed.num_bytes < values.numel() * values.element_size()


@pytest.mark.parametrize("codec", CODECS)
def test_features_of_relu_and_dropout_shrink(codec):
    """Three quarters are zeros: 0.25 + 1/32 of the bytes. Dense features are left alone."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(100_000, generator=generator)
    assert pack_nonzero(values, codec) is None
    sparse = torch.where(torch.rand(100_000, generator=generator) < 0.5, values.relu(), 0)
    packed = pack_nonzero(sparse, codec)
    assert torch.equal(packed.decode(), sparse)
    assert 400_000 / packed.num_bytes > 3.4
