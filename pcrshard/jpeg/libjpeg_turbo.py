"""The only import of PyTurboJPEG, whose library may be absent.

The native core does almost everything; libjpeg-turbo handles arithmetic coding.
"""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import turbojpeg

from .. import native
from ..errors import CorruptJpeg, UnsupportedJpeg

HOW_TO_INSTALL = "`apt-get install libturbojpeg0` or `conda install libjpeg-turbo`"


@cache
def _library() -> ctypes.CDLL | None:
    """Return the library that PyTurboJPEG finds, for functions that it does not expose."""
    try:
        library = ctypes.CDLL(turbojpeg.TurboJPEG()._TurboJPEG__find_turbojpeg())
    except (RuntimeError, OSError):  # not found, or failed to load
        return None
    library.tjInitTransform.restype = ctypes.c_void_p
    library.tjGetErrorStr2.restype = ctypes.c_char_p
    return library


def is_installed() -> bool:
    """Return whether the library was found."""
    return _library() is not None


def make_huffman(jpeg: bytes) -> bytes:
    """Transcode a JPEG of any coding losslessly into one sequential scan, with its metadata.

    Raises:
        CorruptJpeg: The JPEG cannot be read.
        UnsupportedJpeg: The library is not installed, or does not know the sampling factors.
    """
    library = _library()
    if library is None:
        raise UnsupportedJpeg(
            f"an arithmetic-coded JPEG needs libturbojpeg, which is not installed: {HOW_TO_INSTALL}"
        )
    transform = turbojpeg.TransformStruct()
    output = ctypes.c_void_p()
    size = ctypes.c_ulong()
    # A new handle per image: a used one keeps the previous image's Huffman tables.
    handle = library.tjInitTransform()
    pointer = ctypes.c_void_p(handle)
    pointers = map(ctypes.byref, (output, size, transform))
    try:
        source = (jpeg, ctypes.c_ulong(len(jpeg)))
        failed = library.tjTransform(pointer, *source, 1, *pointers, turbojpeg.TJFLAG_LIMITSCANS)
        if not failed:
            return ctypes.string_at(output, size.value)
        message = library.tjGetErrorStr2(pointer).decode(errors="replace")
    finally:
        library.tjFree(output)
        library.tjDestroy(pointer)
    kind = UnsupportedJpeg if "subsampling" in message else CorruptJpeg
    raise kind(f"libjpeg-turbo: {message}")


def system() -> dict[str, str]:
    """Return the decoders on this machine, for ``pcrshard info --system``."""
    library = _library()
    missing = f"not installed, needed for arithmetic coding: {HOW_TO_INSTALL}"
    return {
        "native core": native.backend(),
        "libturbojpeg": missing if library is None else str(library._name),
        "numpy": np.__version__,
    }
