"""Parse the markers of a JPEG: locate its parts (ITU-T T.81 annex B).

Pure functions on bytes: no decoder, no I/O. Entropy-coded data is only searched for its end, never
decoded. Decoders check the rest: precision, legal scans, and the stated size.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from ..errors import CorruptJpeg, UnsupportedJpeg
from ..memory import Buffer
from ..native import find_orientation, scan_end

SOI = b"\xff\xd8"
EOI = b"\xff\xd9"
APP0 = 0xE0
APP14 = 0xEE
COM = 0xFE
APPLICATION = range(0xE0, 0xF0)
DQT = 0xDB
MAX_SCANS = 256

_APP1 = 0xE1
_DHT = 0xC4
_DAC = 0xCC
_EOI = 0xD9
SOS = 0xDA
_DRI = 0xDD
_FRAMES = range(0xC0, 0xD0)  # besides those of tables for entropy coding
# TEM, RSTn and EOI are markers without a segment.
_ALONE = {0x01, *range(0xD0, 0xD8), _EOI}
# A DNL repeats the height of the frame header.
_IGNORED = {*_ALONE, 0xDC}
# Sequential and progressive frames, Huffman or arithmetic coded.
_SUPPORTED_FRAMES = (0xC0, 0xC1, 0xC2, 0xC9, 0xCA)
# Extensions of other formats, by the place and value of their magic bytes.
_OTHER_FORMATS = {
    (0, b"\x89PNG"): "png",
    (0, b"GIF8"): "gif",
    (0, b"BM"): "bmp",
    (8, b"WEBP"): "webp",
    (0, b"II*\0"): "tiff",
    (0, b"MM\0*"): "tiff",
    (0, b"\0\0\0\x0cjP"): "jp2",
    (0, b"\xff\x4f\xff\x51"): "jp2",
    (0, b"\xff\x0a"): "jxl",
    (0, b"\0\0\0\x0cJXL"): "jxl",
    (4, b"ftypavif"): "avif",
    (4, b"ftyphei"): "heic",
    (0, b"P5"): "pgm",
    (0, b"P6"): "ppm",
    (0, b"%PDF"): "pdf",
    (0, b"<"): "html",
}
Range = tuple[int, int]


class Component(NamedTuple):
    """One component of a frame (T.81 B.2.2): its id and sampling factors."""

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
    def arithmetic(self) -> bool:
        """Whether the frame is arithmetic coded."""
        return self.sof > 0xC8

    @property
    def num_blocks(self) -> list[int]:
        """The number of 8x8 blocks of each component, without padding to whole MCUs."""
        h_max = max(c.h for c in self.components)
        v_max = max(c.v for c in self.components)
        return [
            -(-self.width * c.h // (8 * h_max)) * -(-self.height * c.v // (8 * v_max))
            for c in self.components
        ]


class ScanHeader(NamedTuple):
    """A scan's parameters (T.81 B.2.3): component positions, band [ss, se], bit positions."""

    components: tuple[int, ...]
    ss: int
    se: int
    ah: int
    al: int

    @property
    def coefficients(self) -> list[tuple[int, int]]:
        """The (component, coefficient) pairs that the scan codes."""
        return [(c, i) for c in self.components for i in range(self.ss, self.se + 1)]


class Segment(NamedTuple):
    """A marker segment: its half-open byte range, including the marker, and its payload."""

    code: int
    start: int
    stop: int
    payload: bytes = b""

    def refuse(self, message: str) -> NoReturn:
        """Raise :class:`CorruptJpeg` at the segment."""
        raise CorruptJpeg(message, offset=self.start)


