"""Encoding of one JPEG as scan groups and a tail."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import UnsupportedJpeg
from ..format.group_table import MAX_HEADER_BYTES
from ..format.scan_script import STANDARD, ScanScript, group_scans, scans_for
from ..format.shard_index import MAX_PIECE_BYTES
from ..jpeg.markers import map_jpeg, read_segment
from ..jpeg.pixels import make_progressive
from ..jpeg.split import check_complete, cut_scans, cut_tail


class EncodedImage(NamedTuple):
    """An image as N + 1 pieces: its scan groups, then the tail; height and width are in pixels.

    ``header_sizes`` gives the number of leading bytes of each piece that are marker segments, which
    images of a shard may share; 0 for the tail.
    """

    pieces: tuple[bytes, ...]
    header_sizes: tuple[int, ...]
    height: int
    width: int
    orientation: int


def encode_jpeg(jpeg: bytes, script: ScanScript = STANDARD) -> EncodedImage:
    """Rearrange a JPEG losslessly into scan groups.

    Args:
        jpeg: A whole JPEG, baseline or progressive.
        script: The scan script.

    Raises:
        CorruptJpeg, UnsupportedJpeg: The JPEG is rejected; nothing is repaired.
    """
    source = map_jpeg(jpeg)
    check_complete(source)
    frame = source.frame
    scans = scans_for(script, source.color, len(frame.components))
    progressive = make_progressive(jpeg, source, scans)
    groups, header_sizes = _cut_groups(progressive, script)
    pieces = (*groups, cut_tail(jpeg, source))
    if max(map(len, pieces)) > MAX_PIECE_BYTES:
        raise UnsupportedJpeg(f"a scan group or tail of more than {MAX_PIECE_BYTES} bytes")
    # A longer header, as some cameras write, is stored with its piece.
    shared = (size if size <= MAX_HEADER_BYTES else 0 for size in header_sizes)
    return EncodedImage(pieces, (*shared, 0), frame.height, frame.width, source.orientation)


def _cut_groups(progressive: bytes, script: ScanScript) -> tuple[list[bytes], list[int]]:
    """Return the bytes of each scan group of a progressive JPEG, and the header sizes.

    The first group starts with the file's header; every group starts with the tables and the header
    of its first scan.
    """
    found = map_jpeg(progressive)
    header, parts, _ = cut_scans(progressive, found)
    groups = [header] + [b""] * (script.num_groups - 1)
    header_sizes = list(map(len, groups))
    numbers = group_scans(script, tuple(found.scans), found.color)
    last = 0
    for number, part, ranges in zip(numbers, parts, found.scan_ranges, strict=True):
        row = number - 1
        if number != last:
            # The scan's tables and header (T.81 B.2.3).
            *tables, (start, _) = ranges
            tables_bytes = sum(stop - first for first, stop in tables)
            header_sizes[row] += tables_bytes + read_segment(progressive, start).stop - start
        groups[row] += part
        last = number
    return groups, header_sizes
