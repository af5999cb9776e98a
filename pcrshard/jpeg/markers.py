"""The markers of a JPEG: where its parts are, and what is wrong with it.

Pure functions on bytes (ITU-T T.81 annex B): no decoder, no I/O. Entropy-coded data is only
searched for its end, never decoded.
"""

from __future__ import annotations

import bisect
import struct
from typing import NamedTuple

import numpy as np

from ..errors import CorruptJpeg, UnsupportedJpeg

MAX_PIXELS = 1 << 28
MAX_SCANS = 256

SOI = b"\xff\xd8"
EOI = b"\xff\xd9"

_DHT, _DAC, _SOS, _DQT, _DNL, _DRI, _COM, _APP0, _APP14 = (
    0xC4,
    0xCC,
    0xDA,
    0xDB,
    0xDC,
    0xDD,
    0xFE,
    0xE0,
    0xEE,
)
_TABLES = {_DHT, _DAC, _DQT, _DRI}
_FRAMES = set(range(0xC0, 0xD0)) - {_DHT, 0xC8, _DAC}
# Segments with a length that may stand before the frame: tables, restart interval, APPn, comment.
_PLAIN = {_DHT, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE}
_QUICK_BYTES = 4096
_UNSUPPORTED_FRAMES = {
    0xC3: "lossless",
    **dict.fromkeys((0xC5, 0xC6, 0xC7, 0xCD, 0xCE, 0xCF), "hierarchical"),
    0xCB: "lossless arithmetic",
}
_OTHER_FORMATS = (
    (b"\x89PNG", "PNG"),
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"RIFF", "WebP or another RIFF"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"\0\0\0\x0cjP", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\0\x0cJXL", "JPEG XL"),
    (b"%PDF", "PDF"),
    (b"<", "HTML, XML or SVG"),
)


class Component(NamedTuple):
    """One component of a frame (T.81 B.2.2): its id, and its sampling factors."""

    id: int
    h: int
    v: int