@dataclass
class JpegMap:
    """The structure of a JPEG.

    Attributes:
        frame: The frame header.
        has_jfif: Whether there is a JFIF segment, which determines the color space.
        adobe: The transform of the last Adobe segment, ``None`` without one.
        header: Segments needed for decoding.
        metadata: Segments not needed for decoding.
        scans: The parameters of each scan.
        scan_ranges: For each scan the half-open byte ranges of its tables, then that of its header
            and data.
        eoi: Offset of EOI.
    """

    frame: Frame
    has_jfif: bool = False
    adobe: int | None = None
    header: list[Segment] = field(default_factory=list)
    metadata: list[Segment] = field(default_factory=list)
    scans: list[ScanHeader] = field(default_factory=list)
    scan_ranges: list[tuple[Range, ...]] = field(default_factory=list)
    eoi: int = 0

    @property
    def color(self) -> str:
        """``gray``, ``ycc``, ``rgb``, ``cmyk`` or ``ycck``, by libjpeg's rules (jdapimin.c)."""
        ids = bytes(component.id for component in self.frame.components)
        if len(ids) == 1:
            return "gray"
        if len(ids) == 4:
            return "ycck" if self.adobe else "cmyk"
        if self.has_jfif:
            return "ycc"
        return "rgb" if self.adobe == 0 or (self.adobe is None and ids == b"RGB") else "ycc"

    @property
    def orientation(self) -> int:
        """Orientation 1-8 by EXIF, or else by XMP; 0 if there is none."""
        return find_orientation(s.payload for s in self.metadata if s.code == _APP1)


def map_jpeg(jpeg: bytes) -> JpegMap:
    """Find every part of a JPEG, from SOI to EOI.

    Args:
        jpeg: The whole file.

    Raises:
        CorruptJpeg: Not a JPEG, or a broken marker structure.
        UnsupportedJpeg: Lossless, hierarchical, or of too many scans.
    """
    _check_soi(jpeg)
    found = JpegMap(Frame(0, 0, 0, ()))
    tables: list[Range] = []
    segment = read_segment(jpeg, 2)
    while segment.code != _EOI:
        stop = segment.stop
        if segment.code == SOS:
            if len(found.scans) == MAX_SCANS:
                raise UnsupportedJpeg(f"more than {MAX_SCANS} scans", offset=segment.start)
            found.scans.append(_parse_scan(segment, found.frame))
            stop = scan_end(jpeg, stop)
            if stop == len(jpeg):
                raise CorruptJpeg(f"cut inside scan {len(found.scans)}: no EOI", offset=stop)
            found.scan_ranges.append((*tables, (segment.start, stop)))
            tables = []
        elif segment.code in (_DHT, _DAC) or (segment.code in (DQT, _DRI) and found.scans):
            # Tables for entropy coding belong to the scan that uses them, as does anything after
            # another scan.
            tables.append((segment.start, stop))
        else:
            _add_segment(found, segment)
        segment = read_segment(jpeg, stop)
    found.eoi = segment.start
    if not found.scans:
        raise CorruptJpeg("expected a frame header and a scan before EOI")
    return found


def _add_segment(found: JpegMap, segment: Segment) -> None:
    code = segment.code
    if code in _FRAMES:
        if found.frame.sof:
            segment.refuse("expected one frame header, got a second one")
        found.frame = _parse_frame(segment)
        found.header.append(segment)
    elif code in (DQT, _DRI):
        found.header.append(segment)
    elif code in APPLICATION or code == COM:
        payload = segment.payload
        is_jfif = code == APP0 and payload.startswith(b"JFIF\0") and len(payload) >= 14
        is_adobe = code == APP14 and payload.startswith(b"Adobe") and len(payload) >= 12
        is_turning = False
        if code == _APP1 and found.scans:
            moved = [s.payload for s in (*found.metadata, segment) if s.code == _APP1]
            is_turning = find_orientation(moved) != found.orientation
        if is_turning or ((is_jfif or is_adobe) and found.scans):
            # Decoders ignore these here, but before the first scan, where the tail puts them, they
            # would change the color space or turn the picture.
            raise UnsupportedJpeg(
                "JFIF, Adobe or orientation after the first scan", offset=segment.start
            )
        found.has_jfif |= is_jfif
        if is_adobe:
            found.adobe = payload[11]
        # A thumbnail is metadata, and the JFIF segment with it.
        needed = is_adobe or (is_jfif and payload[12:14] == b"\0\0")
        (found.header if needed else found.metadata).append(segment)
    elif code not in _IGNORED:
        segment.refuse(f"unknown marker FF{code:02X}")


