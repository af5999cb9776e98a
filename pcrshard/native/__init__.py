"""Door to the native core: progressive and baseline JPEG to pixels, and lossless rescan.

The compiled module ``pcrshard.native._core`` is optional; without it ``available`` is False and
every function raises ImportError. Nothing here reads files, and nothing is kept but one decoder per
thread and backend.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

try:
    from pcrshard.native._core import ffi, lib
except ImportError:  # built without a compiler
    ffi = lib = None

available: bool = lib is not None

Backend = Literal["auto", "portable"]
Layout = Literal["hwc", "chw"]
Color = Literal["rgb", "gray", "cmyk"]
Image = NDArray[np.uint8]
Table = NDArray[np.void]
Pieces = Sequence[Any]
Box = tuple[int, int, int, int]
Size = tuple[int, int]

_COLORS = ("gray", "ycc", "rgb", "cmyk", "ycck")
_LAYOUTS = {
    "hwc": 0,
    "chw": 1,
}
_COLOR_CODES = {
    "rgb": 0,
    "gray": 1,
    "cmyk": 2,
}
_CHANNELS = {
    "rgb": 3,
    "gray": 1,
    "cmyk": 4,
}
_SCALES = (0, 1, 2, 4, 8)
_UNSUPPORTED = 2
_OTHER_ERRORS = {
    4: MemoryError,
    5: ValueError,
}
_PIECE = np.dtype([("data", np.uintp), ("size", np.uintp)])


class NativeError(ValueError):
    """The stream cannot be decoded; ``unsupported`` marks a legal JPEG for libjpeg-turbo."""

    def __init__(self, message: str = "", *, unsupported: bool = False) -> None:
        super().__init__(message)
        self.unsupported = unsupported


class Header(NamedTuple):
    """What the markers before the first scan say; sampling is (horizontal, vertical)."""

    height: int
    width: int
    num_components: int
    sampling: tuple[tuple[int, int], ...]
    progressive: bool
    color: str


# The decoders of each thread, by backend: every thread makes its own at the first use.
_threads = threading.local()


def _decoder(choice: Backend) -> Any:
    """This thread's decoder, with its scratch memory."""
    if lib is None:
        raise ImportError(
            "pcrshard.native was built without a C compiler; "
            "reinstall pcrshard where one is present"
        )
    decoder = vars(_threads).get(choice)
    if decoder is None:
        decoder = _new_decoder(choice)
        vars(_threads)[choice] = decoder
    return decoder


def _new_decoder(choice: Backend) -> Any:
    if choice not in get_args(Backend):
        raise ValueError(f"expected backend 'auto' or 'portable', got {choice!r}")
    handle = lib.pcr_decoder_new(choice == "portable")
    if handle == ffi.NULL:
        raise MemoryError
    return ffi.gc(handle, lib.pcr_decoder_free)


class _Stream:
    """One JPEG in pieces, as the C core takes it."""

    def __init__(self, pieces: Pieces, backend: Backend = "auto") -> None:
        self.decoder = _decoder(backend)
        # The addresses in the array are good for as long as these are alive.
        self.buffers = [ffi.from_buffer("uint8_t[]", piece) for piece in pieces]
        sizes = map(len, self.buffers)
        self.pieces = ffi.new("pcr_piece[]", list(zip(self.buffers, sizes, strict=True)))

    def call(self, function: Any, *arguments: Any) -> None:
        """Call a function of the core on the stream; what it refuses is raised."""
        code = function(self.decoder, self.pieces, len(self.buffers), *arguments)
        if code:
            raise self._error(code)

    def _error(self, code: int) -> Exception:
        text = ffi.string(lib.pcr_message(self.decoder))
        message = text.decode(errors="replace")
        if code in _OTHER_ERRORS:
            return _OTHER_ERRORS[code](message)
        return NativeError(message, unsupported=code == _UNSUPPORTED)


def backend(choice: Backend = "auto") -> str:
    """Which code runs on this machine, such as ``native (avx2)`` or ``native (portable)``."""
    name: str = ffi.string(lib.pcr_decoder_backend(_decoder(choice))).decode()
    return name


def read_header(pieces: Pieces) -> Header:
    """Read the markers up to the first scan.

    Raises:
        NativeError: The bytes are no JPEG, or one that this core does not decode.
    """
    header = ffi.new("pcr_header *")
    _Stream(pieces).call(lib.pcr_read_header, header)
    sampling = tuple((header.h[i], header.v[i]) for i in range(header.num_components))
    return Header(
        header.height,
        header.width,
        header.num_components,
        sampling,
        bool(header.progressive),
        _COLORS[header.color],
    )


def _make_request(
    layout: Layout,
    color: Color,
    size: Size | None,
    crop: Box | None = None,
    scale: int = 0,
    max_pixels: int = 0,
    smoothing: bool = False,
) -> Any:
    """What to decode; a number that is 0 is left to the core."""
    if layout not in _LAYOUTS or color not in _CHANNELS or scale not in _SCALES:
        raise ValueError(
            f"expected a known layout, color and scale, got {layout!r}, {color!r} and {scale!r}"
        )
    request = ffi.new(
        "pcr_request *",
        {
            "scale": scale,
            "max_pixels": max_pixels,
            "smooth": smoothing,
        },
    )
    request.layout = _LAYOUTS[layout]
    request.color = _COLOR_CODES[color]

    if crop is not None:
        request.crop_y, request.crop_x, request.crop_h, request.crop_w = crop
        _check_area("crop", *crop[2:])
    if size is not None:
        request.out_h, request.out_w = size
        _check_area("size", *size)
    return request


