"""Door to the native core: progressive and baseline JPEG to pixels, and lossless rescan.

The compiled module ``pcrshard.native._core`` is optional; without it ``available`` is False and every
function raises ImportError. Nothing here reads files, and nothing is kept but one decoder per thread.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import memory

try:
    from pcrshard.native._core import ffi, lib
except ImportError:  # built without a compiler
    ffi = lib = None

__all__ = [
    "Header",
    "NativeError",
    "ScanSpec",
    "available",
    "backend",
    "decode",
    "decode_batch",
    "empty_table",
    "image_table",
    "piece_table",
    "read_header",
    "rescan",
]

available: bool = lib is not None

Backend = Literal["auto", "portable"]
Layout = Literal["hwc", "chw"]
Colour = Literal["rgb", "gray", "cmyk"]
ScanSpec = tuple[Sequence[int], int, int, int, int]
Image = npt.NDArray[np.uint8]
Table = npt.NDArray[np.void]

_COLOURS = ("gray", "ycc", "rgb", "cmyk", "ycck")
_LAYOUTS = {"hwc": 0, "chw": 1}
_OUTPUTS = {"rgb": (0, 3), "gray": (1, 1), "cmyk": (2, 4)}
_CORRUPT, _UNSUPPORTED, _MEMORY, _USAGE = 1, 2, 4, 5
_PIECE = np.dtype([("data", np.uintp), ("size", np.uintp)])
_threads = threading.local()


class NativeError(ValueError):
    """The stream cannot be decoded; ``unsupported`` marks a legal JPEG that libjpeg-turbo should get."""

    def __init__(self, message: str = "", *, unsupported: bool = False) -> None:
        super().__init__(message)
        self.unsupported = unsupported


class Header(NamedTuple):
    """What the markers before the first scan say; sampling is (horizontal, vertical) per component."""

    height: int
    width: int
    num_components: int
    sampling: tuple[tuple[int, int], ...]
    progressive: bool
    colour: str


def _decoder(choice: Backend) -> Any:
    """This thread's decoder, with its scratch memory, made at the first use."""
    if lib is None:
        message = "pcrshard.native was built without a C compiler; reinstall pcrshard where one is present"
        raise ImportError(message)
    if choice not in ("auto", "portable"):
        message = f"expected backend 'auto' or 'portable', got {choice!r}"
        raise ValueError(message)
    decoders: dict[Backend, Any] | None = getattr(_threads, "decoders", None)
    if decoders is None:
        decoders = _threads.decoders = {}
    if choice not in decoders:
        handle = lib.pcr_decoder_new(choice == "portable")
        if handle == ffi.NULL:
            raise MemoryError
        decoders[choice] = ffi.gc(handle, lib.pcr_decoder_free)
    return decoders[choice]


def _check(decoder: Any, code: int) -> None:
    if code == 0:
        return
    message = ffi.string(lib.pcr_message(decoder)).decode("utf-8", "replace")
    if code == _MEMORY:
        raise MemoryError(message)
    if code == _USAGE:
        raise ValueError(message)
    raise NativeError(message, unsupported=code == _UNSUPPORTED)