def other_format(start: Buffer) -> str | None:
    """Return the extension of a file's likely format, by its first bytes, if that is not JPEG."""
    head = bytes(start[:16])
    kinds = _OTHER_FORMATS.items()
    return next((kind for (place, magic), kind in kinds if head.startswith(magic, place)), None)


def _check_soi(jpeg: bytes) -> None:
    """Raise :class:`CorruptJpeg`, naming the likely format, if the file is not a JPEG."""
    if not jpeg:
        raise CorruptJpeg("expected a JPEG, got an empty file")
    if kind := other_format(jpeg):
        raise CorruptJpeg(f"expected a JPEG, got {kind.upper()}")
    if not jpeg.startswith(SOI):
        raise CorruptJpeg(f"expected SOI (ff d8), got {jpeg[:2].hex(' ')}")


def read_segment(jpeg: Buffer, pos: int) -> Segment:
    """Read the marker segment at ``pos``, possibly preceded by fill bytes (T.81 B.1.1.2).

    Raises:
        CorruptJpeg: The segment is missing or truncated.
    """
    start = pos
    while jpeg[pos : pos + 2] == b"\xff\xff":
        pos += 1
    marker = jpeg[pos : pos + 2]
    if len(marker) < 2:
        raise CorruptJpeg("cut between markers: no EOI", offset=len(jpeg))
    first, code = marker
    if first != 0xFF:
        raise CorruptJpeg(f"expected a marker, got {first:02x}", offset=pos)
    if code in _ALONE:
        return Segment(code, start, pos + 2)
    left = len(jpeg) - pos - 2
    length = int.from_bytes(jpeg[pos + 2 : pos + 4])
    if not 2 <= length <= left:
        raise CorruptJpeg(
            f"segment FF{code:02X} claims {length} bytes, {left} are there", offset=pos
        )
    # Fill bytes are not part of the segment, so that it can be moved.
    stop = pos + 2 + length
    return Segment(code, pos, stop, bytes(jpeg[pos + 4 : stop]))


def _parse_frame(segment: Segment) -> Frame:
    """Parse the frame header in a segment; refuse frames that cannot be stored."""
    code, _, _, payload = segment
    if code not in _SUPPORTED_FRAMES:
        raise UnsupportedJpeg(f"lossless or hierarchical JPEG (SOF{code - 0xC0})")
    if len(payload) < 6 or len(payload) != 6 + 3 * payload[5]:
        segment.refuse(f"frame header of {len(payload)} bytes does not fit its components")
    height, width, count = struct.unpack_from(">HHB", payload, 1)
    if count not in (1, 3, 4):
        raise UnsupportedJpeg(f"{count} components, only 1, 3 or 4 are supported")
    triples = struct.iter_unpack("3B", payload[6:])
    components = tuple(Component(name, both >> 4, both & 15) for name, both, _ in triples)
    if not all(1 <= c.h <= 4 and 1 <= c.v <= 4 for c in components):
        segment.refuse("expected sampling factors of 1 to 4")
    return Frame(code, height, width, components)


def _parse_scan(segment: Segment, frame: Frame) -> ScanHeader:
    """Parse the scan header in a segment; its components must be in the frame."""
    payload = segment.payload
    if not 6 <= len(payload) <= 12 or len(payload) != 4 + 2 * payload[0]:
        segment.refuse(f"scan header of {len(payload)} bytes does not fit its components")
    known = [component.id for component in frame.components]
    ids = payload[1:-3:2]
    if not {*ids} <= {*known}:
        segment.refuse("scan names a component that no frame header before it has")
    ss, se, bits = payload[-3:]
    return ScanHeader(tuple(map(known.index, ids)), ss, se, bits >> 4, bits & 15)
