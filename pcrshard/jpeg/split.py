"""JPEG bytes: split a progressive JPEG into its scans, and join them.

Pure functions on bytes; no decoder, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import CorruptJpeg, UnsupportedJpeg
from .markers import EOI, SOI, JpegMap, map_jpeg, read_segment

_COM, _APP0, _APP14 = 0xFE, 0xE0, 0xEE


def check_complete(found: JpegMap) -> None:
    """Refuse a progressive JPEG whose scans do not send the low frequencies to the last bit.

    libjpeg smooths such an image when it decodes it (jdcoefct.c looks at coefficients 0-9), and would not smooth the same
    coefficients in a finished file, so it cannot be kept with the same pixels.

    Raises:
        UnsupportedJpeg
    """
    if not found.frame.progressive:
        return
    bits = {
        (c, i): scan.al
        for scan in found.scans
        for c in scan.components
        for i in range(scan.ss, scan.se + 1)
    }
    missing = [
        c for c in range(len(found.frame.components)) if any(bits.get((c, i), 1) for i in range(10))
    ]
    if missing:
        raise UnsupportedJpeg(
            f"unfinished progressive JPEG: its {len(found.scans)} scans leave component {missing[0]} incomplete"
        )


def split_scans(jpeg: bytes) -> tuple[bytes, list[bytes], bytes]:
    """Split a progressive JPEG into what any decoder needs, its scans, and the rest.

    ``header + scans[0] + ... + scans[k - 1] + EOI`` is a complete JPEG at scan k (T.81 annex G).

    Args:
        jpeg: A progressive, Huffman-coded JPEG, from SOI; bytes after EOI go to the tail.

    Returns:
        ``(header, scans, tail)``: header is SOI, JFIF, Adobe, DQT, SOF and DRI; each scan has the tables that come before it;
        tail is the other APPn and COM segments, then EOI and trailing bytes if there are any. A height that only DNL
        tells is written into the header.

    Raises:
        CorruptJpeg: Not a JPEG, or a broken one.
        UnsupportedJpeg: Not progressive with Huffman coding, or beyond the limits.
    """
    return cut_scans(jpeg, map_jpeg(jpeg))


def cut_scans(jpeg: bytes, found: JpegMap) -> tuple[bytes, list[bytes], bytes]:
    """Split a JPEG that is already mapped; see :func:`split_scans`."""
    if found.frame.sof != 0xC2:
        kind = "arithmetic-coded" if found.frame.arithmetic else "sequential"
        raise UnsupportedJpeg(
            f"expected a progressive JPEG (SOF2), got a {kind} one (SOF{found.frame.sof - 0xC0})"
        )
    scans = [b"".join(jpeg[start:stop] for start, stop in ranges) for ranges in found.scan_ranges]
    return _join_header(jpeg, found), scans, cut_tail(jpeg, found)


def _join_header(jpeg: bytes, found: JpegMap) -> bytes:
    parts = [SOI]
    for segment in found.header:
        part = jpeg[segment.start : segment.stop]
        if segment.code == found.frame.sof:
            part = part[:5] + found.frame.height.to_bytes(2, "big") + part[7:]
        parts.append(part)
    return b"".join(parts)


def cut_tail(jpeg: bytes, found: JpegMap) -> bytes:
    """The tail of a mapped JPEG of any kind; see :func:`split_scans`."""
    tail = b"".join(jpeg[segment.start : segment.stop] for segment in found.metadata)
    trailing = jpeg[_after_eoi(jpeg, found.eoi) :]
    return tail + EOI + trailing if trailing else tail


def _after_eoi(jpeg: bytes, eoi: int) -> int:
    return jpeg.index(0xD9, eoi) + 1


def mend_headers(jpeg: bytes, found: JpegMap) -> bytes:
    """The JPEG with what it says elsewhere, or need not say, where libjpeg looks for it.

    That is the height of a DNL in the frame header, and 0, 63, 0 behind the components in headers of sequential scans, which mean nothing there
    (T.81 B.2.3) but of which libjpeg warns; some cameras write zeros.
    """
    data = bytearray(jpeg)
    frame = next(segment for segment in found.header if segment.code == found.frame.sof)
    data[frame.start + 5 : frame.start + 7] = found.frame.height.to_bytes(2, "big")
    for scan, ranges in zip(found.scans, found.scan_ranges, strict=True):
        if not found.frame.progressive:
            at = ranges[-1][0] + 5 + 2 * len(scan.components)
            data[at : at + 3] = b"\0\x3f\0"
    return bytes(data)


def join_scans(header: bytes, scans: Sequence[bytes], tail: bytes = b"") -> bytes:
    """Make a complete JPEG from a header, its first scans, and perhaps its tail; see :func:`split_scans`.

    Raises:
        CorruptJpeg: The header or the tail is not made of marker segments.
    """
    return join_pieces([header, *scans], tail)


def join_pieces(pieces: Sequence[bytes | memoryview], tail: bytes = b"") -> bytes:
    """Make a complete JPEG from pieces, the first of which starts with the header.

    Args:
        pieces: A sample's bytes in scan groups 1..k.
        tail: Its tail, to restore metadata and trailing bytes.

    Returns:
        The pieces, EOI added, metadata put after the leading APP0 and APP14.
    """
    if not tail:
        return b"".join((*pieces, EOI))
    first = bytes(pieces[0])
    cut = _walk(first, 2, {_APP0, _APP14})
    end = _walk(tail, 0, {*range(0xE0, 0xF0), _COM})
    if tail[end : end + 2] not in (b"", EOI):
        raise CorruptJpeg("expected APPn and COM segments in the tail, then EOI", offset=end)
    return b"".join((first[:cut], tail[:end], first[cut:], *pieces[1:], EOI, tail[end + 2 :]))


def _walk(data: bytes, pos: int, codes: set[int]) -> int:
    """Offset after the segments from ``pos`` on whose marker is one of ``codes``."""
    while pos + 4 <= len(data) and data[pos] == 0xFF and data[pos + 1] in codes:
        pos = read_segment(data, pos).stop
    return pos
