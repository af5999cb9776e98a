"""The Zstandard wrapper."""

import pytest

from pcrshard import zstd
from pcrshard.errors import FormatError


@pytest.mark.parametrize("data", [b"", b"a", bytes(100_000)])
@pytest.mark.parametrize("level", [-5, zstd.CODES, 1, 19])
def test_what_goes_in_comes_out(data, level):
    """Any content and level."""
    assert zstd.decompress(zstd.compress(data, level), len(data)) == data


def test_a_frame_of_another_size_is_refused_before_memory_is_taken():
    """A frame that promises gigabytes takes none."""
    with pytest.raises(FormatError, match="expected a frame of 10 bytes, got one of 100000"):
        zstd.decompress(zstd.compress(bytes(100_000)), 10)


@pytest.mark.parametrize("data", [b"", b"nonsense", zstd.compress(b"abc" * 100)[:-4]])
def test_damaged_frames_are_refused(data):
    """Bytes that are no whole frame."""
    with pytest.raises(FormatError, match="Zstandard frame"):
        zstd.decompress(data, 300)
