"""Encoding of one image as scan groups and a tail, or as a file kept whole."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..errors import FormatError, UnsupportedJpeg
from ..format.group_table import MAX_HEADER_BYTES
from ..format.scan_script import STANDARD, ScanScript, group_scans, scans_for
from ..format.shard_index import MAX_PIECE_BYTES, MAX_PROFILE_BYTES, State
from ..jpeg.color_profiles import read_profile
from ..jpeg.markers import ScanHeader, map_jpeg
from ..jpeg.pixels import decode_image, fit_scans, make_progressive
from ..jpeg.split import check_complete, cut_tail


class EncodedImage(NamedTuple):
    """A unit of a shard as N + 1 pieces: its scan groups, then the tail.

    Attributes:
        pieces: The bytes of each; all of a file kept whole are in the first.
        header_sizes: The number of leading bytes of each piece that are marker segments, which
            images of a shard may share; 0 for the tail.
        height: Height in pixels, 0 if unknown.
        width: Width in pixels, 0 if unknown.
        orientation: Orientation 1-8, 0 for none and for a file kept whole.
        profile: ICC profile; empty for none and for a file kept whole.
        state: How the shard holds it.
    """

    pieces: tuple[bytes, ...]
    header_sizes: tuple[int, ...]
    height: int
    width: int
    orientation: int
    profile: bytes = b""
    state: State = State.LAYERED


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
    scans, numbers = _plan(script, source.color, len(frame.components))
    fitting = fit_scans(scans, source)
    if fitting != scans:
        numbers = group_scans(script, fitting, source.color)
    progressive = make_progressive(jpeg, source, fitting)
    groups, header_sizes = _cut_groups(*progressive, numbers, script.num_groups)
    pieces = (*groups, cut_tail(jpeg, source))
    if max(map(len, pieces)) > MAX_PIECE_BYTES:
        raise UnsupportedJpeg(f"a scan group or tail of more than {MAX_PIECE_BYTES} bytes")
    # A longer header, as some cameras write, is stored with its piece.
    shared = (size if size <= MAX_HEADER_BYTES else 0 for size in header_sizes)
    profile = read_profile(source.metadata)
    return EncodedImage(
        pieces,
        (*shared, 0),
        frame.height,
        frame.width,
        source.orientation,
        profile if len(profile) <= MAX_PROFILE_BYTES else b"",
    )


def keep_whole(file: bytes, num_groups: int) -> EncodedImage:
    """Return a file kept whole, in the first scan group; decodes it once to see whether one can.

    Raises:
        UnsupportedJpeg: The file is too large.
    """
    if len(file) > MAX_PIECE_BYTES:
        raise UnsupportedJpeg(f"a file of more than {MAX_PIECE_BYTES} bytes")
    pieces = (file, *[b""] * num_groups)
    state = State.WHOLE
    height = width = 0
    try:
        height, width, _ = decode_image(file).shape
    except FormatError:
        state = State.UNDECODABLE
    if max(height, width) > np.iinfo(np.uint16).max:
        height = width = 0
    return EncodedImage(pieces, (0,) * len(pieces), height, width, 0, state=state)


@lru_cache(maxsize=64)
def _plan(
    script: ScanScript, color: str, num_components: int
) -> tuple[tuple[ScanHeader, ...], tuple[int, ...]]:
    """Return the scans of an image, and the group of each."""
    scans = tuple(scans_for(script, color, num_components))
    return scans, group_scans(script, scans, color)


def _cut_groups(
    jpeg: bytes,
    starts: Sequence[int],
    data: Sequence[int],
    numbers: Sequence[int],
    num_groups: int,
) -> tuple[list[bytes], list[int]]:
    """Return the bytes of each scan group of a progressive JPEG, and the header sizes.

    The first group starts with the file's header; every group starts with the tables and the header
    of its first scan.

    Args:
        jpeg: The JPEG.
        starts: Offset of each scan's tables, then that of EOI.
        data: Offset of each scan's entropy-coded data.
        numbers: The group of each scan, never decreasing.
        num_groups: The number of groups.
    """
    # The first scan of each group; that of an empty one is the next group's.
    firsts = [bisect_left(numbers, group) for group in range(1, num_groups + 2)]
    begins = [0, *(starts[scan] for scan in firsts[1:])]
    groups = [jpeg[start:stop] for start, stop in pairwise(begins)]
    header_sizes = [
        (data[first] if first < after else stop) - start
        for (first, after), (start, stop) in zip(pairwise(firsts), pairwise(begins), strict=True)
    ]
    return groups, header_sizes