class Frame(NamedTuple):
    """A frame header (T.81 B.2.2); height and width in pixels."""

    sof: int
    height: int
    width: int
    components: tuple[Component, ...]

    @property
    def progressive(self) -> bool:
        """Whether the frame is progressive, Huffman or arithmetic coded."""
        return self.sof in (0xC2, 0xCA)

    @property
    def arithmetic(self) -> bool:
        """Whether the frame is arithmetic coded."""
        return self.sof > 0xC8

    @property
    def num_blocks(self) -> int:
        """8x8 blocks of all components, without padding to whole MCUs."""
        h_max = max(c.h for c in self.components)
        v_max = max(c.v for c in self.components)
        return sum(
            -(-self.width * c.h // (8 * h_max)) * -(-self.height * c.v // (8 * v_max))
            for c in self.components
        )


class Scan(NamedTuple):
    """A scan's parameters (T.81 B.2.3): component positions, spectral band [ss, se], bit positions."""

    components: tuple[int, ...]
    ss: int
    se: int
    ah: int
    al: int


class Segment(NamedTuple):
    """A marker segment: half-open range of bytes including the marker, and where its payload starts."""

    code: int
    start: int
    payload: int
    stop: int


class JpegMap(NamedTuple):
    """Where everything in a JPEG is; see :func:`map_jpeg`."""

    frame: Frame
    colour: str
    orientation: int
    header: tuple[Segment, ...]
    metadata: tuple[Segment, ...]
    scans: tuple[Scan, ...]
    scan_ranges: tuple[tuple[tuple[int, int], ...], ...]
    eoi: int
    size: int


def map_jpeg(jpeg: bytes) -> JpegMap:
    """Find every part of a JPEG, from SOI to EOI, and refuse what is not one.

    Args:
        jpeg: The whole file.

    Returns:
        The frame; colour space (``gray``, ``ycc``, ``rgb``, ``cmyk`` or ``ycck``, by the rules of libjpeg); EXIF
        orientation (0 if there is none); segments that decoding needs; segments that it does not; scans, each with the byte
        ranges of its tables, header and data; offset of EOI; size in bytes.

    Raises:
        CorruptJpeg: Not a JPEG, or a broken marker structure.
        UnsupportedJpeg: 12-bit, lossless, hierarchical, too many pixels or scans.
    """
    return _Mapper(jpeg).run()


class _Mapper:
    """State of one walk over the markers of a JPEG."""

    def __init__(self, jpeg: bytes) -> None:
        self.jpeg = jpeg
        self.frame: Frame | None = None
        self.header: list[Segment] = []
        self.metadata: list[Segment] = []
        self.scans: list[Scan] = []
        self.ranges: list[tuple[tuple[int, int], ...]] = []
        self.tables: list[tuple[int, int]] = []
        self.adobe: int | None = None
        self.jfif = False
        self.orientation = 0
        self.ends = _find_scan_ends(jpeg)

    def run(self) -> JpegMap:
        _check_soi(self.jpeg)
        pos = 2
        while True:
            segment = read_segment(self.jpeg, pos)
            if segment.code == 0xD9:
                return self._finish(segment.start)
            pos = self._scan(segment) if segment.code == _SOS else self._segment(segment)

    def _segment(self, segment: Segment) -> int:
        code = segment.code
        if code in _FRAMES:
            if self.frame is not None:
                raise CorruptJpeg(
                    "expected one frame header, got a second one", offset=segment.start
                )
            self.frame = _parse_frame(self.jpeg, segment)
            self.header.append(segment)
        elif code in (_DHT, _DAC) or (code in _TABLES and self.scans):
            self.tables.append((segment.start, segment.stop))
        elif code in _TABLES:
            self.header.append(segment)
        elif code == _DNL:
            self._lines(segment)
        elif 0xE0 <= code <= 0xEF or code == _COM:
            self._application(segment)
        elif code != 0x01 and not 0xD0 <= code <= 0xD7:
            raise CorruptJpeg(f"unknown marker FF{code:02X}", offset=segment.start)
        return segment.stop

    def _application(self, segment: Segment) -> None:
        payload = self.jpeg[segment.payload : segment.stop]
        jfif = segment.code == _APP0 and payload[:5] == b"JFIF\0" and len(payload) >= 14
        adobe = segment.code == _APP14 and payload[:5] == b"Adobe" and len(payload) >= 12
        if (jfif or adobe) and self.scans:
            # There they say nothing of the colour space, but would if they were put before the first scan.
            raise UnsupportedJpeg(
                f"{'JFIF' if jfif else 'Adobe'} segment behind the first scan", offset=segment.start
            )
        if jfif:
            self.jfif = True
            needed = payload[12:14] == b"\0\0"
        elif adobe:
            self.adobe = payload[11]
            needed = True
        else:
            needed = False
            if segment.code == 0xE1 and not self.orientation:
                self.orientation = exif_orientation(payload)
        (self.header if needed else self.metadata).append(segment)

    def _lines(self, segment: Segment) -> None:
        """DNL (T.81 B.2.5) gives the height that the frame header left open; any other DNL is ignored, as libjpeg does."""
        if (
            self.frame is not None
            and self.frame.height == 0
            and segment.stop - segment.payload == 2
        ):
            self.frame = self.frame._replace(
                height=int.from_bytes(self.jpeg[segment.payload : segment.stop], "big")
            )

    def _scan(self, segment: Segment) -> int:
        if self.frame is None:
            raise CorruptJpeg("expected a frame header before the first scan", offset=segment.start)
        if len(self.scans) == MAX_SCANS:
            raise UnsupportedJpeg(f"more than {MAX_SCANS} scans", offset=segment.start)
        self.scans.append(_parse_scan(self.jpeg, segment, self.frame))
        position = bisect.bisect_left(self.ends, segment.stop)
        if position == len(self.ends):
            raise CorruptJpeg(f"cut inside scan {len(self.scans)}: no EOI", offset=len(self.jpeg))
        end = self.ends[position]
        while end > segment.stop and self.jpeg[end - 1] == 0xFF:
            end -= 1
        self.ranges.append((*self.tables, (segment.start, end)))
        self.tables = []
        return end

    def _finish(self, eoi: int) -> JpegMap:
        if self.frame is None:
            raise CorruptJpeg("expected a frame header before EOI")
        if not self.scans:
            raise CorruptJpeg("expected a scan before EOI")
        data_bytes = sum(stop - start for ranges in self.ranges for start, stop in ranges)
        _check_size(self.frame, data_bytes)
        colour = _colour_space(self.frame, jfif=self.jfif, adobe=self.adobe)
        return JpegMap(
            self.frame,
            colour,
            self.orientation,
            tuple(self.header),
            tuple(self.metadata),
            tuple(self.scans),
            tuple(self.ranges),
            eoi,
            len(self.jpeg),
        )


def _find_scan_ends(jpeg: bytes) -> list[int]:
    """Offsets of every FF before a byte that ends entropy-coded data: not 00, FF or RSTn (T.81 B.1.1.5, F.1.2.3).

    All in one pass of numpy, four times faster than a regular expression for each scan.
    """
    data = np.frombuffer(jpeg, np.uint8)
    offsets = np.flatnonzero(data[:-1] == 0xFF)
    following = data[offsets + 1]
    ends = (following != 0) & (following != 0xFF) & ((following < 0xD0) | (following > 0xD7))
    return offsets[ends].tolist()  # type: ignore[no-any-return]  # numpy types tolist as Any


def _check_soi(jpeg: bytes) -> None:
    if jpeg[:2] == SOI:
        return
    if not jpeg:
        raise CorruptJpeg("expected a JPEG, got an empty file")
    other = next((name for magic, name in _OTHER_FORMATS if jpeg.startswith(magic)), None)
    raise CorruptJpeg(
        f"expected a JPEG, got a {other} file"
        if other
        else f"expected SOI (ff d8), got {jpeg[:2].hex(' ')}"
    )


def read_segment(jpeg: bytes, pos: int) -> Segment:
    """The marker segment at ``pos``, which fill bytes may precede (T.81 B.1.1.2); raises :class:`CorruptJpeg`."""
    start = pos
    while jpeg[pos : pos + 1] == b"\xff" and jpeg[pos + 1 : pos + 2] == b"\xff":
        pos += 1
    if pos + 2 > len(jpeg):
        raise CorruptJpeg("cut between markers: no EOI", offset=len(jpeg))
    if jpeg[pos] != 0xFF:
        raise CorruptJpeg(f"expected a marker, got {jpeg[pos]:02x}", offset=pos)
    code = jpeg[pos + 1]
    if code == 0x01 or 0xD0 <= code <= 0xD7 or code == 0xD9:
        return Segment(code, start, pos + 2, pos + 2)
    if code == 0xD8:
        raise CorruptJpeg("expected one SOI, got a second one", offset=pos)
    if code == 0x00:
        raise CorruptJpeg("expected a marker, got a stuffed byte", offset=pos)
    if pos + 4 > len(jpeg):
        raise CorruptJpeg("cut inside a marker segment", offset=len(jpeg))
    length = int.from_bytes(jpeg[pos + 2 : pos + 4], "big")
    if length < 2 or pos + 2 + length > len(jpeg):
        raise CorruptJpeg(
            f"segment FF{code:02X} claims {length} bytes, {len(jpeg) - pos - 2} are there",
            offset=pos,
        )
    # Fill bytes are not part of the segment, so that it can be moved.
    return Segment(code, pos, pos + 4, pos + 2 + length)


def _parse_frame(jpeg: bytes, segment: Segment) -> Frame:
    payload = jpeg[segment.payload : segment.stop]
    if segment.code in _UNSUPPORTED_FRAMES:
        raise UnsupportedJpeg(
            f"{_UNSUPPORTED_FRAMES[segment.code]} JPEG (SOF{segment.code - 0xC0})"
        )
    if len(payload) < 6 or len(payload) != 6 + 3 * payload[5]:
        raise CorruptJpeg(
            f"frame header of {len(payload)} bytes does not fit its components",
            offset=segment.start,
        )
    precision, height, width, num_components = struct.unpack(">BHHB", payload[:6])
    if precision != 8:
        raise UnsupportedJpeg(f"{precision}-bit JPEG, only 8 bits a sample are supported")
    if num_components not in (1, 3, 4):
        raise UnsupportedJpeg(f"{num_components} components, only 1, 3 or 4 are supported")
    components = tuple(
        Component(payload[i], payload[i + 1] >> 4, payload[i + 1] & 15)
        for i in range(6, len(payload), 3)
    )
    if any(not (1 <= c.h <= 4 and 1 <= c.v <= 4) for c in components):
        raise CorruptJpeg("expected sampling factors of 1 to 4", offset=segment.start)
    if len({c.id for c in components}) != num_components:
        raise CorruptJpeg("expected distinct component ids", offset=segment.start)
    if width == 0:
        raise CorruptJpeg("expected a width above 0", offset=segment.start)
    return Frame(segment.code, height, width, components)


def _parse_scan(jpeg: bytes, segment: Segment, frame: Frame) -> Scan:
    payload = jpeg[segment.payload : segment.stop]
    if not payload or not 1 <= payload[0] <= 4 or len(payload) != 4 + 2 * payload[0]:
        raise CorruptJpeg(
            f"scan header of {len(payload)} bytes does not fit its components", offset=segment.start
        )
    positions = {component.id: i for i, component in enumerate(frame.components)}
    ids = payload[1:-3:2]
    if len(set(ids)) != len(ids) or not set(ids) <= positions.keys():
        raise CorruptJpeg(
            "scan names a component that the frame does not have", offset=segment.start
        )
    ss, se, approximation = payload[-3:]
    scan = Scan(tuple(positions[i] for i in ids), ss, se, approximation >> 4, approximation & 15)
    if frame.progressive:
        _check_progression(scan, segment.start)
    return scan


def _check_progression(scan: Scan, offset: int) -> None:
    """T.81 G.1.1.1.1: DC alone or AC of one component, refined bit by bit."""
    band = scan.se == 0 if scan.ss == 0 else scan.ss <= scan.se <= 63 and len(scan.components) == 1
    bits = scan.al <= 13 and scan.ah in (0, scan.al + 1)
    if not (band and bits):
        raise CorruptJpeg(f"not a legal progressive scan: {tuple(scan)}", offset=offset)


def _check_size(frame: Frame, data_bytes: int) -> None:
    if frame.height == 0:
        raise CorruptJpeg("height is 0 and no DNL gives it")
    if frame.height * frame.width > MAX_PIXELS:
        raise UnsupportedJpeg(f"{frame.width}x{frame.height} is more than {MAX_PIXELS} pixels")
    # A Huffman code has at least one bit, and every block has a DC code: fewer bits cannot be the image claimed.
    if not frame.arithmetic and data_bytes * 8 < frame.num_blocks:
        raise CorruptJpeg(
            f"{data_bytes} bytes of scans cannot hold the {frame.width}x{frame.height} image claimed"
        )


def _colour_space(frame: Frame, *, jfif: bool, adobe: int | None) -> str:
    """The colour space as libjpeg guesses it (jdapimin.c, default_decompress_parms)."""
    if len(frame.components) == 1:
        return "gray"
    known = (None, 0, 1) if len(frame.components) == 3 else (None, 0, 2)
    if adobe not in known and not (jfif and len(frame.components) == 3):
        raise CorruptJpeg(f"unknown Adobe transform {adobe} for {len(frame.components)} components")
    if len(frame.components) == 4:
        return "ycck" if adobe == 2 else "cmyk"
    if jfif:
        return "ycc"
    if adobe is not None:
        return "rgb" if adobe == 0 else "ycc"
    return "rgb" if bytes(c.id for c in frame.components) == b"RGB" else "ycc"


def frame_size(jpeg: bytes | memoryview) -> tuple[int, int]:
    """Height and width in pixels, from the markers before the first scan; cheaper than :func:`map_jpeg`.

    Raises:
        CorruptJpeg: There is no frame header.
    """
    if size := _quick_frame_size(bytes(jpeg[:_QUICK_BYTES])):
        return size
    data = bytes(jpeg)
    _check_soi(data)
    pos = 2
    while True:
        segment = read_segment(data, pos)
        if segment.code in _FRAMES:
            frame = _parse_frame(data, segment)
            return frame.height, frame.width
        if segment.code in (_SOS, 0xD9):
            raise CorruptJpeg("expected a frame header before the first scan", offset=segment.start)
        pos = segment.stop


def _quick_frame_size(data: bytes) -> tuple[int, int] | None:
    """The size by following plain segments only, as nearly every file has them; ``None`` for whatever needs care."""
    pos = 2 if data[:2] == SOI else len(data)
    while pos + 9 <= len(data) and data[pos] == 0xFF:
        code = data[pos + 1]
        if code in _FRAMES:
            height, width = (
                int.from_bytes(data[pos + 5 : pos + 7]),
                int.from_bytes(data[pos + 7 : pos + 9]),
            )
            return (height, width) if height and width and code not in _UNSUPPORTED_FRAMES else None
        if code not in _PLAIN:
            return None
        pos += 2 + max(2, int.from_bytes(data[pos + 2 : pos + 4]))
    return None


def exif_orientation(payload: bytes) -> int:
    """Orientation 1-8 in an APP1 payload (EXIF 2.3 section 4.6.4, tag 0x0112), 0 if there is none or it is broken.

    >>> exif_orientation(b"http://ns.adobe.com/xap/1.0/")
    0
    """
    tiff = payload[6:]
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if payload[:6] != b"Exif\0\0" or order is None or len(tiff) < 10:
        return 0
    ifd = struct.unpack_from(order + "I", tiff, 4)[0]
    if ifd + 2 > len(tiff):
        return 0
    count = struct.unpack_from(order + "H", tiff, ifd)[0]
    for entry in range(ifd + 2, min(ifd + 2 + 12 * count, len(tiff) - 11), 12):
        tag, kind, number, value = struct.unpack_from(order + "HHIH", tiff, entry)
        if (tag, kind, number) == (0x0112, 3, 1):
            return int(value) if 1 <= value <= 8 else 0
    return 0
