"""Pieces in a prefix: found where they are, compared, joined, and never outside of the buffer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcrshard.checksum import crc32c
from pcrshard.native.pieces import atomic_add, find_damaged, join, place_pieces

ROWS = st.lists(
    st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=600)), min_size=3, max_size=3),
    min_size=1,
    max_size=4,
)
NOTHING = np.zeros(0, np.uint64)


def laid_out(rows, gap):
    """The buffer, the headers and the starts of rows of (header, own bytes) of three units."""
    buffer = bytearray(gap)
    starts = []
    for row in rows:
        starts.append(len(buffer))
        buffer += b"".join(own for _, own in row) + bytes(gap)
    headers = b"".join(header for row in rows for header, _ in row)
    sizes = np.array([[len(h) + len(own) for h, own in row] for row in rows], np.uint32)
    header_sizes = np.array([[len(h) for h, _ in row] for row in rows], np.uint16)
    return np.frombuffer(bytes(buffer), np.uint8), headers, starts, sizes, header_sizes


@given(rows=ROWS, gap=st.integers(1, 30), flip=st.integers(0, 2))
def test_pieces_are_what_was_laid_out(rows, gap, flip):
    """Every image is the bytes of its pieces, also where some are empty or nothing but a header;
    what does not have its checksum is found.
    """
    buffer, headers, starts, sizes, header_sizes = laid_out(rows, gap)
    table = place_pieces(sizes, header_sizes, starts, 0, NOTHING, headers, buffer)
    units = [b"".join(h + own for h, own in unit) for unit in zip(*rows, strict=True)]
    assert [join(row).tobytes() for row in table] == units
    assert join(table).tobytes() == b"".join(units)
    crcs = np.array(list(map(crc32c, units)), np.uint32)
    assert find_damaged(table, crcs) == []
    crcs[flip] ^= 1
    assert find_damaged(table, crcs) == ([flip] if units[flip] else [])


@pytest.mark.parametrize(
    ("size", "header", "start", "offset"),
    [(11, 0, 0, None), (5, 0, 6, None), (1, 0, 1 << 63, None), (4, 5, 0, None), (9, 4, 0, None),
     (5, 0, 0, 6), (1, 0, 0, (1 << 64) - 1)],
)  # fmt: skip
def test_claims_beyond_the_buffer_are_refused(size, header, start, offset):
    """A hostile table gives no address outside of the buffer or the headers."""
    base = 0 if offset is None else 1
    offsets = NOTHING if offset is None else np.array([offset], np.uint64)
    sizes, header_sizes = np.array([[size]], np.uint32), np.array([[header]], np.uint16)
    buffer = np.zeros(10, np.uint8)
    assert place_pieces(sizes, header_sizes, [start], base, offsets, b"abc", buffer) is None


@pytest.mark.parametrize(
    ("starts", "base", "offsets", "shape"),
    [([0], 0, NOTHING, (2, 3)), ([0, 0], 1, NOTHING, (2, 3)), ([0, 0], 3, NOTHING, (2, 3)),
     ([0, 0], 0, NOTHING, (2, 2))],
)  # fmt: skip
def test_tables_of_other_shapes_are_refused(starts, base, offsets, shape):
    """A table whose parts do not fit together is an error, not memory read elsewhere."""
    sizes, header_sizes = np.zeros((2, 3), np.uint32), np.zeros(shape, np.uint16)
    with pytest.raises(ValueError, match="2 rows of 3 units"):
        place_pieces(sizes, header_sizes, starts, base, offsets, b"", np.zeros(10, np.uint8))
    table = place_pieces(sizes, sizes.astype(np.uint16), [0, 0], 0, NOTHING, b"", NOTHING)
    with pytest.raises(ValueError, match="3 checksums, got 2"):
        find_damaged(table, np.zeros(2, np.uint32))


@pytest.mark.parametrize("place", [-1, 2])
def test_a_number_that_is_not_there_cannot_be_added_to(place):
    """Counters in shared memory are added to within that memory."""
    numbers = bytearray(16)
    atomic_add(numbers, 1, 5)
    with pytest.raises(IndexError, match="2 numbers"):
        atomic_add(numbers, place, 1)
    assert np.frombuffer(numbers, np.int64).tolist() == [0, 5]
