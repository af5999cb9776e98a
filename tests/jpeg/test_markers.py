"""JPEG bytes: every part is found, split and joined; what is not a JPEG is refused by name."""

import io
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pcrshard import join_scans, split_scans
from pcrshard.errors import CorruptJpeg, FormatError, UnsupportedJpeg
from pcrshard.jpeg.markers import EOI, SOI, map_jpeg, read_segment
from pcrshard.jpeg.orientation import with_orientation
from pcrshard.jpeg.pixels import make_baseline
from pcrshard.jpeg.split import check_complete
from pcrshard.native import find_orientation
from pcrshard.testing import make_jpeg

JPEG = make_jpeg(1, 40, 56, quality=85)
APP1_WITH_THUMBNAIL = b"\xff\xe1" + struct.pack(">H", 2 + len(JPEG)) + JPEG
PROGRESSIVE = make_jpeg(1, 40, 56, quality=85, progressive=True)
DQT_AT = PROGRESSIVE.index(b"\xff\xdb")
SOF_AT = PROGRESSIVE.index(b"\xff\xc2")
SOS_AT = PROGRESSIVE.index(b"\xff\xda")


def patched(jpeg, at, new):
    return jpeg[:at] + new + jpeg[at + len(new) :]


KINDS = [{}, {"mode": "L"}, {"mode": "CMYK"}, {"progressive": True}, {"restart_marker_blocks": 2}]


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_the_parts_are_the_whole_file(options):
    """No byte is lost or taken twice: SOI, segments, scans and EOI lie side by side; size, sampling
    and color space are what Pillow reports.
    """
    jpeg = make_jpeg(2, 50, 70, **options)
    jpeg = jpeg[:2] + b"\xff\xfe\x00\x07hello" + jpeg[2:]
    found = map_jpeg(jpeg)
    parts = [(0, 2), (found.eoi, len(jpeg))]
    parts += [(segment.start, segment.stop) for segment in found.header + found.metadata]
    parts += [part for ranges in found.scan_ranges for part in ranges]
    parts.sort()
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
    assert parts[-1][1] == len(jpeg)
    picture = Image.open(io.BytesIO(jpeg))
    assert picture.size == (found.frame.width, found.frame.height)
    sampling = [(component.h, component.v) for component in found.frame.components]
    assert sampling == [(h, v) for _, h, v, _ in picture.layer]
    assert found.color in {"L": ["gray"], "RGB": ["ycc"], "CMYK": ["cmyk", "ycck"]}[picture.mode]


REFUSED = {
    "an empty file": (b"", CorruptJpeg, "empty"),
    "png": (b"\x89PNG\r\n\x1a\n", CorruptJpeg, "PNG"),
    "junk before SOI": (b"\0" + JPEG, CorruptJpeg, "SOI"),
    "only SOI": (SOI, CorruptJpeg, "no EOI"),
    "no EOI": (PROGRESSIVE[:-2], CorruptJpeg, "no EOI"),
    "cut in a segment": (PROGRESSIVE[: DQT_AT + 9], CorruptJpeg, "claims"),
    "no scan": (PROGRESSIVE[:SOS_AT] + EOI, CorruptJpeg, "scan before EOI"),
    "length 1": (patched(PROGRESSIVE, DQT_AT + 2, b"\0\1"), CorruptJpeg, "claims"),
    "second SOF": (
        PROGRESSIVE[:SOS_AT] + PROGRESSIVE[SOF_AT : SOF_AT + 19] + PROGRESSIVE[SOS_AT:],
        CorruptJpeg,
        "second",
    ),
    "scan before SOF": (
        PROGRESSIVE[:SOF_AT] + PROGRESSIVE[SOS_AT:],
        CorruptJpeg,
        "no frame header",
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
    "lossless": (patched(PROGRESSIVE, SOF_AT + 1, b"\xc3"), UnsupportedJpeg, "lossless"),
    "arithmetic": (patched(PROGRESSIVE, SOF_AT + 1, b"\xca"), UnsupportedJpeg, "got SOF10"),
    "sequential": (JPEG, UnsupportedJpeg, "got SOF0"),
    "148 components": (patched(PROGRESSIVE, SOF_AT + 9, b"\x94"), CorruptJpeg, "components"),
    "sampling 0": (patched(PROGRESSIVE, SOF_AT + 11, b"\x00"), CorruptJpeg, "sampling"),
    "unknown component": (
        patched(PROGRESSIVE, SOS_AT + 5, b"\x09"),
        CorruptJpeg,
        "no frame header",
    ),
    "Adobe behind a scan": (
        PROGRESSIVE[:-2] + b"\xff\xee\0\x0eAdobe\0\x64" + bytes(5) + EOI,
        UnsupportedJpeg,
        "Adobe or orientation",
    ),
    "orientation behind a scan": (
        PROGRESSIVE[:-2] + with_orientation(b"", 6) + EOI,
        UnsupportedJpeg,
        "or orientation",
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
@settings(max_examples=200)
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


@given(st.binary(max_size=60))
def test_broken_exif_is_no_orientation(data):
    """Hostile EXIF never raises."""
    assert find_orientation([b"Exif\0\0II*\0" + data]) in range(9)


# --- split and joined


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "L"},
        {"mode": "CMYK"},
        {"subsampling": 0},
        {"subsampling": 1},
        {"restart_marker_blocks": 2},
        {"height": 1, "width": 1},
        {"height": 17, "width": 33},
        {"optimize": False, "quality": 100},
    ],
    ids=str,
)
def test_every_prefix_decodes_as_the_cut_original(options, djpeg, jpegtran):
    """Scans 1..k joined are what a decoder sees of the original cut after scan k."""
    jpeg = jpegtran(make_jpeg(3, **options), "-copy", "none", "-progressive")
    header, scans, tail = split_scans(jpeg)
    assert tail == b""
    assert header + b"".join(scans) + EOI == jpeg
    for k in range(1, len(scans) + 1):
        cut = jpeg[: len(header) + sum(map(len, scans[:k]))] + EOI
        assert join_scans(header, scans[:k]) == cut
        djpeg(cut)


