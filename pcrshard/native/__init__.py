"""The native core: progressive and baseline JPEG to pixels, and lossless rescan.

It does no I/O, and its only state is one decoder per thread and backend.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import CorruptJpeg, MissingDependency, UnsupportedJpeg

try:
    from pcrshard.native._core import ffi, lib
except ImportError as missing:
    raise MissingDependency(
        "the native core of pcrshard is not built: install a wheel, or a C compiler (Debian: "
        "`apt-get install gcc python3-dev`) and then reinstall pcrshard"
    ) from missing

Backend = Literal["auto", "portable"]
PixelLayout = Literal["hwc", "chw"]
Color = Literal["rgb", "gray"]
Image = NDArray[np.uint8]
Pieces = Sequence[Any]
Box = tuple[int, int, int, int]
Size = tuple[int, int]

_LAYOUTS = ("hwc", "chw")
_CHANNELS = {"rgb": 3, "gray": 1}  # indexed by the core's codes
# By the core's codes; others mean a damaged stream, or one too expensive for its size.
_ERRORS: dict[int, type[Exception]] = {2: UnsupportedJpeg, 4: MemoryError, 5: ValueError}
# Orientation of a request: from the stream's EXIF, or the stored pixels.
AUTO = 0
STORED = 1
_MAX_INT = 2**31 - 1
_PLACE = np.dtype([("start", np.uintp), ("data", np.uintp), ("loss", np.float64)])


# The decoders of each thread, by backend, created at first use.
_threads = threading.local()


def _decoder(choice: Backend) -> Any:
    """Return this thread's decoder, with its scratch memory."""
    decoder = vars(_threads).get(choice)
    if decoder is None:
        handle = lib.pcr_decoder_new(choice == "portable")
        if handle == ffi.NULL:
            raise MemoryError
        decoder = vars(_threads)[choice] = ffi.gc(handle, lib.pcr_decoder_free)
    return decoder


def _caller(pieces: Pieces, backend: Backend) -> Callable[..., None]:
    """Return what calls functions of the core on a JPEG in pieces, and raises their errors."""
    decoder = _decoder(backend)
    # Keeps the memory behind the array's addresses alive.
    buffers = [ffi.from_buffer("uint8_t[]", piece) for piece in pieces]
    stream = ffi.new("pcr_piece[]", [(each, len(each)) for each in buffers])

    def call(function: Any, *arguments: Any) -> None:
        code = function(decoder, stream, len(buffers), *arguments)
        if code:
            message = ffi.string(lib.pcr_message(decoder)).decode(errors="replace")
            raise _ERRORS.get(code, CorruptJpeg)(f"native core: {message}")

    return call


def backend(choice: Backend = "auto") -> str:
    """Return the code selected for this machine: for example ``native (avx2)``."""
    return str(ffi.string(lib.pcr_decoder_backend(_decoder(choice))).decode())


def scan_end(jpeg: bytes, start: int) -> int:
    """Return the end of the entropy-coded data from ``start``, without fill bytes.

    If no marker ends the data, return the length of the JPEG.
    """
    return int(lib.pcr_scan_end(jpeg, len(jpeg), start))


def find_orientation(payloads: Iterable[bytes]) -> int:
    r"""Return the orientation 1-8 that APP1 segments give a picture, 0 if none.

    EXIF, which may go on in further segments, counts before XMP, of which the last packet counts:
    as for Pillow's ``exif_transpose``.

    Args:
        payloads: The payloads of the APP1 segments before the first scan, in order.

    >>> find_orientation([b"http://ns.adobe.com/xap/1.0/\0 tiff:Orientation='6'"])
    0
    """
    exif = b""
    xmp = 0
    for payload in payloads:
        if payload.startswith(b"Exif\0\0"):
            exif += payload[6:] if exif else payload
        found = lib.pcr_xmp_orientation(payload, len(payload))
        xmp = found if found >= 0 else xmp
    found = lib.pcr_exif_orientation(exif, len(exif))
    return int(found if found >= 0 else xmp)


def make_request(
    layout: PixelLayout,
    color: Color,
    size: Size | None = None,
    crop: Box | None = None,
    *,
    orientation: int = STORED,
    scale: int = 0,
    smoothing: bool = False,
) -> Any:
    """Return a decode request; see :func:`decode`. The core chooses values that are 0."""
    if layout not in _LAYOUTS or color not in _CHANNELS or scale not in (0, 1, 2, 4, 8):
        raise ValueError(
            f"expected a known layout, color and scale, got {layout!r}, {color!r} and {scale!r}"
        )
    for name, area in (("crop", crop and crop[2:]), ("size", size)):
        # To the core, 0x0 means "not requested".
        if area is not None and min(area) < 1:
            raise ValueError(f"expected a {name} of at least 1x1 pixels, got {area[0]}x{area[1]}")
    y, x, height, width = box = crop or (0, 0, 0, 0)
    out_height, out_width = size or (0, 0)
    if max(map(abs, (*box, out_height, out_width))) > _MAX_INT:
        raise ValueError(f"expected a crop and a size below 2**31, got {crop} and {size}")
    return ffi.new(
        "pcr_request *",
        {
            "crop_y": y,
            "crop_x": x,
            "crop_h": height,
            "crop_w": width,
            "out_h": out_height,
            "out_w": out_width,
            "layout": _LAYOUTS.index(layout),
            "color": list(_CHANNELS).index(color),
            "orientation": orientation,
            "scale": scale,
            "smooth": smoothing,
        },
    )