def _check_area(
    name: str,
    height: int,
    width: int,
) -> None:
    # The core takes 0x0 for "not asked for".
    if height < 1 or width < 1:
        raise ValueError(f"expected a {name} of at least 1x1 pixels, got {height}x{width}")


def _shape(
    layout: Layout,
    size: tuple[int, ...],
    color: Color,
) -> tuple[int, ...]:
    channels = _CHANNELS[color]
    return (channels, *size) if layout == "chw" else (*size, channels)


def _target(out: Image, shape: tuple[int, ...]) -> Any:
    """The memory of ``out``, once it is sure that the core may write to all of it."""
    flags = out.flags
    writable = flags.c_contiguous and flags.writeable
    if out.shape != shape or out.dtype != np.uint8 or not writable:
        raise ValueError(
            f"expected out to be writable C-contiguous uint8 of shape {shape}, "
            f"got {out.dtype} of {out.shape}"
        )
    return ffi.from_buffer("uint8_t[]", out)


def decode(
    pieces: Pieces,
    *,
    crop: Box | None = None,
    size: Size | None = None,
    layout: Layout = "hwc",
    color: Color = "rgb",
    out: Image | None = None,
    scale: int = 0,
    max_pixels: int = 2**28,
    smoothing: bool = False,
    backend: Backend = "auto",
) -> Image:
    """Decode a JPEG that may end after any scan, without holding the GIL.

    Without ``size`` the pixels are those of libjpeg-turbo (accurate DCT, fancy upsampling), bit for
    bit. With it the crop is resized by antialiased bilinear interpolation,
    after DCT-domain scaling where the crop stays at least as large as the target.

    Args:
        pieces: Bytes-like objects that hold the stream, in order; no EOI is needed.
        crop: (y, x, height, width) in pixels of the full image; the resize may look past its edge.
        size: (height, width) of the result.
        layout: ``hwc`` gives (H, W, 3), ``chw`` gives (3, H, W).
        color: ``rgb`` of 1 and 3 components, ``gray`` (the luma) of the same, as (H, W) or
            (1, H, W); ``cmyk`` of 4 components, as stored (libjpeg-turbo's TJPF_CMYK).
        out: C-contiguous uint8 array of the result's shape to decode into.
        scale: 1, 2, 4 or 8 forces DCT-domain scaling by 1/scale; with 0 the core chooses.
        max_pixels: Larger images are refused.
        smoothing: Smooth between the blocks of an unfinished image, as libjpeg-turbo does by
            default (since 3.0.1: earlier ones differ at the upper and lower edges).
        backend: ``portable`` forces the plain C code.

    Raises:
        NativeError: The stream is damaged, too expensive for its size, or (``unsupported``) legal
            but not for this core, such as RGB from CMYK, arithmetic coding or 12 bits.
        ValueError: A crop, size or ``out`` does not fit.
    """
    request = _make_request(layout, color, size, crop, scale, max_pixels, smoothing)
    stream = _Stream(pieces, backend)

    if size is None or out is None:
        size = _output_size(stream, request)
    shape = size if (layout, color) == ("hwc", "gray") else _shape(layout, size, color)
    if out is None:
        out = np.empty(shape, np.uint8)
    stream.call(lib.pcr_decode, request, _target(out, shape), out.size)
    return out


def _output_size(stream: _Stream, request: Any) -> Size:
    """(height, width) of the result.

    Before memory is taken, the core compares the size claimed with the bytes that are there.
    """
    size = ffi.new("int32_t[2]")
    stream.call(lib.pcr_output_size, request, size, size + 1)
    return size[0], size[1]


def empty_table(streams: int, pieces: int) -> Table:
    """A table of empty pieces, (streams, pieces), to put others in."""
    return np.zeros((streams, pieces), _PIECE)


def image_table(images: Sequence[bytes | None], sizes: Sequence[int] | NDArray[Any]) -> Table:
    """Where whole images are in memory; they must outlive the table.

    Args:
        images: JPEGs; ``None`` for an empty entry.
        sizes: Bytes of each that count; what follows, such as EOI, is left out.

    Returns:
        (images, 1) of address and size.
    """
    there = [row for row, image in enumerate(images) if image is not None]
    table = empty_table(len(images), 1)
    table["data"][there, 0] = [_address_of(images[row]) for row in there]
    table["size"][there, 0] = np.asarray(sizes)[there]
    return table


def _address_of(data: Any) -> int:
    return int(ffi.cast("uintptr_t", ffi.from_buffer(data)))


def _address(table: Table) -> Any:
    return ffi.cast("const pcr_piece *", table.ctypes.data)


def rescan(
    jpeg: bytes,
    script: Sequence[tuple[Sequence[int], int, int, int, int]],
    backend: Backend = "auto",
) -> bytes:
    """Transcode losslessly to the given progressive scans; of metadata, keep only JFIF and Adobe.

    Args:
        jpeg: A whole JPEG that this core decodes.
        script: For each scan (component indexes, Ss, Se, Ah, Al) as in T.81 B.2.3.
        backend: ``portable`` forces the plain C code.

    Raises:
        NativeError: The stream cannot be decoded.
        ValueError: The script does not fit the image or breaks the rules of T.81 G.1.1.1.
    """
    for components, *_ in script:
        if not 1 <= len(components) <= 4:
            raise ValueError(f"expected 1 to 4 components in a scan, got {components!r}")
    scans = ffi.new("pcr_scan_spec[]", [(len(scan[0]), *scan) for scan in script])
    data = ffi.new("const uint8_t **")
    length = ffi.new("size_t *")
    _Stream([jpeg], backend).call(lib.pcr_rescan, scans, len(script), data, length)
    result: bytes = ffi.buffer(data[0], length[0])[:]
    return result
