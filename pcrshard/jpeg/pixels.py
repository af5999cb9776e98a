"""Pixels: lossless transcoding and decoding of JPEGs, and decoding of other formats.

The native core alone validates and transcodes sources, so that a dataset does not depend on the
machine. If libjpeg-turbo is installed, it converts arithmetic coding to Huffman coding. Pillow
decodes the rest, such as rare sampling factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from .. import native
from ..errors import FormatError, UnsupportedJpeg
from ..memory import Buffer
from ..native import Box, Color, Size
from . import libjpeg_turbo
from .color_profiles import first_segments, pixels_to_srgb, profile_mode, read_profile
from .limits import check_cost
from .markers import EOI, JpegMap, ScanHeader, map_jpeg, other_format
from .other_formats import Pixels, crop_and_resize, decode
from .split import cut_tail, join_pieces

# Default of ``smoothing``.
SMOOTHING = False

# A JPEG, or its pieces in order.
Jpeg = bytes | Sequence[Buffer]

# T.81 B.2.3: maximum number of blocks in an MCU of several components.
_MAX_MCU_BLOCKS = 10
# For rooms that the core is not for.
LossWeights = native.LossWeights
Rescanned = native.Rescanned


def fit_scans(scans: Sequence[ScanHeader], found: JpegMap) -> tuple[ScanHeader, ...]:
    """Return scans of a JPEG's components, one by one where together they are too many blocks."""
    if sum(component.h * component.v for component in found.frame.components) > _MAX_MCU_BLOCKS:
        scans = [scan._replace(components=(i,)) for scan in scans for i in scan.components]
    return tuple(scans)


def make_progressive(
    jpeg: bytes,
    found: JpegMap,
    scans: Sequence[ScanHeader],
    loss: LossWeights | None = None,
) -> Rescanned:
    """Transcode a JPEG losslessly into progressive scans, without metadata.

    With the scans of libjpeg's script, the result equals that of ``jpegtran -copy none
    -progressive`` byte for byte.

    Args:
        jpeg: A JPEG.
        found: Its parts, from :func:`pcrshard.jpeg.markers.map_jpeg`.
        scans: The scans to produce, from :func:`fit_scans`.
        loss: What the loss after each scan consists of.

    Returns: A progressive, Huffman-coded JPEG with the same coefficients, and where its scans are;
        no APPn except JFIF and Adobe, no restart markers.

    Raises:
        CorruptJpeg: The entropy-coded data is damaged, even if decoders could continue.
        UnsupportedJpeg: The coding is not supported, or the scans do not fit the image.
    """
    try:
        return native.rescan(_as_huffman(jpeg, found), scans, loss=loss)
    except FormatError:
        raise
    except ValueError as error:
        raise UnsupportedJpeg(f"the scan script does not fit this image: {error}") from error


def _as_huffman(jpeg: bytes, found: JpegMap) -> bytes:
    """Return a JPEG in Huffman coding, so that no path takes one that another refuses.

    Raises:
        CorruptJpeg: It is arithmetic coded, and damaged.
        UnsupportedJpeg: It is arithmetic coded, and libjpeg-turbo is not installed, or it would
            take too much memory or time for its size.
    """
    if not found.frame.arithmetic:
        return jpeg
    check_cost(found, len(jpeg))
    return libjpeg_turbo.make_huffman(jpeg)


def arithmetic_as_huffman(pieces: Sequence[Buffer]) -> bytes | None:
    """Return an arithmetic-coded JPEG in Huffman coding; ``None`` if it is not one.

    Without libjpeg-turbo nothing is converted; Pillow decodes arithmetic coding, too.

    Args:
        pieces: An image of any format, in pieces.

    Raises:
        CorruptJpeg: It is damaged.
        UnsupportedJpeg: It would take too much memory or time for its size.
    """
    if other_format(pieces[0]) or not libjpeg_turbo.is_installed():
        return None
    whole = b"".join(pieces)
    found = map_jpeg(whole)
    return _as_huffman(whole, found) if found.frame.arithmetic else None


