"""The one door to pixels: lossless transcoding and decoding, conversion of other formats.

Sources are judged and transcoded by the native core alone, so that a dataset does not depend on the
machine. Pixels are decoded by the core where it was built. libjpeg-turbo, through PyTurboJPEG,
decodes elsewhere, and whatever the core does not support. PyTurboJPEG exposes no lossless
transform, so ``tjTransform`` of the same library is called here.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from typing import Any, Literal

import numpy as np
import turbojpeg
from numpy.typing import NDArray

from .. import native
from ..errors import CorruptJpeg, MissingDependency, UnsupportedJpeg
from ..memory import Buffer
from .cost import check_cost
from .crops import Box, Size
from .markers import (
    EOI,
    SOI,
    ScanHeader,
    find_frame,
    frame_size,
    map_jpeg,
)
from .other_formats import crop_and_resize, decode_by_pillow, size_by_pillow
from .segments import is_other_format

Pixels = NDArray[np.uint8]
# Whether images are smoothed where nothing else is asked for.
SMOOTHING = False

# A JPEG, or its pieces in order.
Jpeg = bytes | Sequence[Buffer]

_BYTES = bytes | bytearray | memoryview

_FORMATS = {
    "rgb": turbojpeg.TJPF_RGB,
    "gray": turbojpeg.TJPF_GRAY,
    "cmyk": turbojpeg.TJPF_CMYK,
}
_UNSUPPORTED = ("subsampling", "Unsupported", "not supported", "not implemented", "sorry")
# Bytes that are taken for each pixel: by Pillow's picture for a resize; by PyTurboJPEG's array
# for each colour.
_PICTURE_PIXEL_BYTES = 4
_PIXEL_BYTES = {
    "rgb": 3,
    "gray": 1,
    "cmyk": 4,
}
_DHT = b"\xff\xc4"
_NEEDS_PILLOW = ("Unsupported color conversion", "subsampling")


class _TurboJPEG(turbojpeg.TurboJPEG):  # type: ignore[misc]  # PyTurboJPEG is untyped
    """PyTurboJPEG that raises where it would warn, for corrupt data too.

    Both methods use private methods of the base class, by their mangled names.
    """

    @cached_property
    def library(self) -> ctypes.CDLL:
        """The same library, for what PyTurboJPEG does not expose."""
        library = ctypes.CDLL(self._TurboJPEG__find_turbojpeg())
        library.tjInitTransform.restype = ctypes.c_void_p
        library.tjGetErrorStr2.restype = ctypes.c_char_p
        return library

    def message(self, handle: int) -> str:
        """What went wrong in the last call with a handle."""
        text: bytes = self.library.tjGetErrorStr2(ctypes.c_void_p(handle))
        return text.decode(errors="replace")

    def _TurboJPEG__report_error(self, handle: int) -> None:  # noqa: N802
        raise OSError(self.message(handle))


@cache
def _turbojpeg() -> _TurboJPEG:
    try:
        return _TurboJPEG()
    except (RuntimeError, OSError) as error:
        raise MissingDependency(
            "libturbojpeg is not installed: "
            "`apt-get install libturbojpeg0` or `conda install libjpeg-turbo`"
        ) from error


def make_progressive(jpeg: bytes, scans: Sequence[ScanHeader]) -> bytes:
    """Rearrange a JPEG losslessly into progressive scans, without metadata.

    With the scans of libjpeg's own script these are the bytes of ``jpegtran -copy none
    -progressive``.

    Args:
        jpeg: A JPEG. Check its size first: see :func:`pcrshard.jpeg.markers.map_jpeg`.
        scans: The scans to make.

    Returns:
        A progressive, Huffman-coded JPEG with the same coefficients; no APPn but JFIF and Adobe, no
        restart markers.

    Raises:
        CorruptJpeg: The entropy-coded data is damaged, even where decoders could go on.
        UnsupportedJpeg: The coding is not supported, or the scans do not fit the image.
        MissingDependency: The native core was not built.
    """
    check_native_core()
    if find_frame(jpeg).arithmetic:
        # Only libjpeg reads it. The core judges the Huffman-coded JPEG that libjpeg makes of it.
        jpeg = _transform(jpeg, turbojpeg.TJXOPT_PROGRESSIVE | turbojpeg.TJXOPT_COPYNONE)
    try:
        return native.rescan(add_missing_tables(jpeg), scans)
    except native.NativeError as error:
        _refuse_damage(error)
        raise UnsupportedJpeg(f"native core: {error}") from error
    except ValueError as error:
        raise UnsupportedJpeg(f"the scan script does not fit this image: {error}") from error


def check_native_core() -> None:
    """Refuse to encode where the core was not built.

    libjpeg-turbo passes over damage that the core refuses, and has no script but its own: what it
    would encode depends on the machine.

    Raises:
        MissingDependency: The core was not built.
    """
    if not native.available:
        raise MissingDependency(
            "encoding needs the native core, which was not built: install a C compiler, then "
            "reinstall pcrshard, or encode on another machine (reading needs no core)"
        )


def add_missing_tables(jpeg: bytes) -> bytes:
    """A JPEG with the standard Huffman tables, where it has none at all."""
    return jpeg if _DHT in jpeg else SOI + _standard_tables() + jpeg[len(SOI) :]


@cache
def _standard_tables() -> bytes:
    """The Huffman tables of T.81 annex K.3, which frames of Motion JPEG leave out."""
    jpeg = compress(np.zeros((8, 8, 3), np.uint8), 75)
    (*tables, _), *_ = map_jpeg(jpeg).scan_ranges
    return b"".join(jpeg[start:stop] for start, stop in tables)


def _refuse_damage(error: native.NativeError) -> None:
    """Let pass what the core only does not support."""
    if not error.unsupported:
        raise CorruptJpeg(f"native core: {error}") from error


def make_baseline(jpeg: bytes) -> bytes:
    """Rearrange a JPEG losslessly into a sequential one, with its metadata."""
    return _transform(jpeg, 0)


def _transform(jpeg: bytes, options: int) -> bytes:
    # The coefficients of the source, and those of the result.
    check_cost(jpeg, 0)
    turbo = _turbojpeg()
    transform = turbojpeg.TransformStruct(options=options)
    output = ctypes.c_void_p()
    size = ctypes.c_ulong()
    # A handle for each image: a used one keeps the last image's Huffman tables, and a baseline
    # transform would write by them.
    handle = turbo.library.tjInitTransform()
    pointer = ctypes.c_void_p(handle)
    pointers = map(ctypes.byref, (output, size, transform))
    try:
        source = (jpeg, ctypes.c_ulong(len(jpeg)))
        failed = turbo.library.tjTransform(
            pointer, *source, 1, *pointers, turbojpeg.TJFLAG_LIMITSCANS
        )
        if not failed:
            return ctypes.string_at(output, size.value)
        message = turbo.message(handle)
    finally:
        turbo.library.tjFree(output)
        turbo.library.tjDestroy(pointer)
    unsupported = any(word in message for word in _UNSUPPORTED)
    raise (UnsupportedJpeg if unsupported else CorruptJpeg)(f"libjpeg-turbo: {message}")


def decode_image(
    jpeg: Jpeg,
    *,
    crop: Box | None = None,
    size: int | Size | None = None,
    layout: native.Layout = "hwc",
    colour: Literal["rgb", "gray"] = "rgb",
    smoothing: bool = SMOOTHING,
    out: Pixels | None = None,
) -> Pixels:
    """Decode a JPEG at any scan, and crop and resize it on the way.

    Images of other formats (PNG, WebP, ...), which shards keep as they are, are decoded by Pillow.
    With the native core only the crop's blocks are transformed, at 1/2, 1/4 or 1/8 of their size
    where the target allows, without holding the GIL. Without it, libjpeg-turbo decodes the whole
    image and Pillow resizes.

    Args:
        jpeg: A JPEG, or its pieces in order; EOI may be missing.
        crop: (y, x, height, width) in pixels of the full image.
        size: Side, or (height, width), of the result, by antialiased bilinear interpolation.
        layout: ``hwc`` or ``chw``.
        colour: ``rgb``, or ``gray`` for one channel.
        smoothing: Whether to smooth between the blocks of an unfinished image, as libjpeg-turbo
            does: coefficients that are not known yet are estimated from the blocks around. Without
            the native core, and for images that it does not support (CMYK, arithmetic coding), it
            is always done.
        out: C-contiguous uint8 of the result's shape to decode into, such as one row of a batch.

    Returns:
        (H, W, 3) or (3, H, W) uint8, with one channel for gray. Without crop and size the pixels of
        libjpeg-turbo's accurate inverse DCT and fancy upsampling, bit for bit.

    Raises:
        CorruptJpeg: It cannot be decoded.
        TypeError: It is a path, or something else that holds no bytes.
        UnsupportedJpeg: It would take too much memory or time for its size.
        ValueError: The crop, the size or ``out`` does not fit.
    """
    pieces = as_pieces(jpeg)
    if isinstance(size, int):
        size = (size, size)
    if is_other_format(pieces[0]):
        pixels = decode_by_pillow(b"".join(pieces), colour)
        return _arrange(crop_and_resize(pixels, crop, size), layout, out)
    if native.available:
        plane = colour == "gray" and layout == "hwc"
        try:
            pixels = native.decode(
                pieces,
                crop=crop,
                size=size,
                layout=layout,
                colour=colour,
                smoothing=smoothing,
                out=out[..., 0] if plane and out is not None else out,
            )
            return pixels[..., None] if plane else pixels
        except native.NativeError as error:
            _refuse_damage(error)

    whole = _complete(b"".join(pieces))
    pixels = _decode_and_resize(whole, colour, crop, size)
    return _arrange(pixels, layout, out)


def image_size(image: Jpeg) -> Size:
    """Height and width in pixels of what :func:`decode_image` takes, from its header.

    Raises:
        CorruptJpeg: There is none.
    """
    pieces = as_pieces(image)
    if is_other_format(pieces[0]):
        return size_by_pillow(b"".join(pieces))
    return frame_size(pieces[0])


def _decode_and_resize(
    jpeg: bytes,
    colour: str,
    crop: Box | None,
    size: Size | None,
) -> Pixels:
    """(H, W, C) pixels by libjpeg-turbo and Pillow."""
    if size:
        check_cost(jpeg, _PIXEL_BYTES[colour] + _PICTURE_PIXEL_BYTES)
    return crop_and_resize(decode(jpeg, colour), crop, size)


def as_pieces(jpeg: Any) -> list[Any]:
    """The pieces of a JPEG, of which there is one if it is whole.

    Raises:
        TypeError: These are no bytes.
    """
    if isinstance(jpeg, _BYTES):
        return [jpeg]
    pieces = list(jpeg) if isinstance(jpeg, Iterable) and not isinstance(jpeg, str) else []
    if not pieces or not all(isinstance(piece, _BYTES) for piece in pieces):
        advice = ""
        if isinstance(jpeg, str | os.PathLike):
            advice = f"; read the file first: pathlib.Path({os.fspath(jpeg)!r}).read_bytes()"
        raise TypeError(
            f"expected the bytes of a JPEG, or its pieces, got {type(jpeg).__name__}{advice}"
        )
    return pieces


def _complete(jpeg: bytes) -> bytes:
    return jpeg if jpeg.endswith(EOI) else jpeg + EOI


def _arrange(
    pixels: Pixels,
    layout: native.Layout,
    out: Pixels | None,
) -> Pixels:
    """The (H, W, C) pixels in a layout, in ``out`` if it is given."""
    if layout == "chw":
        pixels = np.ascontiguousarray(pixels.transpose(2, 0, 1))
    return pixels if out is None else _put(pixels, out)


def _put(pixels: Pixels, out: Pixels) -> Pixels:
    if out.shape != pixels.shape:
        raise ValueError(f"expected out of shape {pixels.shape}, got {out.shape}")
    out[...] = pixels
    return out


def decode(jpeg: bytes, mode: str = "rgb") -> Pixels:
    """Decode a JPEG through libjpeg-turbo, the reference; :func:`decode_image` is the fast way.

    Args:
        jpeg: A JPEG that ends with EOI.
        mode: ``rgb``, ``gray``, or ``cmyk`` (for CMYK and YCCK sources only).

    Returns:
        (H, W, 3), (H, W, 1) or (H, W, 4) uint8, by the accurate inverse DCT and fancy upsampling.
        libjpeg smooths between blocks of an unfinished progressive image. CMYK sources become RGB
        or gray as in Pillow.

    Raises:
        CorruptJpeg: It cannot be decoded.
        UnsupportedJpeg: It would take too much memory or time for its size.
    """
    check_cost(jpeg, _PIXEL_BYTES[mode])
    turbo = _turbojpeg()
    how = {
        "pixel_format": _FORMATS[mode],
        "flags": turbojpeg.TJFLAG_LIMITSCANS,
    }
    try:
        return np.asarray(turbo.decode(jpeg, **how))
    except OSError as error:
        if any(word in str(error) for word in _NEEDS_PILLOW):
            return decode_by_pillow(jpeg, mode)
        raise CorruptJpeg(f"libjpeg-turbo: {error}") from error


def compress(pixels: Pixels, quality: int) -> bytes:
    """Compress (H, W, 3) uint8 RGB to a baseline 4:2:0 JPEG."""
    return bytes(_turbojpeg().encode(pixels, quality, turbojpeg.TJPF_RGB, turbojpeg.TJSAMP_420))


def system() -> dict[str, str]:
    """The decoders of this machine, for ``pcrshard info --system``."""
    core = "not built: install a C compiler, then reinstall pcrshard"
    return {
        "native core": native.backend() if native.available else core,
        "libturbojpeg": str(_turbojpeg().library._name),
        "numpy": np.__version__,
    }
