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
    """One image as pieces: N scan groups, then the tail."""

    pieces: tuple[bytes, ...]
    height: int
    width: int
    orientation: int


def encode_jpeg(jpeg: bytes, script: ScanScript = STANDARD) -> EncodedImage:
    """Rearrange a JPEG losslessly into scan groups.

    Raises:
        CorruptJpeg, UnsupportedJpeg: It is refused; nothing is repaired.
    """
    source = map_jpeg(jpeg)
    check_complete(source)
    scans = scans_for(script, source.colour, len(source.frame.components))
    progressive = make_progressive(mend_headers(jpeg, source), scans)
    found = map_jpeg(progressive)
    header, parts, _ = cut_scans(progressive, found)
    groups: list[list[bytes]] = [[] for _ in range(script.num_groups)]
    groups[0].append(header)
    for group, part in zip(group_scans(script, found.scans, found.colour), parts, strict=True):
        groups[group - 1].append(part)
    pieces = (*(b"".join(group) for group in groups), cut_tail(jpeg, source))
    if max(map(len, pieces)) > MAX_PIECE_BYTES:
        raise UnsupportedJpeg(f"a part of more than {MAX_PIECE_BYTES} bytes")
    return EncodedImage(pieces, source.frame.height, source.frame.width, source.orientation)