def make_baseline(jpeg: bytes) -> bytes:
    """Transcode a JPEG losslessly into a sequential one, with its metadata.

    Args:
        jpeg: A JPEG that the core reads, or an arithmetic-coded one.

    Returns: A baseline JPEG (extended sequential if its tables need 16 bits) with the same
        coefficients and optimal Huffman tables, without restart markers.

    Raises:
        CorruptJpeg: The JPEG is damaged.
        UnsupportedJpeg: The JPEG cannot be read here, or would take too much memory or time for its
            size.
    """
    found = map_jpeg(jpeg)
    scan = ScanHeader(tuple(range(len(found.frame.components))), 0, 63, 0, 0)
    sequential = make_progressive(jpeg, found, fit_scans([scan], found)).jpeg
    return join_pieces([sequential.removesuffix(EOI)], cut_tail(jpeg, found))


def decode_image(
    jpeg: Jpeg,
    *,
    crop: Box | None = None,
    size: int | Size | None = None,
    layout: native.PixelLayout = "hwc",
    color: Color | Literal["srgb"] = "rgb",
    upright: bool = True,
    smoothing: bool = SMOOTHING,
) -> Pixels:
    """Decode a JPEG at any scan, rotated upright, cropped and resized.

    The core transforms only the crop's blocks, at 1/2, 1/4 or 1/8 of their size if the target
    allows, and releases the GIL. Pillow decodes images of other formats (PNG, WebP, ...), which
    shards store unchanged.

    Args:
        jpeg: A JPEG, or its pieces in order; EOI may be missing.
        crop: (y, x, height, width) in pixels of the full upright picture.
        size: Side, or (height, width), of the result, by antialiased bilinear interpolation.
        layout: ``hwc`` or ``chw``.
        color: ``rgb`` as stored; ``srgb``, converted by the ICC profile, after resizing; or
            ``gray`` for one channel.
        upright: Apply the EXIF orientation, like Pillow's ``exif_transpose``; ``False`` gives the
            stored pixels.
        smoothing: Smooth between the blocks of an image at a lower scan, as libjpeg-turbo does:
            missing coefficients are estimated from the surrounding blocks. Images that Pillow
            decodes are always smoothed.

    Returns: (H, W, 3) or (3, H, W) uint8, with one channel for gray. Without crop and size the
        pixels match libjpeg-turbo's accurate inverse DCT and fancy upsampling bit for bit.

    Raises:
        CorruptJpeg: It cannot be decoded.
        TypeError: The argument is not bytes, for example a path.
        UnsupportedJpeg: The image would take too much memory for its size.
        ValueError: The crop or size is invalid.
    """
    pieces = as_pieces(jpeg)
    if isinstance(size, int | np.integer):
        size = (int(size), int(size))
    is_jpeg = not other_format(pieces[0])
    profile = read_profile(first_segments(pieces[0])) if is_jpeg and color == "srgb" else b""
    # Pillow converts gray and CMYK by their profiles.
    if is_jpeg and profile_mode(profile) in ("", "RGB"):
        try:
            pixels = native.decode(
                pieces,
                crop=crop,
                size=size,
                layout=layout,
                color="rgb" if color == "srgb" else color,
                orientation=native.AUTO if upright else native.STORED,
                smoothing=smoothing,
            )
        except UnsupportedJpeg:
            huffman = arithmetic_as_huffman(pieces)
            if huffman is not None:
                return decode_image(
                    huffman, crop=crop, size=size, layout=layout, color=color, upright=upright,
                    smoothing=smoothing,
                )  # fmt: skip
            # Pillow may support it.
        else:
            pixels_to_srgb(pixels, profile, layout)
            return pixels
    whole = b"".join((*pieces, EOI if is_jpeg else b""))
    pixels = crop_and_resize(decode(whole, color, upright=upright), crop, size)
    return arrange(pixels, layout)


def as_pieces(jpeg: Any) -> list[Any]:
    """Return the pieces of a JPEG; a whole JPEG is one piece.

    Raises:
        TypeError: The argument is not bytes.
    """
    pieces = [jpeg] if isinstance(jpeg, Buffer) else jpeg
    is_sequence = isinstance(pieces, Sequence) and len(pieces) > 0
    if not is_sequence or not all(isinstance(piece, Buffer) for piece in pieces):
        raise TypeError(
            "expected the bytes of a JPEG, such as pathlib.Path(name).read_bytes(), or its pieces, "
            f"got {type(jpeg).__name__}"
        )
    return list(pieces)


def arrange(pixels: Pixels, layout: native.PixelLayout) -> Pixels:
    """Return (H, W, C) pixels in a layout, contiguous."""
    return np.ascontiguousarray(pixels.transpose(2, 0, 1) if layout == "chw" else pixels)
