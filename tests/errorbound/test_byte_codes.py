"""Words and bytes come back exactly; a frame cannot take more memory than was agreed."""

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pcrshard.errorbound import (
    compress,
    decode_planes,
    decompress,
    encode_planes,
)
from pcrshard.errors import FormatError


@settings(max_examples=60)
@given(st.sampled_from(["u1", "u2", "u4", "u8"]).flatmap(lambda kind: hnp.arrays(kind, 40)))
def test_words_come_back(words):
    """Any words of 8 to 64 bits."""
    assert np.array_equal(decode_planes(encode_planes(words), len(words), words.dtype), words)


@settings(max_examples=60)
@given(st.binary(max_size=300))
def test_bytes_come_back_and_grow_by_one_at_most(data):
    """What zstd cannot make smaller is kept as it is."""
    payload = compress(data)
    assert decompress(payload, len(data)) == data
    assert len(payload) <= len(data) + 1


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x07abc",
        b"\x00ab",
        b"\x01" + zstandard.compress(b"abcd" * 100),
        b"\x01" + zstandard.compress(b"abc")[:-1],
        b"\x01" + zstandard.compress(b"abc") + b"x",
        b"\x01abc",
        # Skippable frame; content size unknown.
        b"\x01\x50\x2a\x4d\x18\x03\x00\x00\x00abc",
        b"\x01" + zstandard.ZstdCompressor(write_content_size=False).compress(b"abc"),
    ],
)
def test_what_is_not_three_bytes_is_refused(payload):
    """Each form that does not hold exactly what was agreed, before it is unpacked."""
    with pytest.raises(FormatError):
        decompress(payload, 3)
