"""The frame of a store's files: magic, version, checksum, and a header of plain values.

See docs/checkpoints-format.md, section 1. msgpack executes nothing and builds only plain values;
what it would build is counted before it is built.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from typing import Any

import msgpack

from ..checksum import crc32c
from ..errorbound import compress, content_bytes, decompress
from ..errors import CorruptCheckpoint, PCRError, UnsupportedVersion

VERSION = 2
VERSION_FILE = b"\x89PCD\r\n\x1a\n"
MANIFEST = b"\x89PCM\r\n\x1a\n"
# Magic, CRC-32C of everything after it up to the end of the header, version, header bytes.
_HEAD = struct.Struct("<8sIIQ")
HEAD_BYTES = _HEAD.size
_CHECKED_FROM = 12
MAX_HEADER_BYTES = 1 << 28
# Memory that a byte of header may take once it is unpacked, and what any header may take.
_MAX_GROWTH = 64
_FREE_BYTES = 1 << 16
# One byte of payload never holds more: zstd and pcodec reach 32 and 75 Ki (measured on zeros).
MAX_RATIO = 1 << 17
_FIXED = {
    0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8,
    0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
}  # fmt: skip
# Types with a length: the bytes of the length.
_STRINGS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_ARRAYS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}


def pack_frame(magic: bytes, header: dict[str, Any]) -> bytes:
    """Pack a header; return the bytes of a file up to its payloads."""
    plain = msgpack.packb(header)
    packed = compress(plain)
    if unpacked_bytes(plain) > _limit(packed):
        packed = b"\x00" + plain  # compressed so well that a reader would take it for an attack
    rest = struct.pack("<IQ", VERSION, len(packed)) + packed
    return magic + struct.pack("<I", crc32c(rest)) + rest


def header_bytes(head: bytes | memoryview, magic: bytes, version: int = VERSION) -> int:
    """Return the size of the packed header, given the first bytes of a file.

    Raises:
        CorruptCheckpoint: The file is of another kind, or truncated.
        UnsupportedVersion: It has another format version.
    """
    if len(head) < HEAD_BYTES:
        raise CorruptCheckpoint(f"expected a head of {HEAD_BYTES} bytes, got {len(head)}")
    found, _, found_version, size = _HEAD.unpack_from(head)
    if found != magic:
        raise CorruptCheckpoint(f"expected the magic {magic!r}, got {found!r}")
    if found_version != version:
        hint = ": run `pcrshard checkpoint convert`" if found_version < version else ""
        raise UnsupportedVersion(f"expected format version {version}, got {found_version}{hint}")
    if size > MAX_HEADER_BYTES:
        raise CorruptCheckpoint(f"expected at most {MAX_HEADER_BYTES} header bytes, got {size}")
    return int(size)


def unpack_frame(
    data: bytes | memoryview,
    magic: bytes,
    *,
    version: int = VERSION,
    max_bytes: int = MAX_HEADER_BYTES,
) -> dict[str, Any]:
    """Unpack the header of a frame; ``data`` ends where the header ends.

    The values take at most 64 times the bytes of the header (and 64 KiB), and ``max_bytes``.

    Raises:
        CorruptCheckpoint: A checksum or size is wrong, or the header is not a map of plain values.
        UnsupportedVersion: It has another format version.
    """
    size = header_bytes(data, magic, version)
    require(len(data) == HEAD_BYTES + size, f"expected a header of {size} bytes")
    checksum = _HEAD.unpack_from(data)[1]
    require(crc32c(data[_CHECKED_FROM:]) == checksum, "the header does not match its checksum")
    packed = data[HEAD_BYTES:]
    plain_bytes = content_bytes(packed)
    limit = min(_limit(packed), max_bytes)
    require(plain_bytes <= limit, f"the header promises to hold {plain_bytes} bytes")
    plain = decompress(packed, plain_bytes)
    require(unpacked_bytes(plain) <= limit, f"the header would take more than {limit} bytes")
    with damage_named("the header is not msgpack"):
        header = msgpack.unpackb(plain, raw=False, strict_map_key=False, max_ext_len=0)
    require(isinstance(header, dict), "expected a map as the header")
    return dict(header)


def _limit(packed: bytes | memoryview) -> int:
    return _FREE_BYTES + _MAX_GROWTH * len(packed)


def unpacked_bytes(plain: bytes) -> int:
    """Count the memory that msgpack's objects will take, without building them.

    Raises:
        CorruptCheckpoint: The bytes end early, go on too long, or hold an extension type.
    """
    position = taken = 0
    size = len(plain)
    left = 1
    while left:
        # Every object has a byte of its own, which also bounds what arrays claim to hold.
        require(left <= size - position, "the header is truncated")
        kind = plain[position]
        position += 1
        left -= 1
        taken += 8
        if kind < 0x80 or kind >= 0xE0:
            continue
        if kind in _FIXED:
            taken += 32
            position += _FIXED[kind]
            continue
        count, width = _length(plain, position, kind)
        position += width
        if 0xA0 <= kind < 0xC0 or kind in _STRINGS:
            position += count
            taken += 57 + count
        elif kind < 0x90 or kind in _MAPS:
            left += 2 * count
            taken += 64 if count == 0 else 184 + 48 * count
        else:
            left += count
            taken += 56
    require(position == size, "expected the header to end where its bytes end")
    return taken


def _length(plain: bytes, position: int, kind: int) -> tuple[int, int]:
    """Return the length that an object states, and the bytes that state it."""
    if kind < 0xA0:
        return kind & 0x0F, 0
    if kind < 0xC0:
        return kind & 0x1F, 0
    width = _STRINGS.get(kind) or _ARRAYS.get(kind) or _MAPS.get(kind)
    if width is None:
        raise CorruptCheckpoint(f"expected plain values, got type {kind:#x}")
    return int.from_bytes(plain[position : position + width]), width


def pack_plain(value: Any) -> bytes:
    """Pack plain values for digests."""
    return bytes(msgpack.packb(value))


def require(condition: object, message: str) -> None:
    """Raise :class:`CorruptCheckpoint` if a rule of the format is broken."""
    if not condition:
        raise CorruptCheckpoint(message)


@contextlib.contextmanager
def damage_named(message: str, url: str | None = None, key: str | None = None) -> Iterator[None]:
    """Map whatever hostile bytes raise to :class:`CorruptCheckpoint`, with file and tensor."""
    try:
        yield
    except PCRError as error:
        if " (file=" in str(error) or (url is None and key is None):
            raise
        raise type(error)(str(error), url=url, key=key) from error.__cause__
    except (TypeError, ValueError, ArithmeticError, LookupError, RuntimeError) as error:
        text = f"{message}: {type(error).__name__}: {error}"
        raise CorruptCheckpoint(text, url=url, key=key) from error
