"""One JPEG to pieces."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import UnsupportedJpeg
from ..format.scan_script import STANDARD, ScanScript, group_scans, scans_for
from ..format.shard_index import MAX_PIECE_BYTES
from ..jpeg.markers import map_jpeg
from ..jpeg.pixels import make_progressive
from ..jpeg.split import check_complete, cut_scans, cut_tail, mend_headers


class EncodedImage(NamedTuple):
    """One image as pieces: N scan groups, then the tail; height and width are in pixels."""

    pieces: tuple[bytes, ...]
    height: int
    width: int
    orientation: int


def encode_jpeg(jpeg: bytes, script: ScanScript = STANDARD) -> EncodedImage:
    """Rearrange a JPEG losslessly into scan groups.

    Args:
        jpeg: A whole JPEG, baseline or progressive.
        script: The scan script.

    Raises:
        CorruptJpeg, UnsupportedJpeg: It is refused; nothing is repaired.
    """
    source = map_jpeg(jpeg)
    check_complete(source)
    frame = source.frame
    scans = scans_for(script, source.colour, len(frame.components))
    progressive = make_progressive(mend_headers(jpeg, source), scans)
    pieces = (*_group_pieces(progressive, script), cut_tail(jpeg, source))
    if max(map(len, pieces)) > MAX_PIECE_BYTES:
        raise UnsupportedJpeg(f"a part of more than {MAX_PIECE_BYTES} bytes")
    return EncodedImage(pieces, frame.height, frame.width, source.orientation)


def _group_pieces(progressive: bytes, script: ScanScript) -> list[bytes]:
    """The bytes of each scan group of a progressive JPEG; the first begins with the headers."""
    found = map_jpeg(progressive)
    header, parts, _ = cut_scans(progressive, found)
    numbers = group_scans(script, found.scans, found.colour)
    groups: list[list[bytes]] = [[] for _ in range(script.num_groups)]
    groups[0].append(header)
    for number, part in zip(numbers, parts, strict=True):
        groups[number - 1].append(part)
    return [b"".join(group) for group in groups]
