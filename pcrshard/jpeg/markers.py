"""Parse the markers of a JPEG: locate its parts, and detect errors.

Pure functions on bytes (ITU-T T.81 annex B): no decoder, no I/O. Entropy-coded data is only
searched for its end, never decoded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import CorruptJpeg, UnsupportedJpeg
from ..native import exif_orientation, scan_end
from .segments import (
    ALONE,
    APP0,
    APP1,
    EOI,
    FRAMES,
    SOI,
    Frame,
    ScanHeader,
    Segment,
    check_soi,
    parse_frame,
    parse_scan,
    read_segment,
    require,
)

__all__ = [
    "APP0",
    "APP14",
    "APPLICATION",
    "COM",
    "EOI",
    "SOI",
    "JpegMap",
    "Range",
    "ScanHeader",
    "check_area",
    "find_frame",
    "map_jpeg",
]

MAX_PIXELS = 1 << 28
MAX_SCANS = 256

COM = 0xFE
APP14 = 0xEE
APPLICATION = range(0xE0, 0xF0)

_DHT = 0xC4
_DAC = 0xCC
_EOI = 0xD9
_SOS = 0xDA
_DQT = 0xDB
_DNL = 0xDC
_DRI = 0xDD

_TABLES = {_DHT, _DAC, _DQT, _DRI}
# The color space of 3 and 4 components, by the transform in an Adobe segment.
_ADOBE_COLORS: dict[int, dict[int | None, str]] = {
    3: {0: "rgb", 1: "ycc"},
    4: {None: "cmyk", 0: "cmyk", 2: "ycck"},
}
Range = tuple[int, int]


class JpegMap(NamedTuple):
    """The structure of a JPEG.

    Attributes:
        frame: The frame header.
        color: ``gray``, ``ycc``, ``rgb``, ``cmyk`` or ``ycck``, by the rules of libjpeg.
        orientation: EXIF orientation 1-8, 0 if there is none.
        header: Segments needed for decoding.
        metadata: Segments not needed for decoding.
        scans: The parameters of each scan.
        scan_ranges: For each scan the half-open byte ranges of its tables, then that of its header
            and data.
        eoi: Offset of EOI.
    """

    frame: Frame
    color: str
    orientation: int
    header: tuple[Segment, ...]
    metadata: tuple[Segment, ...]
    scans: tuple[ScanHeader, ...]
    scan_ranges: tuple[tuple[Range, ...], ...]
    eoi: int


def map_jpeg(jpeg: bytes) -> JpegMap:
    """Find every part of a JPEG, from SOI to EOI.

    Args:
        jpeg: The whole file.

    Raises:
        CorruptJpeg: Not a JPEG, or a broken marker structure.
        UnsupportedJpeg: 12-bit, lossless, hierarchical, too many pixels or scans.
    """
    return _Mapper(jpeg).run()


@dataclass
class _Mapper:
    """State of one walk over the markers of a JPEG."""

    jpeg: bytes
    frame: Frame | None = None
    header: list[Segment] = field(default_factory=list)
    metadata: list[Segment] = field(default_factory=list)
    scans: list[ScanHeader] = field(default_factory=list)
    ranges: list[tuple[Range, ...]] = field(default_factory=list)
    tables: list[Range] = field(default_factory=list)
    adobe: int | None = None
    jfif: bool = False
    orientation: int = 0

    def run(self) -> JpegMap:
        check_soi(self.jpeg)
        segment = read_segment(self.jpeg, 2)
        while segment.code != _EOI:
            step = self._scan if segment.code == _SOS else self._segment
            segment = read_segment(self.jpeg, step(segment))
        return self._finish(segment.start)

    def _segment(self, segment: Segment) -> int:
        code = segment.code
        if code in FRAMES:
            require(not self.frame, "expected one frame header, got a second one", segment)
            self.frame = parse_frame(segment)
            self.header.append(segment)
        elif code in _TABLES:
            # Tables for entropy coding belong to the scan that uses them, as does anything after
            # another scan.
            if self.scans or code in (_DHT, _DAC):
                self.tables.append((segment.start, segment.stop))
            else:
                self.header.append(segment)
        elif code == _DNL:
            self._lines(segment)
        elif code in APPLICATION or code == COM:
            self._application(segment)
        else:
            require(code in ALONE, f"unknown marker FF{code:02X}", segment)
        return segment.stop

    def _application(self, segment: Segment) -> None:
        payload = segment.payload
        jfif = _is_named(segment, APP0, b"JFIF\0", 14)
        adobe = _is_named(segment, APP14, b"Adobe", 12)
        if (jfif or adobe) and self.scans:
            # At this position they do not affect the color space, but before the first scan they
            # would.
            name = "JFIF" if jfif else "Adobe"
            raise UnsupportedJpeg(f"{name} segment after the first scan", offset=segment.start)

        self.jfif |= jfif
        if adobe:
            self.adobe = payload[11]
        elif segment.code == APP1:
            self.orientation = self.orientation or exif_orientation(payload)
        has_thumbnail = payload[12:14] != b"\0\0"
        needed = adobe or (jfif and not has_thumbnail)
        (self.header if needed else self.metadata).append(segment)

    def _lines(self, segment: Segment) -> None:
        """DNL (T.81 B.2.5): a height that the frame header omits; libjpeg ignores it otherwise."""
        if self.frame and self.frame.height == 0 and len(segment.payload) == 2:
            self.frame = self.frame._replace(height=int.from_bytes(segment.payload))

    def _scan(self, segment: Segment) -> int:
        frame = require(self.frame, "expected a frame header before the first scan", segment)
        if len(self.scans) == MAX_SCANS:
            raise UnsupportedJpeg(f"more than {MAX_SCANS} scans", offset=segment.start)
        self.scans.append(parse_scan(segment, frame))
        end = scan_end(self.jpeg, segment.stop)
        if end == len(self.jpeg):
            raise CorruptJpeg(f"cut inside scan {len(self.scans)}: no EOI", offset=end)
        self.ranges.append((*self.tables, (segment.start, end)))
        self.tables = []
        return end

    def _finish(self, eoi: int) -> JpegMap:
        frame = require(self.frame, "expected a frame header before EOI")
        require(self.scans, "expected a scan before EOI")
        data_bytes = sum(stop - start for ranges in self.ranges for start, stop in ranges)
        _check_size(frame, data_bytes)
        return JpegMap(
            frame,
            _color_space(frame, jfif=self.jfif, adobe=self.adobe),
            self.orientation,
            tuple(self.header),
            tuple(self.metadata),
            tuple(self.scans),
            tuple(self.ranges),
            eoi,
        )


def _is_named(
    segment: Segment,
    code: int,
    name: bytes,
    least: int,
) -> bool:
    """Tell whether an application segment has this code and name, and at least this many bytes."""
    payload = segment.payload
    return segment.code == code and payload.startswith(name) and len(payload) >= least


def _check_size(frame: Frame, data_bytes: int) -> None:
    require(frame.height, "height is 0 and no DNL gives it")
    size = f"{frame.width}x{frame.height}"
    check_area(frame.height, frame.width)
    # A Huffman code has at least one bit, and every block has a DC code: fewer bits cannot encode
    # the claimed image.
    enough = frame.arithmetic or data_bytes * 8 >= frame.num_blocks
    require(enough, f"{data_bytes} bytes of scans cannot hold the {size} image claimed")


def _color_space(
    frame: Frame,
    *,
    jfif: bool,
    adobe: int | None,
) -> str:
    """Return the color space by libjpeg's rules (jdapimin.c, default_decompress_parms)."""
    count = len(frame.components)
    if count == 1:
        return "gray"
    if count == 3 and jfif:
        return "ycc"
    if count == 3 and adobe is None:
        return "rgb" if bytes(c.id for c in frame.components) == b"RGB" else "ycc"
    known = _ADOBE_COLORS[count].get(adobe)
    return require(known, f"unknown Adobe transform {adobe} for {count} components")


def check_area(height: int, width: int) -> None:
    """Refuse an image of more than 2**28 pixels.

    Raises:
        UnsupportedJpeg: The image has more.
    """
    if height * width > MAX_PIXELS:
        raise UnsupportedJpeg(f"{width}x{height} is more than {MAX_PIXELS} pixels")


def find_frame(data: bytes) -> Frame:
    """Return the frame header, which precedes the first scan.

    Raises:
        CorruptJpeg: The frame header is missing or has no height.
    """
    check_soi(data)
    segment = read_segment(data, 2)
    while segment.code not in FRAMES:
        if segment.code in (_SOS, _EOI):
            raise CorruptJpeg("expected a frame header before the first scan", offset=segment.start)
        segment = read_segment(data, segment.stop)
    frame = parse_frame(segment)
    require(frame.height, "expected a height above 0 in the frame header", segment)
    return frame
