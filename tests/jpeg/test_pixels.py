"""Pixels: lossless transcoding, decoding, conversion."""

import numpy as np
import pytest

from pcrshard.format.scan_script import STANDARD, scans_for
from pcrshard.jpeg.markers import EOI, map_jpeg
from pcrshard.jpeg.other_formats import decode
from pcrshard.jpeg.pixels import (
    make_baseline,
    make_progressive,
)
from pcrshard.testing import make_jpeg


def progressive_of(jpeg):
    found = map_jpeg(jpeg)
    scans = scans_for(STANDARD, found.color, len(found.frame.components))
    return make_progressive(jpeg, found, scans).jpeg


KINDS = [
    {},
    {"mode": "L"},
    {"mode": "CMYK"},
    {"subsampling": 0},
    {"subsampling": 1},
    {"height": 1, "width": 1},
    {"progressive": True},
]


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_progressive_is_what_jpegtran_makes(options, jpegtran, djpeg):
    """In-process transcoding gives jpegtran's bytes, and baseline again gives the same pixels."""
    jpeg = make_jpeg(2, **options)
    progressive = progressive_of(jpeg)
    assert progressive == jpegtran(jpeg, "-copy", "none", "-progressive")
    assert djpeg(progressive) == djpeg(jpeg)
    baseline = make_baseline(progressive)
    assert map_jpeg(baseline).frame.sof == 0xC0
    assert djpeg(baseline) == djpeg(jpeg)


def test_a_baseline_export_keeps_the_metadata():
    """EXIF, the profile and bytes after EOI come back, and the pixels are the same."""
    exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"
    source = make_jpeg(3, progressive=True, exif=exif, icc_profile=b"profile") + b"trailing"
    baseline = make_baseline(source)
    assert exif in baseline
    assert b"profile" in baseline
    assert baseline.endswith(EOI + b"trailing")
    assert np.array_equal(decode(baseline), decode(source))
