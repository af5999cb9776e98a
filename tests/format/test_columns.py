"""Raw columns: what is written is read, and no length is taken that is not there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcrshard.errors import CorruptIndex
from pcrshard.format.columns import Columns, encode_byte_strings


@given(st.lists(st.none() | st.binary(max_size=20), max_size=20))
def test_byte_strings_survive_encoding(values):
    """Values come back as they were, absent ones as absent, and empty ones as empty."""
    encoded = encode_byte_strings(values)
    columns = Columns(b"head" + encoded, 4)
    assert columns.byte_strings(len(values)) == tuple(values)
    assert columns.pos == 4 + len(encoded)


@pytest.mark.parametrize("dtype", ["<u1", "<u4", "<u8"])
def test_a_length_that_is_not_there_is_refused(dtype):
    """A claim of billions takes no memory."""
    with pytest.raises(CorruptIndex, match="longer than"):
        Columns(bytes(100), 0).array(dtype, 1 << 40)
    with pytest.raises(CorruptIndex, match="longer than"):
        Columns(b"\xfe\xff\xff\xff" * 2, 0).byte_strings(2)
