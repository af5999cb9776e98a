"""One marker segment: where it ends, and what its header says."""

import io
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pcrshard.errors import CorruptJpeg, FormatError
from pcrshard.jpeg.segments import (
    ScanHeader,
    Segment,
    parse_frame,
    parse_scan,
    read_segment,
)
from pcrshard.native import exif_orientation
from pcrshard.testing import make_jpeg


def test_a_segment_is_marker_length_and_payload():
    """Fill bytes before a marker are no part of the segment, so that it can be moved."""
    comment = b"\xff\xfe\x00\x07hello"
    data = b"?" + b"\xff\xff" + comment + b"\xff\xd9"
    segment = read_segment(data, 1)
    assert segment == Segment(0xFE, 3, 3 + len(comment), b"hello")
    assert data[segment.start : segment.stop] == comment
    assert read_segment(data, segment.stop).code == 0xD9


@given(st.binary(max_size=40), st.integers(0, 40))
def test_hostile_bytes_are_a_segment_or_refused(data, pos):
    """A segment lies inside of its file and moves the reader on; all else is CorruptJpeg."""
    try:
        segment = read_segment(data, pos)
    except CorruptJpeg:
        return
    assert pos <= segment.start < segment.stop <= len(data)


@given(st.sampled_from([0xC0, 0xC2, 0xC3, 0xC9]), st.binary(max_size=20))
def test_hostile_headers_are_legal_or_refused(code, payload):
    """A frame header of any bytes has 1, 3 or 4 components of legal sampling, or is refused."""
    try:
        frame = parse_frame(Segment(code, 0, 0, payload))
        scan = parse_scan(Segment(0xDA, 0, 0, payload), frame)
    except FormatError:
        return
    assert len(frame.components) in (1, 3, 4)
    assert max(scan.components) < len(frame.components)


def test_a_scan_sends_its_band_of_each_component():
    """Coefficients are counted as (component, index), both ends of the band included."""
    assert ScanHeader((0, 2), 3, 4, 0, 1).coefficients == [(0, 3), (0, 4), (2, 3), (2, 4)]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_pillows(orientation):
    """The orientation that Pillow writes is the one that is read."""
    exif = Image.Exif()
    exif[0x010F] = "a camera"
    exif[0x0112] = orientation
    out = io.BytesIO()
    Image.open(io.BytesIO(make_jpeg())).save(out, "JPEG", exif=exif)
    payload = out.getvalue().partition(b"\xff\xe1")[2][2:]
    assert exif_orientation(payload) == orientation


@pytest.mark.parametrize("order", ["<", ">"])
def test_reads_exif_orientation(order):
    """Orientation is known without the metadata."""
    magic = {"<": b"II*\0", ">": b"MM\0*"}[order]
    payload = b"Exif\0\0" + magic + struct.pack(order + "IHHHIHH", 8, 1, 0x0112, 3, 1, 6, 0)
    assert exif_orientation(payload) == 6


@given(st.binary(max_size=60))
def test_broken_exif_is_no_orientation(data):
    """Hostile EXIF never raises."""
    assert exif_orientation(b"Exif\0\0II*\0" + data) in range(9)
