"""The frame of a store's files: magic, version, checksum, and a header of plain values.

See docs/checkpoints-format.md, section 1. This is the room's door to msgpack, which executes
nothing and makes nothing but plain values. (The room of shards has its own, because neither of the
two rooms knows the other.)
"""

from __future__ import annotations

import struct
from typing import Any

import msgpack

from ..checksum import crc32c
from ..errorbound import compress, content_bytes, decompress
from ..errors import CorruptCheckpoint, UnsupportedVersion

VERSION = 1
VERSION_FILE = b"\x89PCD\r\n\x1a\n"
MANIFEST = b"\x89PCM\r\n\x1a\n"
# magic, CRC-32C of what follows up to the end of the header, version, header bytes
_HEAD = struct.Struct("<8sIIQ")
HEAD_BYTES = _HEAD.size
_CHECKED_FROM = 12
MAX_HEADER_BYTES = 1 << 26
MAX_PLAIN_BYTES = 1 << 28
# A byte of payload never stands for more: zstd and pcodec reach 32 and 75 Ki (measured on zeros).
MAX_RATIO = 1 << 17


def pack_frame(magic: bytes, header: Any) -> bytes:
    """The bytes of a frame up to the payloads."""
    packed = compress(msgpack.packb(header))
    rest = struct.pack("<IQ", VERSION, len(packed)) + packed
    return magic + struct.pack("<I", crc32c(rest)) + rest


def header_bytes(head: bytes | memoryview, magic: bytes) -> int:
    """Size of the packed header, from the first bytes of a file.

    Raises:
        CorruptCheckpoint: It is another kind of file, or cut.
        UnsupportedVersion: A newer pcrshard has written it.
    """
    if len(head) < HEAD_BYTES:
        raise CorruptCheckpoint(f"expected a head of {HEAD_BYTES} bytes, got {len(head)}")
    found, _, version, size = _HEAD.unpack_from(head)
    if found != magic:
        raise CorruptCheckpoint(f"expected the magic {magic!r}, got {found!r}")
    if version != VERSION:
        raise UnsupportedVersion(f"expected format version {VERSION}, got {version}")
    if size > MAX_HEADER_BYTES:
        raise CorruptCheckpoint(
            f"expected a header of {MAX_HEADER_BYTES} bytes at most, got {size}"
        )
    return int(size)


def unpack_frame(data: bytes | memoryview, magic: bytes) -> dict[str, Any]:
    """The header of a frame; ``data`` ends where the header ends.

    Raises:
        CorruptCheckpoint: A checksum or size is wrong, or the header is not plain values.
        UnsupportedVersion: A newer pcrshard has written it.
    """
    size = header_bytes(data, magic)
    if len(data) != HEAD_BYTES + size:
        raise CorruptCheckpoint(f"expected a header of {size} bytes, got {len(data) - HEAD_BYTES}")
    checksum = _HEAD.unpack_from(data)[1]
    if crc32c(data[_CHECKED_FROM:]) != checksum:
        raise CorruptCheckpoint("the header does not match its checksum")
    packed = data[HEAD_BYTES:]
    plain_bytes = content_bytes(packed)
    if plain_bytes > MAX_PLAIN_BYTES:
        raise CorruptCheckpoint(f"the header promises to hold {plain_bytes} bytes")
    return _unpack(decompress(packed, plain_bytes))


def _unpack(plain: bytes) -> dict[str, Any]:
    header = _unpack_any(plain)
    if not isinstance(header, dict):
        raise CorruptCheckpoint(f"expected a map, got {type(header).__name__}")
    return header


def _unpack_any(plain: bytes) -> Any:
    try:
        return msgpack.unpackb(plain, raw=False, strict_map_key=False, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise CorruptCheckpoint(f"the header is not msgpack: {error}") from error


def pack_plain(value: Any) -> bytes:
    """Plain values as msgpack, for digests."""
    return bytes(msgpack.packb(value))


def require(condition: object, message: str) -> None:
    """Raise :class:`CorruptCheckpoint` if a rule of the format is broken."""
    if not condition:
        raise CorruptCheckpoint(message)
