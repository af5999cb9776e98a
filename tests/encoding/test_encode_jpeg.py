"""One JPEG to pieces: lossless, and complete up to any scan."""

import numpy as np
import pytest
from slurm import cluster_fixture  # noqa: F401

from pcrshard import native
from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.errors import (
    CorruptJpeg,
)
from pcrshard.format.scan_script import Q95, STANDARD
from pcrshard.jpeg import pixels
from pcrshard.testing import make_jpeg

EOI = b"\xff\xd9"


@pytest.mark.parametrize("script", [STANDARD, Q95], ids=lambda script: script.name)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_the_pieces_are_the_image(mode, script):
    """Joined again, the pieces have the source's pixels; each prefix of them is an image, too."""
    jpeg = make_jpeg(3, 50, 70, mode=mode)
    image = encode_jpeg(jpeg, script)
    *groups, tail = image.pieces
    assert (image.height, image.width, len(groups)) == (50, 70, script.num_groups)
    colour = "cmyk" if mode == "CMYK" else "rgb"
    whole = b"".join(groups) + tail + EOI
    assert np.array_equal(pixels.decode(whole, colour), pixels.decode(jpeg, colour))
    for scan in range(1, script.num_groups):
        prefix = b"".join(groups[:scan]) + EOI
        assert pixels.decode(prefix, colour).shape == pixels.decode(jpeg, colour).shape


def test_what_no_decoder_needs_is_in_the_tail():
    """A comment is kept, but no scan pays for it."""
    comment = b"\xff\xfe\x00\x07hello"
    jpeg = make_jpeg()
    *groups, tail = encode_jpeg(jpeg[:2] + comment + jpeg[2:]).pieces
    assert tail == comment
    assert tuple(groups) == encode_jpeg(jpeg).pieces[:-1]


@pytest.mark.parametrize("cut", [0, 1, 2, 100, -2])
def test_a_cut_image_is_refused(cut):
    """Nothing is repaired."""
    with pytest.raises(CorruptJpeg):
        encode_jpeg(make_jpeg()[:cut])


@pytest.mark.parametrize("sampling", [0x11, 0x22, 0x21, 0x44])
def test_sampling_factors_of_one_component_mean_nothing(monkeypatch, sampling):
    """A gray image that says 2x2 is encoded to the same bytes as one that says 1x1, with the native
    core and without it.
    """
    jpeg = bytearray(make_jpeg(1, 40, 56, "L"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 11] = 0x11
    expected = encode_jpeg(bytes(jpeg)).pieces
    jpeg[frame + 11] = sampling
    assert encode_jpeg(bytes(jpeg)).pieces == expected
    monkeypatch.setattr(native, "available", False)
    assert encode_jpeg(bytes(jpeg)).pieces == expected
