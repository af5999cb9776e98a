"""The one door to pixels: lossless transcoding and decoding through libjpeg-turbo, conversion of other formats through Pillow.

PyTurboJPEG decodes. It exposes no lossless progressive transform, so ``tjTransform`` of the same library is called here.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import functools
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import turbojpeg

from .errors import CorruptJpeg, MissingDependency, UnsupportedJpeg

Pixels = npt.NDArray[np.uint8]
_FORMATS = {"rgb": turbojpeg.TJPF_RGB, "gray": turbojpeg.TJPF_GRAY, "cmyk": turbojpeg.TJPF_CMYK}
_UNSUPPORTED = ("subsampling", "Unsupported", "not supported", "not implemented", "sorry")
# Not every plugin of Pillow: some run other programs on the file.
_PILLOW_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000")
_NEEDS_PILLOW = ("Unsupported color conversion", "subsampling")


class _Strict(turbojpeg.TurboJPEG):  # type: ignore[misc]  # PyTurboJPEG is untyped
    """PyTurboJPEG that raises where it would warn, for corrupt data too."""

    def _TurboJPEG__report_error(self, handle: int) -> None:  # noqa: N802  # overrides a private method by its mangled name
        raise OSError(_library().tjGetErrorStr2(handle).decode(errors="replace"))


@functools.cache
def _turbojpeg() -> turbojpeg.TurboJPEG:
    try:
        return _Strict()
    except (RuntimeError, OSError) as error:
        raise MissingDependency(
            "libturbojpeg is not installed: `apt-get install libturbojpeg0` or `conda install libjpeg-turbo`"
        ) from error


@functools.cache
def _library() -> ctypes.CDLL:
    _turbojpeg()
    paths = turbojpeg.DEFAULT_LIB_PATHS.get("Linux", [])
    name = ctypes.util.find_library("turbojpeg") or next((path for path in paths if _loads(path)), None)
    library = ctypes.CDLL(name)
    library.tjInitTransform.restype = ctypes.c_void_p
    library.tjGetErrorStr2.restype = ctypes.c_char_p
    library.tjGetErrorStr2.argtypes = [ctypes.c_void_p]
    library.tjDestroy.argtypes = [ctypes.c_void_p]
    library.tjFree.argtypes = [ctypes.c_void_p]
    library.tjTransform.argtypes = [
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_ulong,
        ctypes.c_int,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(ctypes.c_ulong),
        ctypes.POINTER(turbojpeg.TransformStruct),
        ctypes.c_int,
    ]
    return library


def _loads(path: str) -> bool:
    try:
        ctypes.CDLL(path)
    except OSError:
        return False
    return True


def make_progressive(jpeg: bytes) -> bytes:
    """Rearrange a JPEG losslessly into libjpeg's progressive script, without metadata.

    Args:
        jpeg: A JPEG of any coding that libjpeg-turbo reads. Check its size first: see :func:`pcrshard.jpeg.map_jpeg`.

    Returns:
        A progressive, Huffman-coded JPEG with the same coefficients; no APPn but JFIF and Adobe, no restart markers.

    Raises:
        CorruptJpeg: libjpeg-turbo reports damage, even where it could go on.
        UnsupportedJpeg: It does not support the sampling factors or the coding.
    """
    return _transform(jpeg, turbojpeg.TJXOPT_PROGRESSIVE | turbojpeg.TJXOPT_COPYNONE)


def make_baseline(jpeg: bytes) -> bytes:
    """Rearrange a JPEG losslessly into a sequential one, metadata kept; see :func:`make_progressive`."""
    return _transform(jpeg, 0)


def _transform(jpeg: bytes, options: int) -> bytes:
    library = _library()
    transform = turbojpeg.TransformStruct(options=options)
    output, size = ctypes.c_void_p(), ctypes.c_ulong()
    # A handle for each image: a used one keeps the last image's Huffman tables, and a baseline transform would write by them.
    handle = library.tjInitTransform()
    args = (1, ctypes.byref(output), ctypes.byref(size), ctypes.byref(transform), turbojpeg.TJFLAG_LIMITSCANS)
    try:
        if library.tjTransform(handle, jpeg, len(jpeg), *args) == 0:
            return ctypes.string_at(output, size.value)
        message = library.tjGetErrorStr2(handle).decode(errors="replace")
    finally:
        library.tjFree(output)
        library.tjDestroy(handle)
    unsupported = any(word in message for word in _UNSUPPORTED)
    raise (UnsupportedJpeg if unsupported else CorruptJpeg)(f"libjpeg-turbo: {message}")


def decode(jpeg: bytes, mode: str = "rgb") -> Pixels:
    """Decode a JPEG, complete or at any scan.

    Args:
        jpeg: A JPEG that ends with EOI.
        mode: ``rgb``, ``gray``, or ``cmyk`` (for CMYK and YCCK sources only).

    Returns:
        (H, W, 3), (H, W, 1) or (H, W, 4) uint8. The accurate inverse DCT and fancy upsampling; libjpeg smooths
        between blocks of an unfinished progressive image. CMYK sources become RGB or gray as in Pillow.

    Raises:
        CorruptJpeg: It cannot be decoded.
    """
    try:
        return np.asarray(_turbojpeg().decode(jpeg, pixel_format=_FORMATS[mode]))
    except OSError as error:
        if mode != "cmyk" and any(word in str(error) for word in _NEEDS_PILLOW):
            return _decode_by_pillow(jpeg, mode)
        raise CorruptJpeg(f"libjpeg-turbo: {error}") from error


def _decode_by_pillow(jpeg: bytes, mode: str) -> Pixels:
    """Decode what the TurboJPEG interface does not: CMYK to RGB, rare sampling factors."""
    with _open_image(jpeg) as picture:
        pixels = np.array(picture.convert("L" if mode == "gray" else "RGB"))
    return pixels[..., None] if pixels.ndim == 2 else pixels


@contextlib.contextmanager
def _open_image(image: bytes) -> Iterator[Any]:
    """Read an image with Pillow; its errors become :class:`CorruptJpeg`."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependency("Pillow is not installed: pip install 'pcrshard[train]'") from error
    try:
        with Image.open(io.BytesIO(image), formats=_PILLOW_FORMATS) as picture:
            picture.load()
            yield picture
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise CorruptJpeg(f"Pillow: {error}") from error


