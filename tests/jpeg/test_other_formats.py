"""Other formats become JPEGs as Pillow reads them, or are refused by name."""

import numpy as np
import pytest
from PIL import Image
from support import saved

from pcrshard.errors import CorruptJpeg, UnsupportedJpeg
from pcrshard.jpeg.markers import map_jpeg
from pcrshard.jpeg.other_formats import compress, to_jpeg
from pcrshard.jpeg.pixels import decode_image
from pcrshard.testing import make_jpeg, make_pixels


@pytest.mark.parametrize(
    ("fmt", "mode"),
    [
        ("PNG", "RGBA"),
        ("PNG", "P"),
        ("PNG", "I;16"),
        ("WEBP", "RGB"),
        ("BMP", "L"),
        ("GIF", "P"),
        ("AVIF", "RGB"),
    ],
)
def test_other_formats_convert(fmt, mode):
    """Each common format becomes a JPEG of its size, and can be decoded as it is."""
    pixels = make_pixels(1, 20, 30)
    if mode == "I;16":
        picture = Image.fromarray(pixels[..., 0].astype(np.uint16) * 256)
    else:
        picture = Image.fromarray(pixels).convert(mode)
    data = saved(picture, fmt)
    frame = map_jpeg(to_jpeg(data, 90, None)).frame
    assert (frame.height, frame.width) == (20, 30)
    assert decode_image(data).shape == (20, 30, 3)
    with pytest.raises(CorruptJpeg, match="Pillow"):
        to_jpeg(data[:20], 90, None)


def test_a_format_that_pillow_does_not_know_is_named():
    """A photograph of a telephone that was kept as it is says why it cannot be decoded."""
    with pytest.raises(CorruptJpeg, match="Pillow cannot decode this heic file"):
        decode_image(b"\0\0\0\x18ftypheic" + bytes(99))


def test_compress_is_close_to_the_pixels():
    """The demo's crops are what they were cut from."""
    pixels = make_pixels(1, 64, 64)
    assert np.abs(decode_image(compress(pixels, 98)).astype(int) - pixels).mean() < 6


@pytest.mark.parametrize("fmt", ["PNG", "PPM", "TIFF", "JPEG2000"])
@pytest.mark.parametrize("color", ["rgb", "gray"])
def test_16_bits_are_scaled_to_8(color, fmt):
    """A kept 16-bit image decodes to its picture, not to white."""
    pixels = np.linspace(0, 65535, 600).astype(np.uint16).reshape(20, 30, 1)
    found = decode_image(saved(Image.fromarray(pixels[..., 0]), fmt), color=color)
    assert np.array_equal(found, np.broadcast_to(pixels >> 8, found.shape))


@pytest.mark.parametrize("convert", [decode_image, lambda image: to_jpeg(image, 90, None)])
@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_pixels_without_a_known_range_are_refused(kind, convert):
    """A TIFF of measurements would come out black, white or as noise."""
    picture = Image.fromarray(np.arange(600, dtype=kind).reshape(20, 30))
    with pytest.raises(UnsupportedJpeg, match="32 bits"):
        convert(saved(picture, "TIFF"))


@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_resize_short_keeps_the_sampling(subsampling):
    """The colors of a 4:4:4 source stay as fine as its luma."""
    source = make_jpeg(1, 100, 200, subsampling=subsampling)
    assert map_jpeg(to_jpeg(source, None, 50)).frame.components == map_jpeg(source).frame.components
