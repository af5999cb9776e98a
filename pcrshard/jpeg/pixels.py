"""The one door to pixels: lossless transcoding and decoding, conversion of other formats.

The native core does the work where it was built. libjpeg-turbo, through PyTurboJPEG, does it
elsewhere, and does whatever the core does not support. PyTurboJPEG exposes no lossless progressive
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
from .crops import Box, Size
from .markers import EOI, ScanHeader, check_cost, map_jpeg
from .other_formats import crop_and_resize, decode_by_pillow

Pixels = NDArray[np.uint8]
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

    Both backends give the bytes of ``jpegtran -copy none -progressive`` for its script.

    Args:
        jpeg: A JPEG. Check its size first: see :func:`pcrshard.jpeg.markers.map_jpeg`.
        scans: The scans to make; without the native core those of libjpeg's own script.

    Returns:
        A progressive, Huffman-coded JPEG with the same coefficients; no APPn but JFIF and Adobe, no
        restart markers.

    Raises:
        CorruptJpeg: The entropy-coded data is damaged, even where decoders could go on.
        UnsupportedJpeg: Neither backend supports the sampling factors or the coding.
    """
    if rescanned := _rescan(jpeg, scans):
        return rescanned
    progressive = _transform(jpeg, turbojpeg.TJXOPT_PROGRESSIVE | turbojpeg.TJXOPT_COPYNONE)
    if list(map_jpeg(progressive).scans) == list(scans):
        return progressive
    # What only libjpeg reads, such as arithmetic coding, is now as the core likes it.
    if rescanned := _rescan(progressive, scans):
        return rescanned
    raise UnsupportedJpeg(
        "this scan script needs the native core, for this image or on this machine; "
        "libjpeg-turbo has only its own"
    )


def _rescan(jpeg: bytes, scans: Sequence[ScanHeader]) -> bytes | None:
    """The JPEG in these scans by the native core, if it can."""
    if native.available:
        try:
            return native.rescan(jpeg, scans)
        except native.NativeError as error:
            _refuse_damage(error)
        except ValueError:
            # These scans do not fit this image, such as one with too many blocks to interleave.
            # libjpeg may know better.
            pass
    return None


def _refuse_damage(error: native.NativeError) -> None:
    """What the core only does not support is left to libjpeg-turbo."""
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
    smoothing: bool = False,
    out: Pixels | None = None,
) -> Pixels:
    """Decode a JPEG at any scan, and crop and resize it on the way.

    With the native core only the crop's blocks are transformed, at 1/2, 1/4 or 1/8 of their size
    where the target allows, without holding the GIL. Without it, libjpeg-turbo decodes the whole
    image and Pillow resizes.

    Args:
        jpeg: A JPEG, or its pieces in order; EOI may be missing.
        crop: (y, x, height, width) in pixels of the full image.
        size: Side, or (height, width), of the result, by antialiased bilinear interpolation.
        layout: ``hwc`` or ``chw``.
        colour: ``rgb``, or ``gray`` for one channel.
        smoothing: Whether to smooth between the blocks of an unfinished image as libjpeg does,
            which is slower. Without the native core, and for images that it does not support (CMYK,
            arithmetic coding), it is always done.
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
    if native.available and not smoothing:
        plane = colour == "gray" and layout == "hwc"
        try:
            pixels = native.decode(
                pieces,
                crop=crop,
                size=size,
                layout=layout,
                colour=colour,
                out=out[..., 0] if plane and out is not None else out,
            )
            return pixels[..., None] if plane else pixels
        except native.NativeError as error:
            _refuse_damage(error)

    whole = _complete(b"".join(pieces))
    pixels = _decode_and_resize(whole, colour, crop, size)
    return _arrange(pixels, layout, out)


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