def test_a_joined_file_keeps_metadata_and_trailing_bytes(djpeg):
    """At full fidelity the file is as the user made it, thumbnail and appended data included."""
    comment = b"\xff\xfe\x00\x07hello"
    jpeg = (
        PROGRESSIVE[:DQT_AT]
        + APP1_WITH_THUMBNAIL
        + comment
        + PROGRESSIVE[DQT_AT:]
        + b"trailing \xff\xd9 bytes"
    )
    header, scans, tail = split_scans(jpeg)
    assert header + b"".join(scans) + EOI == PROGRESSIVE
    assert tail == APP1_WITH_THUMBNAIL + comment + EOI + b"trailing \xff\xd9 bytes"
    assert join_scans(header, scans, tail) == jpeg
    assert djpeg(join_scans(header, scans)) == djpeg(PROGRESSIVE)


def test_fill_bytes_between_segments_are_allowed(djpeg):
    """Fill bytes before a marker (T.81 B.1.1.2) change nothing."""
    jpeg = (
        PROGRESSIVE[:DQT_AT]
        + b"\xff\xff\xff"
        + PROGRESSIVE[DQT_AT:SOS_AT]
        + b"\xff"
        + PROGRESSIVE[SOS_AT:-2]
        + b"\xff\xff\xd9"
    )
    assert djpeg(join_scans(*split_scans(jpeg))) == djpeg(PROGRESSIVE)


@pytest.mark.parametrize("fields", [b"\0\0\0", b"\0\x3f\x10", b"\1\x05\0"])
def test_fields_that_mean_nothing_are_filled_in(fields):
    """Some cameras write zeros in baseline scan headers, where the values have no meaning."""
    at = JPEG.index(b"\xff\xda") + 5 + 2 * 3
    jpeg = patched(JPEG, at, fields)
    assert make_baseline(jpeg) == make_baseline(JPEG)


def test_an_unfinished_progressive_file_is_refused():
    """A file that decoders would smooth is refused, because a finished copy would look
    different.
    """
    found = map_jpeg(PROGRESSIVE)
    cut = PROGRESSIVE[: found.scan_ranges[2][-1][1]] + EOI
    with pytest.raises(UnsupportedJpeg, match="unfinished"):
        check_complete(map_jpeg(cut))
    check_complete(found)


def test_hostile_tails_are_refused():
    """A tail that is not made of segments cannot be joined."""
    header, scans, _ = split_scans(PROGRESSIVE)
    with pytest.raises(CorruptJpeg, match="tail"):
        join_scans(header, scans, b"not segments")
