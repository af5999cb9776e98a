"""Multi-picture files, such as MPO and Ultra HDR: where their further pictures are (CIPA DC-007).

A segment of the first picture has their offsets from itself, and the sizes of all.
"""

from __future__ import annotations

import itertools
import struct
from typing import NamedTuple

_APP2 = b"\xff\xe2"
_SIGNATURE = b"MPF\0"
_ENTRIES = 0xB002
_ENTRY_BYTES = 16
_START = b"\xff\xd8\xff"


class _Table(NamedTuple):
    """A table of pictures: the byte order, and where its entries begin in the segment's TIFF."""

    order: str
    first: int
    num_pictures: int


def fit_pictures(segments: bytes, place: int, image_bytes: int, trailing: bytes) -> bytes:
    """Return metadata whose table of pictures fits a file of other sizes.

    Args:
        segments: The metadata segments of the first picture.
        place: Where they begin in the file.
        image_bytes: Bytes of the first picture, up to its EOI.
        trailing: The bytes after it, with the other pictures.

    Returns: The segments with new offsets; without the table if the pictures are not found, so that
        it never points outside the file. Other segments are unchanged.
    """
    start = 0
    while segments[start : start + 2] and segments[start] == 0xFF:
        stop = start + 2 + int.from_bytes(segments[start + 2 : start + 4])
        if segments[start : start + 2] == _APP2 and segments[start + 4 : start + 8] == _SIGNATURE:
            tiff = segments[start + 8 : stop]
            fitted = _fit(tiff, image_bytes - place - start - 8, image_bytes, trailing)
            head, rest = segments[: start + 8], segments[stop:]
            return segments[:start] + rest if fitted is None else head + fitted + rest
        start = stop
    return segments


def _fit(tiff: bytes, end: int, image_bytes: int, trailing: bytes) -> bytes | None:
    """Return the segment's TIFF with the offsets of pictures in ``trailing``, which is at ``end``.

    ``None`` if the table is damaged, or a picture is not where the other ones say.
    """
    try:
        table = _find_table(tiff)
        if table is None:
            return None
        entry = struct.Struct(f"{table.order}IIIHH")
        places = [table.first + number * _ENTRY_BYTES for number in range(table.num_pictures)]
        entries = [list(entry.unpack_from(tiff, place)) for place in places]
    except struct.error:
        return None
    # The first picture has offset 0; so have pictures that are not in this file.
    others = [each for each in entries[1:] if each[2]]
    if not others:
        return None
    # The source's own place of the segment is not known, but distances between pictures are.
    nearest = min(other[2] for other in others)
    shift = trailing.find(_START) - nearest
    starts = [other[2] + shift for other in others]
    if not all(trailing.startswith(_START, start) for start in starts):
        return None
    entries[0][1] = image_bytes
    for other, start in zip(others, starts, strict=True):
        other[1] = min(other[1], len(trailing) - start)  # Pillow writes larger ones
        other[2] = start + end
    out = bytearray(tiff)
    for place, values in zip(places, entries, strict=True):
        entry.pack_into(out, place, *values)
    return bytes(out)


def _find_table(tiff: bytes) -> _Table | None:
    """Find the table in the first directory of a TIFF; ``None`` without one that fits.

    Raises:
        struct.error: The directory ends outside the TIFF.
    """
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return None
    (directory,) = struct.unpack_from(f"{order}I", tiff, 4)
    (count,) = struct.unpack_from(f"{order}H", tiff, directory)
    for place in itertools.islice(itertools.count(directory + 2, 12), count):
        tag, _, size, first = struct.unpack_from(f"{order}HHII", tiff, place)
        if tag == _ENTRIES and size % _ENTRY_BYTES == 0 and first + size <= len(tiff):
            return _Table(order, first, size // _ENTRY_BYTES)
    return None
