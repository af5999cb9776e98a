"""The size of a picture, by the few bytes of its file that say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ..native import find_orientation

# Reads bytes of a file: from a place on, at most a number of them.
Read = Callable[[int, int], bytes]
Size = tuple[int, int]
# Bytes to read first, all that files of most libraries need, and after a jump.
_FIRST, _NEXT = 192, 96
_MOST_SEGMENTS = 64
# Of EXIF, and of XMP, which is text of any size.
_MOST_METADATA = 2 << 10
_MOST_PIXELS = 0xFFFF
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_APP1, _SOS = 0xE1, 0xDA


class _Window:
    """Reads a file in small windows."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._start = 0
        self._held = b""

    def get(self, start: int, count: int) -> bytes:
        """Return bytes, fewer at the end of the file."""
        end = self._start + len(self._held)
        if not self._start <= start <= end:
            self._start = end = start
            self._held = b""
        if start + count > end:
            # What is held stays: the file may be a stream.
            least = _NEXT if start else _FIRST
            self._held += self._read(end, max(start + count - end, least))
        place = start - self._start
        return self._held[place : place + count]


def picture_size(read: Read) -> Size | None:
    """Return the height and width of a picture, upright; ``None`` if its first bytes do not tell.

    Reads 192 bytes of most JPEG, PNG, GIF and WebP files, and after that jumps over what does not
    matter.
    """
    window = _Window(read)
    start = window.get(0, 32)
    size: Size | None = None
    if start.startswith(b"\xff\xd8"):
        size = _jpeg_size(window)
    elif start.startswith(b"\x89PNG\r\n\x1a\n") and start[12:16] == b"IHDR":
        size = int.from_bytes(start[20:24]), int.from_bytes(start[16:20])
    elif start.startswith((b"GIF87a", b"GIF89a")):
        size = int.from_bytes(start[8:10], "little"), int.from_bytes(start[6:8], "little")
    elif start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        size = _webp_size(start)
    return size if size and all(0 < side <= _MOST_PIXELS for side in size) else None


def _webp_size(start: bytes) -> Size | None:
    kind = start[12:16]
    if kind == b"VP8 " and start[23:26] == b"\x9d\x01\x2a":
        width, height = (int.from_bytes(start[i : i + 2], "little") & 0x3FFF for i in (26, 28))
        return height, width
    if kind == b"VP8L":
        bits = int.from_bytes(start[21:25], "little")
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    if kind == b"VP8X" and not start[20] & 8:  # with EXIF, it might be turned
        width, height = (int.from_bytes(start[i : i + 3], "little") + 1 for i in (24, 27))
        return height, width
    return None


def _jpeg_size(window: _Window) -> Size | None:
    position = 2
    payloads: list[bytes] = []
    has_exif = has_xmp = False
    for _ in range(_MOST_SEGMENTS):
        head = window.get(position, 4)
        while head[:2] == b"\xff\xff":  # fill bytes
            position += 1
            head = window.get(position, 4)
        if len(head) < 4 or head[0] != 0xFF or head[1] in (_SOS, 0xD9):
            return None
        code, length = head[1], int.from_bytes(head[2:])
        if code in _FRAMES:
            frame = window.get(position + 5, 4)
            height, width = int.from_bytes(frame[:2]), int.from_bytes(frame[2:])
            orientation = find_orientation(payloads)
            if has_xmp and not orientation:  # which may be in it
                return None
            return (width, height) if orientation >= 5 else (height, width)
        is_exif = code == _APP1 and window.get(position + 4, 6) == b"Exif\0\0"
        if is_exif and not has_exif:
            stop = _entries_stop(window, position + 4)
            if stop > min(length - 2, _MOST_METADATA):
                return None
            payloads.append(window.get(position + 4, stop))
            has_exif = True
        elif code == _APP1 and not is_exif:
            has_xmp |= length > _MOST_METADATA
            if length <= _MOST_METADATA:
                payloads.append(window.get(position + 4, length - 2))
        position += 2 + length
    return None


def _entries_stop(window: _Window, start: int) -> int:
    """Return the end, in its segment, of the entries of EXIF that may have the orientation."""
    head = window.get(start, 14)
    order: Literal["little", "big"] = "little" if head[6:8] == b"II" else "big"
    first = 6 + int.from_bytes(head[10:14], order)
    if first > _MOST_METADATA:
        return first
    return first + 2 + 12 * int.from_bytes(window.get(start + first, 2), order)
