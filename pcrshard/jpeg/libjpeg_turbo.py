"""The only import of PyTurboJPEG, whose library need not be on the machine.

The native core does almost everything. What is left to libjpeg-turbo is arithmetic coding, and
pixels of unfinished or rare images as libjpeg shows them.
"""

from __future__ import annotations

import ctypes
from functools import cache, cached_property

import numpy as np
import turbojpeg
from numpy.typing import NDArray

from .. import native
from ..errors import CorruptJpeg, MissingDependency, UnsupportedJpeg

Pixels = NDArray[np.uint8]

_FORMATS = {
    "rgb": turbojpeg.TJPF_RGB,
    "gray": turbojpeg.TJPF_GRAY,
    "cmyk": turbojpeg.TJPF_CMYK,
}
_UNSUPPORTED = ("subsampling", "Unsupported", "not supported", "not implemented", "sorry")
_NEEDS_PILLOW = ("Unsupported color conversion", "subsampling")
HOW_TO_INSTALL = "`apt-get install libturbojpeg0` or `conda install libjpeg-turbo`"


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
def _find() -> _TurboJPEG | None:
    try:
        return _TurboJPEG()
    except (RuntimeError, OSError):  # not found, or found and not loaded
        return None


def _library(purpose: str) -> _TurboJPEG:
    turbo = _find()
    if turbo is None:
        raise MissingDependency(
            f"{purpose} needs libturbojpeg, which is not installed: {HOW_TO_INSTALL}"
        )
    return turbo


def available() -> bool:
    """Whether the library is on this machine."""
    return _find() is not None


def library_name() -> str:
    """The library that was loaded.

    Raises:
        MissingDependency: There is none.
    """
    return str(_library("this").library._name)


def make_progressive(jpeg: bytes) -> bytes:
    """Rearrange a JPEG of any coding losslessly into libjpeg's progressive scans, no metadata.

    Raises:
        CorruptJpeg: It cannot be read.
        MissingDependency: There is no library.
        UnsupportedJpeg: The library does not support it.
    """
    turbo = _library("an arithmetic-coded JPEG")
    options = turbojpeg.TJXOPT_PROGRESSIVE | turbojpeg.TJXOPT_COPYNONE
    transform = turbojpeg.TransformStruct(options=options)
    output = ctypes.c_void_p()
    size = ctypes.c_ulong()
    # A handle for each image: a used one keeps the last image's Huffman tables.
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


def decode(jpeg: bytes, mode: str) -> Pixels | None:
    """Decode by libjpeg-turbo: accurate inverse DCT, fancy upsampling, smoothing between blocks.

    Args:
        jpeg: A JPEG that ends with EOI.
        mode: ``rgb``, ``gray``, or ``cmyk`` (for CMYK and YCCK sources only).

    Returns:
        (H, W, C) uint8; ``None`` for sampling factors that the library leaves to others.

    Raises:
        CorruptJpeg: It cannot be decoded.
        MissingDependency: There is no library.
    """
    turbo = _library("decoding this JPEG")
    try:
        pixels = turbo.decode(jpeg, pixel_format=_FORMATS[mode], flags=turbojpeg.TJFLAG_LIMITSCANS)
    except OSError as error:
        if any(word in str(error) for word in _NEEDS_PILLOW):
            return None
        raise CorruptJpeg(f"libjpeg-turbo: {error}") from error
    return np.asarray(pixels)


def system() -> dict[str, str]:
    """The decoders of this machine, for ``pcrshard info --system``."""
    turbo = f"not installed, needed for arithmetic coding: {HOW_TO_INSTALL}"
    return {
        "native core": native.backend(),
        "libturbojpeg": library_name() if available() else turbo,
        "numpy": np.__version__,
    }
