"""The map of a JPEG: every part is found, and what is not a JPEG is refused by name."""

import io
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pcrshard import split_scans
from pcrshard.errors import CorruptJpeg, FormatError, UnsupportedJpeg
from pcrshard.jpeg.markers import EOI, SOI, ScanHeader, find_frame, map_jpeg, read_segment
from pcrshard.native import exif_orientation
from pcrshard.testing import make_jpeg

JPEG = make_jpeg(1, 40, 56, quality=85)
PROGRESSIVE = make_jpeg(1, 40, 56, quality=85, progressive=True)
DQT_AT = PROGRESSIVE.index(b"\xff\xdb")
SOF_AT = PROGRESSIVE.index(b"\xff\xc2")
SOS_AT = PROGRESSIVE.index(b"\xff\xda")
SIZED = make_jpeg(4, 150, 200, quality=90, progressive=True)


def patched(jpeg: bytes, at: int, new: bytes) -> bytes:
    return jpeg[:at] + new + jpeg[at + len(new) :]


KINDS = [{}, {"mode": "L"}, {"mode": "CMYK"}, {"progressive": True}, {"restart_marker_blocks": 2}]


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_the_parts_are_the_whole_file(options):
    """No byte is lost or taken twice: SOI, segments, scans and EOI lie side by side."""
    jpeg = make_jpeg(2, 50, 70, **options)
    jpeg = jpeg[:2] + b"\xff\xfe\x00\x07hello" + jpeg[2:]
    found = map_jpeg(jpeg)
    parts = [(0, 2), (found.eoi, len(jpeg))]
    parts += [(segment.start, segment.stop) for segment in found.header + found.metadata]
    parts += [part for ranges in found.scan_ranges for part in ranges]
    parts.sort()
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
    assert parts[-1][1] == len(jpeg)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_frame_and_color_are_pillows(options):
    """Size, sampling, and color space match what Pillow reports."""
    jpeg = make_jpeg(2, 50, 70, **options)
    found = map_jpeg(jpeg)
    picture = Image.open(io.BytesIO(jpeg))
    assert picture.size == (found.frame.width, found.frame.height)
    sampling = [(component.h, component.v) for component in found.frame.components]
    assert sampling == [(h, v) for _, h, v, _ in picture.layer]
    assert found.color in {"L": ["gray"], "RGB": ["ycc"], "CMYK": ["cmyk", "ycck"]}[picture.mode]


@pytest.mark.parametrize("fill", [0, 1, 5])
@pytest.mark.parametrize("metadata_bytes", [2, 4000, 65535])
def test_the_size_is_found_after_any_metadata(fill, metadata_bytes):
    """Neither a long EXIF segment nor fill bytes before a marker hide the frame header."""
    segment = b"\xff\xe1" + struct.pack(">H", metadata_bytes) + bytes(metadata_bytes - 2)
    jpeg = JPEG[:2] + segment + b"\xff" * fill + JPEG[2:]
    assert find_frame(jpeg)[1:3] == (40, 56)


@given(st.binary(max_size=80))
def test_the_size_of_hostile_bytes_is_refused(data):
    """Whatever follows SOI, a size is found or the file is refused."""
    try:
        _, height, width, _ = find_frame(SOI + data)
    except FormatError:
        return
    assert height >= 0
    assert width > 0


def test_the_size_of_a_frame_is_read_from_its_head():
    """A header is enough, and a file without a frame has no size."""
    header, _, _ = split_scans(SIZED)
    assert find_frame(header)[1:3] == (150, 200)
    with pytest.raises(CorruptJpeg):
        find_frame(b"\xff\xd8\xff\xd9")