def image_shape(layout: PixelLayout, size: Size, color: Color) -> tuple[int, ...]:
    """Return the shape of an image of a size: (C, H, W) or (H, W, C)."""
    channels = _CHANNELS[color]
    return (channels, *size) if layout == "chw" else (*size, channels)


def decode(
    pieces: Pieces,
    *,
    crop: Box | None = None,
    size: Size | None = None,
    layout: PixelLayout = "hwc",
    color: Color = "rgb",
    orientation: int = STORED,
    scale: int = 0,
    smoothing: bool = False,
    backend: Backend = "auto",
) -> Image:
    """Decode a JPEG that may end after any scan, with the GIL released.

    Without ``size`` the pixels match libjpeg-turbo (accurate DCT, fancy upsampling) bit for bit.
    With it the crop is resized by antialiased bilinear interpolation, after DCT-domain scaling that
    keeps the crop at least as large as the target.

    Args:
        pieces: Bytes-like objects that make up the stream, in order; EOI is optional.
        crop: (y, x, height, width) in pixels of the full oriented image; the resize may sample
            beyond its edge.
        size: (height, width) of the result.
        layout: ``hwc`` gives (H, W, 3), ``chw`` gives (3, H, W).
        color: ``rgb``, or ``gray``, the luma, as (H, W, 1) or
            (1, H, W). CMYK is converted as by Pillow, without a color profile.
        orientation: EXIF orientation to undo, 1 to 8; 0 for the stream's own.
        scale: 1, 2, 4 or 8 forces DCT-domain scaling by 1/scale; 0 lets the core choose.
        smoothing: Smooth between the blocks of an image at a lower scan, as libjpeg-turbo does by
            default (since 3.0.1; earlier versions differ at the upper and lower edges).
        backend: ``portable`` forces the plain C code.

    Raises:
        CorruptJpeg: The stream is damaged, or too expensive for its size.
        UnsupportedJpeg: It is legal but unsupported by this core, such as arithmetic coding.
        ValueError: A crop, orientation, size or other option is invalid.
        MemoryError: The picture does not fit in memory.
    """
    request = make_request(
        layout,
        color,
        size,
        crop,
        orientation=orientation,
        scale=scale,
        smoothing=smoothing,
    )
    call = _caller(pieces, backend)
    # Before allocating, the core compares the claimed size with the bytes present.
    found = ffi.new("int32_t[2]")
    call(lib.pcr_output_size, request, found, found + 1)
    out = np.empty(image_shape(layout, (found[0], found[1]), color), np.uint8)
    call(lib.pcr_decode, request, ffi.from_buffer("uint8_t[]", out), out.size)
    return out


class LossWeights(NamedTuple):
    """What the loss of an image at a scan consists of.

    It is a weighted sum over scales; of each, the mean over cells of 8x8 pixels of
    ``e / (2 v + e + c)``, with the variances e of the error and v of the image, of all components,
    and SSIM's constant c for contrast.

    Attributes:
        components: Weight of the squares of each component, at most 4.
        scales: Weight of the image as it is, halved once, and so on; at most 9, of which 4 may not
            be 0.
    """

    components: tuple[float, ...]
    scales: tuple[float, ...]


class Rescanned(NamedTuple):
    """A transcoded JPEG and where its scans are.

    Attributes:
        jpeg: The file.
        starts: Offset of each scan's first byte, which is that of its tables; then that of EOI.
        data: Offset of each scan's entropy-coded data, after its tables and header.
        losses: For each scan, the loss of the image where it ends after the scan.
    """

    jpeg: bytes
    starts: list[int]
    data: list[int]
    losses: list[float]


def rescan(
    jpeg: bytes,
    script: Sequence[tuple[Sequence[int], int, int, int, int]],
    backend: Backend = "auto",
    *,
    loss: LossWeights | None = None,
) -> Rescanned:
    """Transcode losslessly to the given progressive scans, keeping only JFIF and Adobe metadata.

    Args:
        jpeg: A whole JPEG that this core decodes.
        script: For each scan (component indexes, Ss, Se, Ah, Al) as in T.81 B.2.3.
        backend: ``portable`` forces the plain C code.
        loss: What the loss after each scan consists of.

    Raises:
        CorruptJpeg, UnsupportedJpeg: The stream cannot be decoded.
        ValueError: The script does not fit the image or breaks the rules of T.81 G.1.1.1.
    """
    scans = ffi.new("pcr_scan_spec[]", [(len(scan[0]), *scan) for scan in script])
    weights = ffi.new("pcr_loss_weights *", loss) if loss else ffi.NULL
    places = ffi.new("pcr_scan_place[]", len(script))
    data = ffi.new("const uint8_t **")
    length = ffi.new("size_t *")
    _caller([jpeg], backend)(lib.pcr_rescan, scans, len(script), weights, places, data, length)
    result: bytes = ffi.buffer(data[0], length[0])[:]
    lib.pcr_trim(_decoder(backend))  # the core's copy
    found = np.frombuffer(ffi.buffer(places), _PLACE)
    starts, entropy, losses = (found[name].tolist() for name in _PLACE.names or ())
    return Rescanned(result, [*starts, len(result) - 2], entropy, losses)
