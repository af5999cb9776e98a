"""The marker segments of a JPEG: their locations and contents (ITU-T T.81 annex B)."""

from __future__ import annotations

import struct
from typing import NamedTuple, TypeVar

from ..errors import CorruptJpeg, UnsupportedJpeg
from ..memory import Buffer

SOI = b"\xff\xd8"
EOI = b"\xff\xd9"
APP0 = 0xE0
APP1 = 0xE1

FRAMES = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# TEM, RSTn and EOI are markers without a segment.
ALONE = {0x01, *range(0xD0, 0xD8), 0xD9}
_MISPLACED = {
    0x00: "expected a marker, got a stuffed byte",
    0xD8: "expected one SOI, got a second one",
}
UNSUPPORTED_FRAMES = {
    0xC3: "lossless",
    **dict.fromkeys((0xC5, 0xC6, 0xC7, 0xCD, 0xCE, 0xCF), "hierarchical"),
    0xCB: "lossless arithmetic",
}
# The first bytes of other image formats.
OTHER_FORMATS = {
    b"\x89PNG": "PNG",
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"RIFF": "WebP or another RIFF",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"\0\0\0\x0cjP": "JPEG 2000",
    b"\xff\x4f\xff\x51": "JPEG 2000",
    b"\xff\x0a": "JPEG XL",
    b"\0\0\0\x0cJXL": "JPEG XL",
    b"%PDF": "PDF",
    b"<": "HTML, XML or SVG",
}
_T = TypeVar("_T")


def is_other_format(start: bytes | bytearray | memoryview) -> bool:
    """Tell whether a file's first bytes belong to an image format other than JPEG."""
    return bytes(start[:16]).startswith(tuple(OTHER_FORMATS))


def require(
    value: _T | None,
    message: str,
    segment: Segment | None = None,
) -> _T:
    """Return a truthy value; otherwise raise :class:`CorruptJpeg` at the segment."""
    if not value:
        raise CorruptJpeg(message, offset=segment.start if segment else None)
    return value


def check_soi(jpeg: bytes) -> None:
    """Raise :class:`CorruptJpeg`, naming the likely format, if the file is not a JPEG."""
    if jpeg.startswith(SOI):
        return
    require(jpeg, "expected a JPEG, got an empty file")
    for magic, name in OTHER_FORMATS.items():
        require(not jpeg.startswith(magic), f"expected a JPEG, got a {name} file")
    raise CorruptJpeg(f"expected SOI (ff d8), got {jpeg[:2].hex(' ')}")


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
    def progressive(self) -> bool:
        """Whether the frame is progressive, Huffman or arithmetic coded."""
        return self.sof in (0xC2, 0xCA)

    @property
    def arithmetic(self) -> bool:
        """Whether the frame is arithmetic coded."""
        return self.sof > 0xC8

    @property
    def num_blocks(self) -> int:
        """The number of 8x8 blocks of all components, without padding to whole MCUs."""
        h_max = max(c.h for c in self.components)
        v_max = max(c.v for c in self.components)
        return sum(
            -(-self.width * c.h // (8 * h_max)) * -(-self.height * c.v // (8 * v_max))
            for c in self.components
        )


class ScanHeader(NamedTuple):
    """A scan's parameters (T.81 B.2.3): component positions, band [ss, se], bit positions."""

    components: tuple[int, ...]
    ss: int
    se: int
    ah: int
    al: int

    @property
    def coefficients(self) -> list[tuple[int, int]]:
        """Return the (component, coefficient) pairs that the scan codes."""
        return [(c, i) for c in self.components for i in range(self.ss, self.se + 1)]


class Segment(NamedTuple):
    """A marker segment: its half-open byte range, including the marker, and its payload."""

    code: int
    start: int
    stop: int
    payload: bytes = b""


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
    if code in ALONE:
        return Segment(code, start, pos + 2)
    if code in _MISPLACED:
        raise CorruptJpeg(_MISPLACED[code], offset=pos)
    # Fill bytes are not part of the segment, so that it can be moved.
    return Segment(code, pos, *_read_payload(jpeg, pos + 2, code))


def _read_payload(
    jpeg: Buffer,
    pos: int,
    code: int,
) -> tuple[int, bytes]:
    """Return the end and payload of the segment whose length is at ``pos``."""
    left = len(jpeg) - pos
    if left < 2:
        raise CorruptJpeg("cut inside a marker segment", offset=len(jpeg))
    length = int.from_bytes(jpeg[pos : pos + 2])
    if not 2 <= length <= left:
        raise CorruptJpeg(
            f"segment FF{code:02X} claims {length} bytes, {left} are there", offset=pos - 2
        )
    return pos + length, bytes(jpeg[pos + 2 : pos + length])


def parse_frame(segment: Segment) -> Frame:
    """Parse the frame header in a segment; refuse frames that cannot be stored."""
    code, _, _, payload = segment
    if code in UNSUPPORTED_FRAMES:
        raise UnsupportedJpeg(f"{UNSUPPORTED_FRAMES[code]} JPEG (SOF{code - 0xC0})")
    fits = len(payload) >= 6 and len(payload) == 6 + 3 * payload[5]
    require(fits, f"frame header of {len(payload)} bytes does not fit its components", segment)

    precision, height, width, num_components = struct.unpack_from(">BHHB", payload)
    if precision != 8:
        raise UnsupportedJpeg(f"{precision}-bit JPEG, only 8 bits per sample are supported")
    if num_components not in (1, 3, 4):
        raise UnsupportedJpeg(f"{num_components} components, only 1, 3 or 4 are supported")
    require(width, "expected a width above 0", segment)
    return Frame(code, height, width, _parse_components(segment))


def _parse_components(segment: Segment) -> tuple[Component, ...]:
    triples = struct.iter_unpack("3B", segment.payload[6:])
    found = tuple(Component(name, factors >> 4, factors & 15) for name, factors, _ in triples)
    legal = all(1 <= factor <= 4 for _, *sampling in found for factor in sampling)
    require(legal, "expected sampling factors of 1 to 4", segment)
    distinct = len({component.id for component in found}) == len(found)
    require(distinct, "expected distinct component ids", segment)
    return found


def parse_scan(segment: Segment, frame: Frame) -> ScanHeader:
    """Parse the scan header in a segment, checked against its frame."""
    payload = segment.payload
    fits = 6 <= len(payload) <= 12 and len(payload) == 4 + 2 * payload[0]
    require(fits, f"scan header of {len(payload)} bytes does not fit its components", segment)

    known = [component.id for component in frame.components]
    ids = payload[1:-3:2]
    found = len({*ids} & {*known}) == len(ids)
    require(found, "scan names a component that the frame does not have", segment)
    ss, se, bits = payload[-3:]
    scan = ScanHeader(tuple(map(known.index, ids)), ss, se, bits >> 4, bits & 15)
    legal = not frame.progressive or _is_progressive(scan)
    require(legal, f"not a legal progressive scan: {tuple(scan)}", segment)
    return scan


def _is_progressive(scan: ScanHeader) -> bool:
    """Check T.81 G.1.1.1.1: DC alone or AC of one component, refined bit by bit."""
    dc = scan.ss == scan.se == 0
    ac = 0 < scan.ss <= scan.se <= 63 and len(scan.components) == 1
    return (dc or ac) and scan.al <= 13 and scan.ah in (0, scan.al + 1)
