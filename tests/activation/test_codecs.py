"""The three codecs do one thing at different prices."""

import pytest
import torch

from pcrshard.activation.codecs import make_codec, payload_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["zstd", "bits", "int8"])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 1000])
@pytest.mark.parametrize("offload", [False, True])
def test_codes_come_back(name, count, offload):
    """Any number of any codes."""
    codes = torch.randint(-128, 128, (count,), generator=torch.Generator().manual_seed(count))
    codes = codes.to(torch.int8)
    codec = make_codec(name, offload=offload)
    assert codec.name == name
    decoded = codec.decode(codec.encode(codes), count, CPU)
    assert decoded.dtype == torch.int8
    assert torch.equal(decoded, codes)


def test_each_is_smaller_than_the_one_before():
    """On codes of a ReLU's output: int8, bits, zstd."""
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0)).relu() * 10
    codes = values.ceil().to(torch.int8)
    sizes = [payload_bytes(make_codec(name).encode(codes)) for name in ("int8", "bits", "zstd")]
    assert sizes[0] == 100_000
    assert sizes[0] > sizes[1] > sizes[2]


def test_an_unknown_codec_is_refused():
    """The message lists those that there are."""
    with pytest.raises(ValueError, match="zstd, predicted, bits, int8 and none, got 'lz4'"):
        make_codec("lz4")
    assert make_codec("none") is None
