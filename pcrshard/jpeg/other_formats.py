"""All uses of Pillow: other image formats, rare JPEGs, and resizing whole images."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, JpegImagePlugin, UnidentifiedImageError

from ..errors import CorruptJpeg, PCRError, UnsupportedJpeg
from ..native import Box, Size
from .color_profiles import to_srgb
from .limits import check_cost, check_pixels
from .markers import SOI, map_jpeg, other_format

Pixels = NDArray[np.uint8]
# Not all of Pillow's plugins: some run other programs on the file.
_PILLOW_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF")
# Bytes allocated per pixel: Pillow's pixels and a copy in another mode, for 16 bits or by OpenJPEG;
# of a JPEG also its coefficients.
_PILLOW_PIXEL_BYTES = 16
_MODES = {"rgb": "RGB", "gray": "L", "cmyk": "CMYK"}


def crop_and_resize(
    pixels: Pixels,
    crop: Box | None,
    size: Size | None,
) -> Pixels:
    """Crop an image, (H, W, C) uint8, and resize it by antialiased bilinear interpolation."""
    rows, columns, channels = pixels.shape
    y, x, height, width = crop or (0, 0, rows, columns)
    bottom = y + height
    right = x + width
    if not (0 <= y < bottom <= rows and 0 <= x < right <= columns):
        raise ValueError(f"expected a crop within {(rows, columns)}, got {crop}")
    if size is None:
        return pixels[y:bottom, x:right]

    box = (x, y, right, bottom)
    resized = to_picture(pixels).resize(size[::-1], Image.Resampling.BILINEAR, box=box)
    return np.array(resized).reshape(*size, channels)


def decode(image: bytes, color: str = "rgb", *, upright: bool = False) -> Pixels:
    """Decode an image by Pillow; the reference decoder of JPEGs, whose libjpeg-turbo it contains.

    Use :func:`pcrshard.decode_image` for speed.

    Args:
        image: An image of any format; a JPEG ends with EOI.
        color: ``rgb``, ``gray``, ``srgb`` (converted by the ICC profile), or ``cmyk`` (for CMYK
            and YCCK sources only).
        upright: Apply the EXIF orientation.

    Returns: (H, W, 3), (H, W, 1) or (H, W, 4) uint8; of a JPEG by the accurate inverse DCT and
        fancy upsampling, and smoothed between blocks if it is progressive and incomplete.

    Raises:
        CorruptJpeg: It cannot be decoded.
        UnsupportedJpeg: It would take too much memory or time for its size.
    """
    if not other_format(image):
        check_cost(map_jpeg(image), len(image))
    with _open_image(image) as picture:
        if color == "gray":
            picture.draft("L", picture.size)  # for a JPEG, its stored luma
        picture.load()
        if upright:
            with suppress(Exception):  # malformed EXIF is as good as none
                ImageOps.exif_transpose(picture, in_place=True)
        plain = _to_8_bits(picture)
        if color == "srgb":
            pixels = np.array(to_srgb(plain, picture.info.get("icc_profile") or b""))
        else:
            pixels = np.array(plain.convert(_MODES[color]))
    return pixels.reshape(*pixels.shape[:2], -1)


@contextmanager
def _open_image(image: bytes) -> Iterator[Any]:
    """Open an image with Pillow, whose errors become :class:`CorruptJpeg`."""
    try:
        with Image.open(io.BytesIO(image), formats=_PILLOW_FORMATS) as picture:
            width, height = picture.size
            check_pixels(height, width, len(image), height * width * _PILLOW_PIXEL_BYTES)
            yield picture
    except (PCRError, MemoryError):
        raise
    except UnidentifiedImageError as error:  # its message has an address in memory
        kind = other_format(image) or ("JPEG" if image[:2] == SOI else "unknown")
        raise CorruptJpeg(f"Pillow cannot decode this {kind} file") from error
    except Exception as error:
        # Plugins raise arbitrary errors on damaged bytes: TypeError, KeyError, struct.error...
        raise CorruptJpeg(f"Pillow: {error or type(error).__name__}") from error


def decode_indexed(image: bytes) -> Pixels:
    """Decode an image whose values are numbers: palette indexes stay as they are.

    Returns: (H, W) integers of the file's depth, or (H, W, channels) uint8.

    Raises:
        CorruptJpeg, UnsupportedJpeg: As for :func:`decode`.
    """
    with _open_image(image) as picture:
        if picture.mode == "1":
            return np.asarray(picture, np.uint8)
        return np.array(picture)


def compress(pixels: Pixels, quality: int) -> bytes:
    """Compress (H, W, 3) uint8 RGB to a baseline 4:2:0 JPEG."""
    out = io.BytesIO()
    to_picture(pixels).save(out, "JPEG", quality=quality)
    return out.getvalue()


def to_picture(pixels: Pixels) -> Any:
    """Return a Pillow image of (H, W, 3) or (H, W, 1) uint8."""
    plane = pixels.squeeze(axis=2) if pixels.shape[2] == 1 else pixels
    return Image.fromarray(np.ascontiguousarray(plane))


def to_jpeg(
    image: bytes,
    quality: int | None,
    resize_short: int | None,
) -> bytes:
    """Convert any image that Pillow reads to JPEG; lossy.

    Args:
        image: JPEG, PNG, WebP, BMP, ... as bytes; its EXIF and ICC profile are kept.
        quality: JPEG quality 1-100; ``None`` keeps that of a JPEG source, 90 for others.
        resize_short: Shorter side in pixels to which larger images are resized, with antialiasing;
            ``None`` keeps the size.

    Raises:
        CorruptJpeg: Pillow cannot read the image.
        UnsupportedJpeg: The image would take too much memory for its size.
    """
    out = io.BytesIO()
    with _open_image(image) as picture:
        picture.load()
        options = {name: picture.info.get(name) or b"" for name in ("exif", "icc_profile")}
        if quality is None and picture.format in ("JPEG", "MPO"):
            options["qtables"] = picture.quantization
            options["subsampling"] = JpegImagePlugin.get_sampling(picture)
        else:
            options["quality"] = quality or 90
        result = _to_8_bits(picture)
        if resize_short is not None and min(result.size) > resize_short:
            scale = resize_short / min(result.size)
            size = tuple(max(resize_short, round(side * scale)) for side in result.size)
            result = result.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
        result.save(out, "JPEG", **options)
    return out.getvalue()


def _to_8_bits(picture: Any) -> Any:
    """Convert to a mode that JPEG supports; 16 bits are scaled."""
    mode = picture.mode
    if mode == "F" or (mode == "I" and picture.format not in ("PNG", "PPM")):
        raise UnsupportedJpeg(
            f"expected 8 or 16 bits per channel, got 32 bits (mode {mode}), whose white is unknown"
        )
    if mode.startswith("I"):
        # Pillow would clip 16 bits to 8 instead of scaling them.
        return Image.fromarray((np.asarray(picture).astype(np.uint32) >> 8).astype(np.uint8))
    if mode in ("L", "RGB", "CMYK"):
        return picture
    return picture.convert("L" if mode in ("1", "LA") else "RGB")