def _pieces(pieces: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The C view of the pieces, and the buffers that must outlive it."""
    if isinstance(pieces, (bytes, bytearray, memoryview)):
        pieces = [pieces]
    views = [ffi.from_buffer(piece) for piece in pieces]
    array = ffi.new("pcr_piece[]", len(views))
    for i, view in enumerate(views):
        item = array[i]
        item.data = ffi.cast("const uint8_t *", view)
        item.size = len(view)
    return array, views


def backend(choice: Backend = "auto") -> str:
    """Which code runs on this machine, such as ``native (avx2)`` or ``native (portable)``."""
    name: str = ffi.string(lib.pcr_decoder_backend(_decoder(choice))).decode()
    return name


def read_header(pieces: Sequence[Any]) -> Header:
    """Reads the markers up to the first scan.

    Raises:
        NativeError: the bytes are no JPEG, or one that this core does not decode.
    """
    decoder = _decoder("auto")
    array, views = _pieces(pieces)
    header = ffi.new("pcr_header *")
    _check(decoder, lib.pcr_read_header(decoder, array, len(views), header))
    sampling = tuple((header.h[i], header.v[i]) for i in range(header.num_components))
    return Header(
        header.height,
        header.width,
        header.num_components,
        sampling,
        bool(header.progressive),
        _COLOURS[header.colour],
    )


def _shape(height: int, width: int, channels: int, layout: str, colour: str) -> tuple[int, ...]:
    if layout == "chw":
        return (channels, height, width)
    return (height, width) if colour == "gray" else (height, width, channels)


def decode(
    pieces: Sequence[Any],
    *,
    crop: tuple[int, int, int, int] | None = None,
    size: tuple[int, int] | None = None,
    layout: Layout = "hwc",
    colour: Colour = "rgb",
    out: Image | None = None,
    scale: int = 0,
    max_pixels: int = 2**28,
    backend: Backend = "auto",
) -> Image:
    """Decodes a JPEG that may end after any scan, without the GIL.

    Without ``size`` the pixels are those of libjpeg-turbo (accurate DCT, fancy upsampling, no block
    smoothing), bit for bit. With it the crop is resized by antialiased bilinear interpolation, after
    DCT-domain scaling where the crop stays at least as large as the target.

    Args:
        pieces: bytes-like objects that hold the stream, in order; no EOI is needed.
        crop: (y, x, height, width) in pixels of the full image; the resize may look past its edge.
        size: (height, width) of the result.
        layout: ``hwc`` gives (H, W, 3), ``chw`` gives (3, H, W).
        colour: ``rgb`` of 1 and 3 components, ``gray`` (the luma) of the same, as (H, W) or
            (1, H, W); ``cmyk`` of 4 components, as stored (libjpeg-turbo's TJPF_CMYK).
        out: C-contiguous uint8 array of the result's shape to decode into.
        scale: 1, 2, 4 or 8 forces DCT-domain scaling by 1/scale; 0 chooses.
        max_pixels: larger images are refused.
        backend: ``portable`` forces the plain C code.

    Raises:
        NativeError: the stream is damaged, too costly for its size, or (``unsupported``) legal but
            not for this core, such as RGB from CMYK, arithmetic coding or 12 bits.
        ValueError: a crop, size or ``out`` that does not fit.
    """
    if layout not in _LAYOUTS or colour not in _OUTPUTS or scale not in (0, 1, 2, 4, 8):
        message = (
            f"expected a known layout, colour and scale, got {layout!r}, {colour!r} and {scale!r}"
        )
        raise ValueError(message)
    decoder = _decoder(backend)
    array, views = _pieces(pieces)
    code, channels = _OUTPUTS[colour]
    request = ffi.new("pcr_request *")
    if crop is not None:
        request.crop_y, request.crop_x, request.crop_h, request.crop_w = crop
        if request.crop_h < 1 or request.crop_w < 1:
            message = f"expected a crop of at least 1x1 pixels, got {crop}"
            raise ValueError(message)
    if size is not None:
        request.out_h, request.out_w = size
        if request.out_h < 1 or request.out_w < 1:
            message = f"expected a size of at least 1x1 pixels, got {size}"
            raise ValueError(message)
    request.layout, request.colour, request.scale, request.max_pixels = (
        _LAYOUTS[layout],
        code,
        scale,
        max_pixels,
    )
    if size is None or out is None:
        dims = ffi.new("int32_t[2]")
        _check(decoder, lib.pcr_output_size(decoder, array, len(views), request, dims, dims + 1))
        height, width = dims[0], dims[1]
    else:
        height, width = size
    shape = _shape(height, width, channels, layout, colour)
    if out is None:
        out = np.empty(shape, np.uint8)
    elif (
        out.shape != shape
        or out.dtype != np.uint8
        or not out.flags.c_contiguous
        or not out.flags.writeable
    ):
        message = f"expected out to be writable C-contiguous uint8 of shape {shape}, got {out.dtype} of {out.shape}"
        raise ValueError(message)
    _check(
        decoder,
        lib.pcr_decode(
            decoder, array, len(views), request, ffi.from_buffer("uint8_t[]", out), out.size
        ),
    )
    return out


def piece_table(
    buffer: memoryview, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.uint32]
) -> Table:
    """Where the pieces of many streams are in one buffer, which must outlive the table.

    Args:
        buffer: Holds the pieces.
        starts: (streams, pieces) int64, in the buffer.
        sizes: (streams, pieces) uint32, in bytes.

    Returns:
        (streams, pieces) of address and size.

    Raises:
        ValueError: a piece is not in the buffer.
    """
    if starts.size and (starts.min() < 0 or (starts + sizes).max() > len(buffer)):
        message = f"expected pieces within {len(buffer)} bytes"
        raise ValueError(message)
    table = empty_table(*starts.shape)
    table["data"] = starts + int(ffi.cast("uintptr_t", ffi.from_buffer(buffer)))
    table["size"] = sizes
    return table


def empty_table(streams: int, pieces: int) -> Table:
    """A table of empty pieces, (streams, pieces), to put others in."""
    return np.zeros((streams, pieces), _PIECE)


def image_table(images: Sequence[bytes | None], sizes: Sequence[int] | npt.NDArray[Any]) -> Table:
    """Where whole images are in memory; they must outlive the table.

    Args:
        images: JPEGs; ``None`` for an empty entry.
        sizes: Bytes of each that count; what follows, such as EOI, is left out.

    Returns:
        (images, 1) of address and size.
    """
    table = empty_table(len(images), 1)
    for row, image in enumerate(images):
        if image is not None:
            table[row] = (int(ffi.cast("uintptr_t", ffi.from_buffer(image))), sizes[row])
    return table


def decode_batch(
    table: Table,
    out: Image,
    *,
    crops: npt.NDArray[np.int32] | None = None,
    layout: Layout = "hwc",
    colour: Colour = "rgb",
    backend: Backend = "auto",
) -> npt.NDArray[np.bool_]:
    """:func:`decode` of many streams, in one call without the GIL.

    Args:
        table: (N, pieces) of :func:`piece_table`; what is behind it must be alive.
        out: (N, H, W, 3) or (N, 3, H, W) uint8, C-contiguous; one channel for ``gray``.
        crops: (N, 4) int32, (y, x, height, width) of each.
        layout: Of ``out``.
        colour: As for :func:`decode`.
        backend: ``portable`` forces the plain C code.

    Returns:
        (N,) bool: which were decoded; :func:`decode` says what the others lack.

    Raises:
        ValueError: the shapes do not fit together.
    """
    code, channels = _OUTPUTS[colour]
    height, width = out.shape[1:3] if layout == "hwc" else out.shape[2:4]
    shape = (
        (len(table), height, width, channels)
        if layout == "hwc"
        else (len(table), channels, height, width)
    )
    if (
        out.shape != shape
        or out.dtype != np.uint8
        or not out.flags.c_contiguous
        or not out.flags.writeable
    ):
        message = f"expected out to be writable C-contiguous uint8 of shape {shape}, got {out.dtype} of {out.shape}"
        raise ValueError(message)
    if crops is not None and (crops.shape != (len(table), 4) or crops.dtype != np.int32):
        message = f"expected {len(table)} crops of 4 int32, got {crops.dtype} of {crops.shape}"
        raise ValueError(message)
    pieces, codes = np.ascontiguousarray(table), np.empty(len(table), np.int32)
    boxes = ffi.NULL if crops is None else ffi.from_buffer("int32_t[]", np.ascontiguousarray(crops))
    request = ffi.new(
        "pcr_request *",
        {"out_h": height, "out_w": width, "layout": _LAYOUTS[layout], "colour": code},
    )
    target, results = ffi.from_buffer("uint8_t[]", out), ffi.from_buffer("int32_t[]", codes)
    size = height * width * channels
    decoder = _decoder(backend)
    lib.pcr_decode_batch(
        decoder, _address(pieces), table.shape[1], len(table), boxes, request, target, size, results
    )
    decoded: npt.NDArray[np.bool_] = codes == 0
    return decoded


def _address(table: Table) -> Any:
    return ffi.cast("const pcr_piece *", table.ctypes.data)


def rescan(jpeg: bytes, script: Sequence[ScanSpec]) -> bytes:
    """Transcodes losslessly to progressive with the given scans; metadata but JFIF and Adobe is dropped.

    Args:
        jpeg: a whole JPEG that this core decodes.
        script: per scan (component indexes, Ss, Se, Ah, Al) as in T.81 B.2.3.

    Raises:
        NativeError: the stream cannot be decoded.
        ValueError: the script does not fit the image or breaks the rules of T.81 G.1.1.1.
    """
    decoder = _decoder("auto")
    array, views = _pieces([jpeg])
    scans = ffi.new("pcr_scan_spec[]", len(script))
    for scan, (components, ss, se, ah, al) in zip(scans, script, strict=True):
        if not 1 <= len(components) <= 4:
            message = f"expected 1 to 4 components in a scan, got {components!r}"
            raise ValueError(message)
        scan.num_components = len(components)
        for i, component in enumerate(components):
            scan.component[i] = component
        scan.ss, scan.se, scan.ah, scan.al = ss, se, ah, al
    data, length = ffi.new("const uint8_t **"), ffi.new("size_t *")
    _check(decoder, lib.pcr_rescan(decoder, array, len(views), scans, len(script), data, length))
    result: bytes = ffi.buffer(data[0], length[0])[:]
    return result
