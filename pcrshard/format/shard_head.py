"""The head of a shard: the 512 bytes after the first tar header (SPEC.md section 2.1).

Bytes in, bytes out; no I/O. The checksum is verified before any number is trusted.
"""

from __future__ import annotations

import functools
import struct
from typing import NamedTuple

from ..checksum import crc32c
from ..errors import CorruptIndex, NotAShard, TruncatedShard, UnsupportedVersion, naming
from ..memory import Buffer
from .scan import Scan, check_scan
from .scan_script import MAX_GROUPS

VERSION = 3
MAGIC = b"\x89PCR\r\n\x1a\n"
BLOCK = 512
HEAD_STOP = 2 * BLOCK
# What ends a tar.
TRAILER = bytes(2 * BLOCK)
MAX_SAMPLES = 1 << 24
MAX_SCHEMA_BYTES = 1 << 16
# Least bytes of a sample in the columns (SPEC 2.3): a key of one character and its length.
MIN_SAMPLE_BYTES = 5
# Bound of the ratio that compressed columns may claim.
MAX_EXPANSION = 64

# Magic, checksum, version, samples, groups, schema bytes, body checksum, body bytes, column bytes.
_HEAD = struct.Struct("<8sIIIIIIQQ")


def round512(size: int) -> int:
    """Round a size in bytes up to a multiple of tar's block of 512."""
    return -(-size // BLOCK) * BLOCK


class Head(NamedTuple):
    """The part of a shard's index that locates everything else, and its checksums.

    Its own checksum, :attr:`crc32c`, identifies the content of the whole shard: it covers those of
    the body and the tables, which cover every piece and value.

    Attributes:
        num_samples: Samples in the shard.
        schema_bytes: Size of the schema.
        body_bytes: Size of schema and columns.
        body_crc32c: CRC-32C of both.
        columns_bytes: Size of the columns, which are compressed if the body has fewer bytes.
        prefix_stops: An absolute end for each of scans 1..N and then for ``"full"``.
        table_bytes: Size of the table at the start of each group, and then of the tail.
        table_crcs: CRC-32C of each of these tables, 0 for none.
    """

    num_samples: int
    schema_bytes: int
    body_bytes: int
    body_crc32c: int
    columns_bytes: int
    prefix_stops: tuple[int, ...]
    table_bytes: tuple[int, ...]
    table_crcs: tuple[int, ...]

    @property
    def num_groups(self) -> int:
        """Scan groups N."""
        return len(self.prefix_stops) - 1

    @property
    def index_stop(self) -> int:
        """End of the index member, padding included: the prefix stop of scan 0."""
        return round512(self.body_stop)

    @property
    def body_stop(self) -> int:
        """End of the index's body, before its padding."""
        return HEAD_STOP + self.body_bytes

    @property
    def stops(self) -> tuple[int, ...]:
        """The prefix stops of scans 0..N, and of ``"full"``."""
        return (self.index_stop, *self.prefix_stops)

    @property
    def crc32c(self) -> int:
        """The checksum that identifies the shard's content."""
        return int.from_bytes(self.encode()[8:12], "little")

    def prefix_stop(self, scan: Scan) -> int:
        """Return the end of the prefix of scans 1..scan, in bytes; scan 0 is the index.

        Raises:
            TypeError, ScanUnavailable: See :func:`check_scan`.
        """
        return self.stops[check_scan(scan, self.num_groups, 0)]

    def encode(self) -> bytes:
        """Return the 512 bytes of SPEC 2.1."""
        head = _HEAD.pack(
            MAGIC,
            0,
            VERSION,
            self.num_samples,
            self.num_groups,
            self.schema_bytes,
            self.body_crc32c,
            self.body_bytes,
            self.columns_bytes,
        )
        stops = (stop // BLOCK for stop in self.prefix_stops)
        head += _groups(self.num_groups).pack(*stops, *self.table_bytes, *self.table_crcs)
        head = head.ljust(BLOCK, b"\0")
        return head[:8] + crc32c(head).to_bytes(4, "little") + head[12:]


@functools.cache
def _groups(num_groups: int) -> struct.Struct:
    """Return the prefix stops, table sizes and table checksums of the groups and the tail."""
    return struct.Struct(f"<{3 * (num_groups + 1)}I")


def is_tar(start: Buffer) -> bool:
    """Return whether a file that starts with these (at least 262) bytes is a POSIX tar."""
    return bytes(start[257:262]) == b"ustar"


def read_head(start: Buffer, *, url: str | None = None) -> Head:
    """Parse and check the head of a shard (SPEC 2.1).

    Args:
        start: The first 1024 bytes of the shard; more are ignored.
        url: Named in errors.

    Raises:
        NotAShard: The file is not a tar, or not a shard.
        UnsupportedVersion: This reader does not support its format version.
        CorruptIndex: The checksum does not match or a number breaks a rule.
        TruncatedShard: There are fewer bytes.
    """
    with naming(url):
        if not is_tar(start):
            raise NotAShard("expected a PCR shard, got something that is not a tar")
        head = _parse_head(bytes(start[BLOCK:HEAD_STOP]))
        _check_head(head)
    return head


def _parse_head(block: bytes) -> Head:
    if not MAGIC.startswith(block[:8]):
        raise NotAShard(
            "expected a PCR shard, its magic is not there; make one with `pcrshard encode`, or "
            "read plain tars as they are by `pcrshard index`"
        )
    if len(block) < BLOCK:
        raise TruncatedShard(f"expected {HEAD_STOP} bytes of head, got {BLOCK + len(block)}")
    _, crc, version, *rest = _HEAD.unpack_from(block)
    require(crc == crc32c(block[:8] + bytes(4) + block[12:]), "head checksum does not match")
    check_version(version)
    num_samples, num_groups, schema_bytes, body_crc, body_bytes, columns_bytes = rest
    _check_count("num_groups", num_groups, MAX_GROUPS, 0)
    groups = _groups(num_groups)
    numbers = groups.unpack_from(block, _HEAD.size)
    padding = block[_HEAD.size + groups.size :]
    require(not padding.strip(b"\0"), "head padding is not zero")
    rows = num_groups + 1
    stops = tuple(blocks * BLOCK for blocks in numbers[:rows])
    tables, crcs = numbers[rows : 2 * rows], numbers[2 * rows :]
    for size, crc in zip(tables, crcs, strict=True):
        require(size or not crc, "a table that is not there has a checksum")
    return Head(num_samples, schema_bytes, body_bytes, body_crc, columns_bytes, stops, tables, crcs)


def check_version(version: object) -> None:
    """Raise :class:`UnsupportedVersion` unless this reader supports the format version."""
    if version in (1, 2):
        raise UnsupportedVersion(
            f"expected format version {VERSION}, got {version}, which was never released; "
            "encode the source again with `pcrshard encode`"
        )
    if version != VERSION:
        raise UnsupportedVersion(
            f"expected format version {VERSION}, got {version!r}; a newer pcrshard reads it"
        )


def _check_head(head: Head) -> None:
    _check_count("num_samples", head.num_samples, MAX_SAMPLES)
    _check_count("schema_bytes", head.schema_bytes, MAX_SCHEMA_BYTES)
    columns_bytes = head.columns_bytes
    stored_bytes = head.body_bytes - head.schema_bytes
    require(
        head.num_samples * MIN_SAMPLE_BYTES <= columns_bytes,
        f"columns_bytes {columns_bytes} cannot hold {head.num_samples} samples",
    )
    # Also if the schema is larger than the body.
    require(
        stored_bytes <= columns_bytes <= MAX_EXPANSION * stored_bytes,
        f"columns_bytes {columns_bytes} do not fit {stored_bytes} stored",
    )
    rising = list(head.stops) == sorted(head.stops)
    require(rising, "prefix stops fall, or are before the end of the index")


def _check_count(name: str, number: int, most: int, least: int = 1) -> None:
    require(least <= number <= most, f"{name} {number} is not in {least}..{most}")


def require(condition: object, message: str) -> None:
    """Raise :class:`CorruptIndex` unless a condition holds."""
    if not condition:
        raise CorruptIndex(message)
