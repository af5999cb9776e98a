"""Encoding of one image as scan groups and a tail, or as a file kept whole."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..errors import FormatError, UnsupportedJpeg
from ..format.group_table import MAX_HEADER_BYTES
from ..format.levels import Levels
from ..format.scan_script import STANDARD, ScanScript, group_scans, scans_for
from ..format.shard_index import MAX_PIECE_BYTES, MAX_PROFILE_BYTES, State
from ..jpeg.color_profiles import read_profile
from ..jpeg.markers import SOI, Frame, JpegMap, ScanHeader, map_jpeg
from ..jpeg.other_formats import to_jpeg
from ..jpeg.pixels import LossWeights, Rescanned, decode_image, fit_scans, make_progressive
from ..jpeg.split import check_complete, cut_tail
from .levels import (
    MeasuredScans,
    group_by_slope,
    loss_weights,
    similarity,
    similarity_weights,
)


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


def encode_jpeg(jpeg: bytes, script: ScanScript | Levels = STANDARD) -> EncodedImage:
    """Rearrange a JPEG losslessly into scan groups.

    Args:
        jpeg: A whole JPEG, baseline or progressive.
        script: The scan script, or the levels of a dataset.

    Raises:
        CorruptJpeg, UnsupportedJpeg: The JPEG is rejected; nothing is repaired.
    """
    layered = _layer(jpeg, script)
    source = layered.source
    groups, header_sizes = _cut_groups(layered.progressive, layered.groups, script.num_groups)
    pieces = (*groups, cut_tail(jpeg, source))
    if max(map(len, pieces)) > MAX_PIECE_BYTES:
        raise UnsupportedJpeg(f"a scan group or tail of more than {MAX_PIECE_BYTES} bytes")
    # A longer header, as some cameras write, is stored with its piece.
    shared = (size if size <= MAX_HEADER_BYTES else 0 for size in header_sizes)
    profile = read_profile(source.metadata)
    return EncodedImage(
        pieces,
        (*shared, 0),
        source.frame.height,
        source.frame.width,
        source.orientation,
        profile if len(profile) <= MAX_PROFILE_BYTES else b"",
    )


def measure_scans(jpeg: bytes, script: ScanScript, train_size: int) -> MeasuredScans:
    """Return the bytes and the loss of a JPEG after each scan of a script.

    Raises:
        CorruptJpeg, UnsupportedJpeg: The JPEG is rejected.
    """
    return _layer(jpeg, Levels(script, (0.0,), train_size)).measured


def similarities(jpeg: bytes, script: ScanScript | Levels) -> list[float]:
    """Return the estimated MS-SSIM of a JPEG at each scan group.

    Raises:
        CorruptJpeg, UnsupportedJpeg: The JPEG is rejected.
    """
    base = script.base if isinstance(script, Levels) else script
    layered = _layer(jpeg, base, similarity_weights)
    losses = layered.measured.losses
    groups = layered.groups if base is script else _layer(jpeg, script).groups
    ends = [bisect_right(groups, group) - 1 for group in range(1, script.num_groups + 1)]
    return [similarity(losses[end]) for end in ends]


class _Layered(NamedTuple):
    """A JPEG as scans, and the group of each."""

    source: JpegMap
    progressive: Rescanned
    groups: Sequence[int]
    measured: MeasuredScans


def _layer(
    jpeg: bytes,
    script: ScanScript | Levels,
    weights_of: Callable[[Frame, str], LossWeights | None] = lambda *_: None,
) -> _Layered:
    source = map_jpeg(jpeg)
    check_complete(source)
    base = script.base if isinstance(script, Levels) else script
    scans, groups = _plan(base, source.color, len(source.frame.components))
    fitting = fit_scans(scans, source)
    if fitting != scans:
        groups = group_scans(base, fitting, source.color)
    weights = weights_of(source.frame, source.color)
    if isinstance(script, Levels):
        weights = loss_weights(source.frame, source.color, script.train_size)
    progressive = make_progressive(jpeg, source, fitting, weights)
    # Until all components have begun, there is no picture.
    first = bisect_right(groups, groups[0])
    measured = MeasuredScans.of(progressive.starts[1:], progressive.losses, first)
    if isinstance(script, Levels):
        groups = tuple(group_by_slope(measured, script.slopes))
    return _Layered(source, progressive, groups, measured)


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


def convert_image(image: bytes, reencode_quality: int | None, resize_short: int | None) -> bytes:
    """Convert an image that is not a JPEG or needs resizing; return any other image unchanged.

    Raises:
        CorruptJpeg, UnsupportedJpeg: It cannot be read.
    """
    if image[:2] != SOI:
        if reencode_quality is None:
            return image
    elif resize_short is None:
        return image
    else:
        frame = map_jpeg(image).frame
        if min(frame.height, frame.width) <= resize_short:
            return image
    return to_jpeg(image, reencode_quality, resize_short)


@lru_cache(maxsize=64)
def _plan(
    script: ScanScript, color: str, num_components: int
) -> tuple[tuple[ScanHeader, ...], tuple[int, ...]]:
    """Return the scans of an image, and the group of each."""
    scans = tuple(scans_for(script, color, num_components))
    return scans, group_scans(script, scans, color)


def _cut_groups(
    progressive: Rescanned, numbers: Sequence[int], num_groups: int
) -> tuple[list[bytes], list[int]]:
    """Return the bytes of each scan group of a progressive JPEG, and the header sizes.

    The first group starts with the file's header; every group starts with the tables and the header
    of its first scan.

    Args:
        progressive: The JPEG.
        numbers: The group of each scan, never decreasing.
        num_groups: The number of groups.
    """
    jpeg, starts, data, _ = progressive
    # The first scan of each group; that of an empty one is the next group's.
    firsts = [bisect_left(numbers, group) for group in range(1, num_groups + 2)]
    begins = [0, *(starts[scan] for scan in firsts[1:])]
    groups = [jpeg[start:stop] for start, stop in pairwise(begins)]
    header_sizes = [
        (data[first] if first < after else stop) - start
        for (first, after), (start, stop) in zip(pairwise(firsts), pairwise(begins), strict=True)
    ]
    return groups, header_sizes