REFUSED = {
    "an empty file": (b"", CorruptJpeg, "empty"),
    "png": (b"\x89PNG\r\n\x1a\n", CorruptJpeg, "PNG"),
    "junk before SOI": (b"\0" + JPEG, CorruptJpeg, "SOI"),
    "only SOI": (SOI, CorruptJpeg, "no EOI"),
    "SOI, EOI": (SOI + EOI, CorruptJpeg, "frame header"),
    "no EOI": (PROGRESSIVE[:-2], CorruptJpeg, "no EOI"),
    "cut in a segment": (PROGRESSIVE[: DQT_AT + 9], CorruptJpeg, "claims"),
    "cut in a length": (PROGRESSIVE[: DQT_AT + 3], CorruptJpeg, "cut inside"),
    "no scan": (PROGRESSIVE[:SOS_AT] + EOI, CorruptJpeg, "scan before EOI"),
    "length 1": (patched(PROGRESSIVE, DQT_AT + 2, b"\0\1"), CorruptJpeg, "claims"),
    "second SOI": (SOI + PROGRESSIVE, CorruptJpeg, "second"),
    "second SOF": (
        PROGRESSIVE[:SOS_AT] + PROGRESSIVE[SOF_AT : SOF_AT + 19] + PROGRESSIVE[SOS_AT:],
        CorruptJpeg,
        "second",
    ),
    "scan before SOF": (
        PROGRESSIVE[:SOF_AT] + PROGRESSIVE[SOS_AT:],
        CorruptJpeg,
        "before the first scan",
    ),
    "unknown marker": (
        PROGRESSIVE[:DQT_AT] + b"\xff\x02\0\2" + PROGRESSIVE[DQT_AT:],
        CorruptJpeg,
        "FF02",
    ),
    "stray byte": (
        PROGRESSIVE[:DQT_AT] + b"x" + PROGRESSIVE[DQT_AT:],
        CorruptJpeg,
        "expected a marker",
    ),
    "width 0": (patched(PROGRESSIVE, SOF_AT + 7, b"\0\0"), CorruptJpeg, "width"),
    "height 0": (patched(PROGRESSIVE, SOF_AT + 5, b"\0\0"), CorruptJpeg, "height"),
    "12 bits": (patched(PROGRESSIVE, SOF_AT + 4, b"\x0c"), UnsupportedJpeg, "12-bit"),
    "lossless": (patched(PROGRESSIVE, SOF_AT + 1, b"\xc3"), UnsupportedJpeg, "lossless"),
    "hierarchical": (patched(PROGRESSIVE, SOF_AT + 1, b"\xc6"), UnsupportedJpeg, "hierarchical"),
    "arithmetic": (patched(PROGRESSIVE, SOF_AT + 1, b"\xca"), UnsupportedJpeg, "arithmetic"),
    "sequential": (JPEG, UnsupportedJpeg, "sequential"),
    "148 components": (patched(PROGRESSIVE, SOF_AT + 9, b"\x94"), CorruptJpeg, "components"),
    "sampling 0": (patched(PROGRESSIVE, SOF_AT + 11, b"\x00"), CorruptJpeg, "sampling"),
    "same ids": (patched(PROGRESSIVE, SOF_AT + 13, b"\x01"), CorruptJpeg, "distinct"),
    "unknown component": (patched(PROGRESSIVE, SOS_AT + 5, b"\x09"), CorruptJpeg, "does not have"),
    "illegal band": (patched(PROGRESSIVE, SOS_AT + 12, b"\x05"), CorruptJpeg, "progressive scan"),
    "3.6 gigapixels": (
        patched(PROGRESSIVE, SOF_AT + 5, struct.pack(">HH", 60000, 60000)),
        UnsupportedJpeg,
        "pixels",
    ),
    "100 megapixels in 1 kB": (
        patched(PROGRESSIVE, SOF_AT + 5, struct.pack(">HH", 10000, 10000)),
        CorruptJpeg,
        "cannot hold",
    ),
    "Adobe behind a scan": (
        PROGRESSIVE[:-2] + b"\xff\xee\0\x0eAdobe\0\x64" + bytes(5) + EOI,
        UnsupportedJpeg,
        "Adobe segment",
    ),
    "JFIF after a scan": (
        PROGRESSIVE[:-2] + PROGRESSIVE[2:20] + EOI,
        UnsupportedJpeg,
        "JFIF segment after",
    ),
    "300 scans": (
        PROGRESSIVE[:-2] + PROGRESSIVE[SOS_AT : SOS_AT + 14] * 300 + EOI,
        UnsupportedJpeg,
        "scans",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refuses_by_name(why):
    """A bad file is refused with a message that says what came."""
    jpeg, error, text = REFUSED[why]
    with pytest.raises(error, match=text):
        split_scans(jpeg)


@given(st.integers(0, len(PROGRESSIVE) - 1))
@settings(max_examples=200, deadline=None)
def test_a_cut_file_is_refused(stop):
    """No cut of a file passes for the file."""
    with pytest.raises(FormatError):
        split_scans(PROGRESSIVE[:stop])


@given(st.binary(max_size=40), st.integers(0, 40))
def test_hostile_bytes_are_a_segment_or_refused(data, pos):
    """A segment lies inside its file and moves the reader on; everything else is refused."""
    try:
        segment = read_segment(data, pos)
    except CorruptJpeg:
        return
    assert pos <= segment.start < segment.stop <= len(data)


@given(st.sampled_from([0xC0, 0xC2, 0xC3, 0xC9]), st.binary(max_size=20), st.binary(max_size=12))
def test_hostile_headers_are_legal_or_refused(code, frame, scan):
    """Headers of any bytes give 1, 3 or 4 components and a scan of these, or are refused."""
    parts = [(code, frame), (0xDA, scan)]
    segments = [bytes([0xFF, c]) + (2 + len(body)).to_bytes(2) + body for c, body in parts]
    try:
        found = map_jpeg(b"".join((SOI, *segments, EOI)))
    except FormatError:
        return
    assert len(found.frame.components) in (1, 3, 4)
    assert max(found.scans[0].components) < len(found.frame.components)


def test_a_scan_sends_its_band_of_each_component():
    """Coefficients are counted as (component, index), both ends of the band included."""
    assert ScanHeader((0, 2), 3, 4, 0, 1).coefficients == [(0, 3), (0, 4), (2, 3), (2, 4)]


@given(st.binary(max_size=60))
def test_broken_exif_is_no_orientation(data):
    """Hostile EXIF never raises."""
    assert exif_orientation(b"Exif\0\0II*\0" + data) in range(9)
