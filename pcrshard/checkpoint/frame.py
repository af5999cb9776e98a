"""The common frame of a store's files: magic, checksum, version, and typed header.

See docs/checkpoints-format.md, section 1. Headers are decoded directly into the types
below: nothing is executed, and no container is preallocated from an untrusted count. Headers are
not compressed, so a decoded header takes at most 64 times its size in memory.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from typing import Annotated, Any, Self, TypeVar

import msgspec

from ..checksum import crc32c
from ..errors import CorruptCheckpoint, FormatError, PCRError, UnsupportedState, UnsupportedVersion

VERSION = 2
# Magic, CRC-32C of everything from after it to the end of the header, version, header size.
_HEAD = struct.Struct("<8sIIQ")
HEAD_BYTES = _HEAD.size
_CHECKED_FROM = 12
MAX_HEADER_BYTES = 1 << 26
# Headers up to this size are read regardless of the caller's memory limit.
_FREE_BYTES = 1 << 16
# Bytes of memory per byte of an encoded header, at most.
_GROWTH = 64

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
HeaderBytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_HEADER_BYTES)]
Number = Annotated[int, msgspec.Meta(ge=1, lt=1 << 48)]
Checksum = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]
MAX_TEXT = 4096
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
FileName = Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{6,12}-[0-9a-f]{16}\.pcd\Z")]
Metrics = dict[str, bool | int | float | str | None]
# Seconds since 1970; larger values have no datetime.
Time = Annotated[float, msgspec.Meta(ge=0, lt=2.0**40)]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base class for header records, whose field types are checked during decoding."""

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields replaced."""
        return msgspec.structs.replace(self, **changes)


T = TypeVar("T", bound=Record)


def know_types(kind: Any) -> None:
    """Let msgspec look at a type of headers and the types in it, before there are threads.

    It does so at their first use, and crashes if another thread uses what it has seen by then.
    """
    msgspec.msgpack.Decoder(kind)


def encode(value: Any) -> bytes:
    """Encode plain values or records as msgpack."""
    return msgspec.msgpack.encode(value)


def plain_metrics(metrics: Any) -> Metrics:
    """Return a copy of metrics; raise ``ValueError`` unless they are numbers or strings."""
    try:
        # Scalars of numpy and torch.
        plain = {name: v.item() if hasattr(v, "item") else v for name, v in metrics.items()}
        return msgspec.msgpack.decode(encode(plain), type=Metrics)
    except (
        msgspec.MsgspecError, AttributeError, TypeError, OverflowError, ValueError, RuntimeError
    ) as error:  # fmt: skip
        raise ValueError(f"expected numbers and strings as metrics: {error}") from error


def pack_frame(magic: bytes, header: Record, num_bytes: int = 0) -> bytes:
    """Encode a header and return the bytes of the file up to its payloads.

    Args:
        magic: The magic of the file's type.
        header: The header.
        num_bytes: The smallest size of the result; what is left is filled with zeros.

    Raises:
        UnsupportedState: The header is larger than readers accept.
    """
    body = encode(header)
    body = body.rjust(num_bytes - HEAD_BYTES, b"\0")
    if len(body) > MAX_HEADER_BYTES:
        raise UnsupportedState(
            f"expected at most {MAX_HEADER_BYTES} bytes of values other than tensors, or of "
            f"metrics of all versions, got {len(body)}: keep large values in tensors or arrays"
        )
    rest = struct.pack("<IQ", VERSION, len(body)) + body
    return magic + struct.pack("<I", crc32c(rest)) + rest


def header_limit(max_bytes: int) -> int:
    """Return the largest header size that takes at most ``max_bytes`` of memory to decode."""
    return min(max(max_bytes // _GROWTH, _FREE_BYTES), MAX_HEADER_BYTES)


def unpack_frame(
    data: memoryview, magic: bytes, kind: type[T], max_bytes: int = 1 << 62
) -> tuple[T, memoryview]:
    """Decode the header of a frame; return it and the bytes after it.

    Raises:
        CorruptCheckpoint: The checksum or the size is wrong, or the file has another type.
        msgspec.ValidationError: A field is wrong: see :func:`damage_named`.
        UnsupportedVersion: The file has an unsupported format version.
    """
    require(len(data) >= HEAD_BYTES, "the file is truncated")
    found, checksum, version, size = _HEAD.unpack_from(data)
    require(found == magic, f"expected a file that starts with {magic!r}, got {found!r}")
    if version != VERSION:
        raise UnsupportedVersion(f"expected format version {VERSION}, got {version}")
    stop = HEAD_BYTES + size
    require(len(data) >= stop, "the file is truncated")
    require(crc32c(data[_CHECKED_FROM:stop]) == checksum, "the header does not match its checksum")
    header = data[HEAD_BYTES:stop]
    limit = header_limit(max_bytes)
    message = f"expected at most {limit} header bytes, got {len(header)}, see max_bytes"
    require(len(header) <= limit, message)
    return msgspec.msgpack.decode(bytes(header).lstrip(b"\0"), type=kind), data[stop:]


def require(condition: object, message: str) -> None:
    """Raise :class:`CorruptCheckpoint` if the file violates a format rule."""
    if not condition:
        raise CorruptCheckpoint(message)


@contextlib.contextmanager
def damage_named(message: str, url: str | None = None, key: str | None = None) -> Iterator[None]:
    """Convert decoding errors to :class:`CorruptCheckpoint` that names the file and tensor."""
    try:
        yield
    except PCRError as error:
        if error.url is not None:
            raise
        if type(error) in (FormatError, CorruptCheckpoint):
            error = CorruptCheckpoint(f"{message}: {error}")
        raise type(error)(str(error), url=url, key=key) from error.__cause__
    except (
        msgspec.MsgspecError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError,
        RuntimeError,
    ) as error:  # fmt: skip
        text = f"{message}: {type(error).__name__}: {error}"
        raise CorruptCheckpoint(text, url=url, key=key) from error
