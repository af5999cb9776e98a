"""What a decode may take: a few bytes never cost gigabytes or minutes, whichever decoder runs."""

import pytest
from hostile import arithmetic, chroma_only

from pcrshard import native
from pcrshard.errors import CorruptJpeg, FormatError, UnsupportedJpeg
from pcrshard.jpeg.image_decoder import ImageDecoder
from pcrshard.jpeg.limits import check_pixels
from pcrshard.jpeg.other_formats import decode, to_jpeg
from pcrshard.jpeg.pixels import decode_image, make_baseline


@pytest.mark.parametrize(
    "use",
    [
        decode,
        make_baseline,
        lambda jpeg: decode_image(jpeg, size=32),
        lambda jpeg: decode_image(jpeg, smoothing=True),
        lambda jpeg: ImageDecoder(32, "random")(jpeg, 0),
        lambda jpeg: to_jpeg(jpeg, 90, None),
    ],
    ids=["decode", "baseline", "size", "smoothing", "decoder", "convert"],
)
def test_every_decoder_has_the_same_limits(use):
    """A few bytes that claim gigabytes are refused before any decoder takes memory for them."""
    assert decode(arithmetic(16, 16)).shape == (16, 16, 3)
    with pytest.raises(FormatError, match=r"pixels|bomb"):
        use(arithmetic(40_000, 40_000))
    with pytest.raises(CorruptJpeg):
        use(arithmetic(0, 16))


def test_the_limit_grows_with_the_file():
    """What a file may take follows from its size, so that large photographs are read."""
    check_pixels(10_000, 10_000, 3 << 20, 1 << 30)
    with pytest.raises(UnsupportedJpeg, match="112 bytes are too few"):
        decode(arithmetic(360, 360))
    assert decode(arithmetic(340, 340)).shape == (340, 340, 3)
    larger = arithmetic(1000, 1000)
    table = larger.index(b"\xff\xdb")
    comment = b"\xff\xfe\x07\xd0" + bytes(1998)
    assert decode(larger[:table] + comment + larger[table:]).shape == (1000, 1000, 3)
    with pytest.raises(UnsupportedJpeg, match="at most 536870912 bytes"):
        check_pixels(10_000, 10_000, 1 << 20, 1 << 30)


def test_scans_without_end_are_refused():
    """Hundreds of empty scans over a large image do not keep a decoder busy for minutes."""
    jpeg = arithmetic(1000, 1000).removesuffix(b"\xff\xd9")
    with pytest.raises(UnsupportedJpeg, match="scans that visit"):
        decode(jpeg + 200 * b"\xff\xda\0\x08\1\1\0\0\x3f\0\0\0" + b"\xff\xd9")


def test_a_component_that_is_not_sent_is_not_made_up():
    """A large luma of which nothing came, beside a small chroma, is refused by the core too."""
    jpeg = chroma_only(1000)
    with pytest.raises(CorruptJpeg, match="at least 1 bit per block"):
        native.decode([jpeg])
    with pytest.raises(FormatError):
        decode_image(jpeg)