def compress(pixels: Pixels, quality: int) -> bytes:
    """Compress (H, W, 3) uint8 RGB to a baseline 4:2:0 JPEG."""
    sampling = turbojpeg.TJSAMP_420
    return bytes(_turbojpeg().encode(pixels, quality=quality, pixel_format=turbojpeg.TJPF_RGB, jpeg_subsample=sampling))


def system() -> dict[str, str]:
    """The decoders of this machine, for ``pcrshard info --system``."""
    return {"decoder": "libjpeg-turbo through PyTurboJPEG", "libturbojpeg": str(_library()._name), "numpy": np.__version__}


def to_jpeg(image: bytes, quality: int | None, resize_short: int | None) -> bytes:
    """Convert any image that Pillow reads to JPEG; lossy.

    Args:
        image: JPEG, PNG, WebP, BMP, ... as bytes; its EXIF and ICC profile are kept.
        quality: JPEG quality 1-100; ``None`` keeps that of a JPEG source, 90 for others.
        resize_short: If given, the shorter side in pixels of a larger image after an antialiased resize.

    Raises:
        CorruptJpeg: Pillow cannot read it.
    """
    with _open_image(image) as picture:
        return _save_jpeg(picture, quality, resize_short)


def _save_jpeg(picture: Any, quality: int | None, resize_short: int | None) -> bytes:
    from PIL import Image

    extra = {name: picture.info[name] for name in ("exif", "icc_profile") if picture.info.get(name)}
    if quality is None and picture.format == "JPEG":
        extra |= {"qtables": picture.quantization, "subsampling": "keep"} if resize_short is None else {}
        extra["qtables"] = picture.quantization
    else:
        extra["quality"] = quality or 90
    if picture.mode.startswith("I"):
        # Pillow would clip 16 bits to 8 instead of scaling them.
        picture = Image.fromarray((np.asarray(picture).astype(np.uint32) >> 8).astype(np.uint8))
    elif picture.mode not in ("L", "RGB", "CMYK"):
        picture = picture.convert("L" if picture.mode in ("1", "LA") else "RGB")
    if resize_short is not None and min(picture.size) > resize_short:
        scale = resize_short / min(picture.size)
        size = tuple(max(resize_short, round(side * scale)) for side in picture.size)
        picture = picture.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
    out = io.BytesIO()
    picture.save(out, "JPEG", **extra)
    return out.getvalue()
