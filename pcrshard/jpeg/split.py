"""Split a progressive JPEG into its scans, and join them.

Pure functions on bytes; no decoder, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import CorruptJpeg, UnsupportedJpeg
from ..memory import Buffer
from .markers import APP0, APP14, APPLICATION, COM, EOI, SOI, JpegMap, map_jpeg, read_segment
from .multi_picture import fit_pictures

# Header, scans, tail.
Parts = tuple[bytes, list[bytes], bytes]


def check_complete(found: JpegMap) -> None:
    """Refuse a progressive JPEG whose scans do not code the low frequencies to the last bit.

    libjpeg smooths such an image when decoding (jdcoefct.c examines coefficients 0-9) but would not
    smooth the same coefficients in a complete file, so transcoding would change the pixels.

    Raises:
        UnsupportedJpeg: The JPEG is incomplete.
    """
    if found.frame.sof not in (0xC2, 0xCA):
        return
    last_bits = {key: scan.al for scan in found.scans for key in scan.coefficients}
    for component in range(len(found.frame.components)):
        if any(last_bits.get((component, i), 1) for i in range(10)):
            raise UnsupportedJpeg(
                f"unfinished progressive JPEG: its {len(found.scans)} scans "
                f"leave component {component} incomplete"
            )


def split_scans(jpeg: bytes) -> Parts:
    """Split a progressive JPEG into its header, its scans and its tail.

    ``header + scans[0] + ... + scans[k - 1] + EOI`` is a complete JPEG at scan k (T.81 annex G).

    Args:
        jpeg: A progressive, Huffman-coded JPEG, from SOI; bytes after EOI go to the tail.

    Returns: ``(header, scans, tail)``: header is SOI, JFIF, Adobe, DQT, SOF and DRI; each scan
        includes the tables that precede it; tail is the other APPn and COM segments, then EOI and
        trailing bytes if there are any.

    Raises:
        CorruptJpeg: Not a JPEG, or a damaged one.
        UnsupportedJpeg: Not progressive with Huffman coding.
    """
    return cut_scans(jpeg, map_jpeg(jpeg))


def cut_scans(jpeg: bytes, found: JpegMap) -> Parts:
    """Split a JPEG that is already mapped; see :func:`split_scans`."""
    if found.frame.sof != 0xC2:
        raise UnsupportedJpeg(
            f"expected a progressive, Huffman-coded JPEG (SOF2), got SOF{found.frame.sof - 0xC0}"
        )
    scans = [b"".join(jpeg[start:stop] for start, stop in ranges) for ranges in found.scan_ranges]
    header = [SOI, *(jpeg[segment.start : segment.stop] for segment in found.header)]
    return b"".join(header), scans, cut_tail(jpeg, found)


def cut_tail(jpeg: bytes, found: JpegMap) -> bytes:
    """Return the tail of a mapped JPEG of any kind; see :func:`split_scans`."""
    tail = b"".join(jpeg[segment.start : segment.stop] for segment in found.metadata)
    # Fill bytes may precede the second byte of EOI.
    trailing = jpeg[jpeg.index(EOI[1], found.eoi) + 1 :]
    return tail + EOI + trailing if trailing else tail


def join_scans(
    header: bytes,
    scans: Sequence[bytes],
    tail: bytes = b"",
) -> bytes:
    """Make a complete JPEG from the header, first scans and optional tail of :func:`split_scans`.

    Args:
        header: The bytes before the first scan.
        scans: The first scans, in order.
        tail: The tail, to restore metadata and trailing bytes.

    Raises:
        CorruptJpeg: The header or the tail does not consist of marker segments.
    """
    return join_pieces([header, *scans], tail)


def join_pieces(pieces: Sequence[Buffer], tail: bytes = b"") -> bytes:
    """Make a complete JPEG from pieces, the first of which starts with the header.

    Args:
        pieces: A sample's bytes in scan groups 1..k.
        tail: The sample's tail, to restore metadata and trailing bytes.

    Returns: The pieces with EOI added and metadata inserted after the leading APP0 and APP14. The
        offsets of further pictures in the trailing bytes fit the new file.

    Raises:
        CorruptJpeg: A segment of the header or of the tail is damaged.
    """
    if not tail:
        return b"".join((*pieces, EOI))
    first = memoryview(pieces[0])  # slicing bytes would copy the whole image
    cut = _walk(first, 2, {APP0, APP14})
    end = _walk(tail, 0, {*APPLICATION, COM})
    if tail[end : end + 2] not in (b"", EOI):
        raise CorruptJpeg("expected APPn and COM segments in the tail, then EOI", offset=end)
    metadata, trailing = tail[:end], tail[end + 2 :]
    if trailing:
        size = sum(map(len, pieces)) + len(metadata) + len(EOI)
        metadata = fit_pictures(metadata, cut, size, trailing)
    return b"".join((first[:cut], metadata, first[cut:], *pieces[1:], EOI, trailing))


def _walk(
    data: Buffer,
    pos: int,
    codes: set[int],
) -> int:
    """Skip segments from ``pos`` whose marker is one of ``codes``; return the offset after them."""
    while pos + 4 <= len(data) and data[pos] == 0xFF and data[pos + 1] in codes:
        pos = read_segment(data, pos).stop
    return pos
