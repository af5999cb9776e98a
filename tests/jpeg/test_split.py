"""JPEG bytes: split, join, and what is refused."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcrshard import join_scans, split_scans
from pcrshard.errors import CorruptJpeg, FormatError, UnsupportedJpeg
from pcrshard.jpeg.markers import EOI, SOI, map_jpeg
from pcrshard.jpeg.pixels import make_baseline
from pcrshard.jpeg.split import check_complete, with_height
from pcrshard.testing import make_jpeg

JPEG = make_jpeg(1, 40, 56, quality=85)
PROGRESSIVE = make_jpeg(1, 40, 56, quality=85, progressive=True)
APP1_WITH_THUMBNAIL = b"\xff\xe1" + struct.pack(">H", 2 + len(JPEG)) + JPEG
DQT_AT = PROGRESSIVE.index(b"\xff\xdb")
SOF_AT = PROGRESSIVE.index(b"\xff\xc2")
SOS_AT = PROGRESSIVE.index(b"\xff\xda")


def patched(jpeg: bytes, at: int, new: bytes) -> bytes:
    return jpeg[:at] + new + jpeg[at + len(new) :]


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


def test_several_tables_in_one_segment_stay_together(djpeg, jpegtran):
    """Tables that one DHT segment holds for many scans come with the first of them."""
    jpeg = jpegtran(PROGRESSIVE, "-copy", "none", "-progressive")
    found = map_jpeg(jpeg)
    tables = [jpeg[a:b] for ranges in found.scan_ranges for a, b in ranges[:-1]]
    assert len(tables) > 5
    header, scans, _ = split_scans(jpeg)
    assert all(b"\xff\xc4" in scan for scan in scans[:5])
    djpeg(join_scans(header, scans[:1]))


def test_a_height_that_only_dnl_tells_is_filled_in(djpeg):
    """A scanner's JPEG with height 0 and DNL (T.81 B.2.5) decodes like one with the height in its
    header.
    """
    found = map_jpeg(PROGRESSIVE)
    first_stop = found.scan_ranges[0][-1][1]
    dnl = b"\xff\xdc\x00\x04" + struct.pack(">H", found.frame.height)
    jpeg = patched(PROGRESSIVE, SOF_AT + 5, b"\0\0")
    jpeg = jpeg[:first_stop] + dnl + jpeg[first_stop:]
    assert map_jpeg(jpeg).frame.height == found.frame.height
    assert djpeg(join_scans(*split_scans(jpeg))) == djpeg(PROGRESSIVE)
    assert with_height(jpeg, map_jpeg(jpeg)).replace(dnl, b"") == PROGRESSIVE


@pytest.mark.parametrize("fields", [b"\0\0\0", b"\0\x3f\x10", b"\1\x05\0"])
def test_fields_that_mean_nothing_are_filled_in(fields):
    """Some cameras write zeros in baseline scan headers, where the values have no meaning."""
    at = JPEG.index(b"\xff\xda") + 5 + 2 * 3
    jpeg = patched(JPEG, at, fields)
    assert make_baseline(jpeg) == make_baseline(JPEG)


@given(st.integers(0, len(PROGRESSIVE) - 1), st.integers(0, 7))
@settings(max_examples=400, deadline=None)
def test_a_flipped_bit_never_crashes_the_parser(position, bit):
    """A damaged file is split in some way or refused, never worse."""
    jpeg = bytearray(PROGRESSIVE)
    jpeg[position] ^= 1 << bit
    try:
        header, scans, tail = split_scans(bytes(jpeg))
    except FormatError:
        return
    assert join_scans(header, scans, tail)[:2] == SOI


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
