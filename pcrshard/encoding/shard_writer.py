"""Samples to shards.

:func:`encode_jpeg` turns one JPEG into pieces, :func:`write_shard` lays a list of samples out as one shard, :class:`ShardWriter` does so for a
stream of samples in one process; :mod:`.encode_dataset` does it for a whole dataset in parallel.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import numbers
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np

from .. import storage
from ..checksum import crc32c
from ..errors import CorruptIndex, EncodeError, PCRError
from ..format.dataset_index import DATASET_INDEX, DatasetIndex, ShardEntry
from ..format.names import (
    JPEG_EXTENSIONS,
    check_name,
    is_metadata,
    shard_name,
    valid_field,
    valid_key,
)
from ..format.scan_script import Q95, STANDARD, ScanScript
from ..format.shard_index import MAX_PIECE_BYTES, Head, Schema, ShardIndex, check_schema, round512
from ..format.tar_members import TRAILER, index_name, lay_out, plan_members, tar_header
from .encode_jpeg import EncodedImage, encode_jpeg

SCRIPTS = {script.name: script for script in (STANDARD, Q95)}


class EncodedSample(NamedTuple):
    """A sample ready to be laid out."""

    key: str
    images: dict[str, EncodedImage]
    fields: dict[str, bytes]


@dataclasses.dataclass(frozen=True)
class ShardFormat:
    """How shards are written.

    Attributes:
        script: The scan script, or the name of a built-in one.
        layout: ``compact``, or ``preview`` to show base scans as ordinary image members.
        base: Scan groups in a preview member.
        preview_fields: Fields stored once more as members in the preview layout.
    """

    script: ScanScript | str = STANDARD.name
    layout: str = "compact"
    base: int = 2
    preview_fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.script, str) and self.script not in SCRIPTS:
            raise EncodeError(f"expected a scan script of {sorted(SCRIPTS)}, got {self.script!r}")
        if self.layout not in ("compact", "preview"):
            raise EncodeError(f"expected layout 'compact' or 'preview', got {self.layout!r}")
        if not 1 <= self.base <= self.scan_script.num_groups:
            raise EncodeError(
                f"expected base of 1 to {self.scan_script.num_groups}, got {self.base}"
            )

    @property
    def scan_script(self) -> ScanScript:
        """The script itself."""
        return SCRIPTS[self.script] if isinstance(self.script, str) else self.script


def encode_sample(sample: Mapping[str, Any], script: ScanScript = STANDARD) -> EncodedSample:
    """Encode a sample as WebDataset gives it: ``__key__``, image fields as bytes, other fields as bytes, str, int, or JSON-able.

    Fields whose last extension is a JPEG one become progressive streams; names starting with ``__`` are dropped.

    Raises:
        EncodeError: A key or field name is not legal.
        CorruptJpeg, UnsupportedJpeg: An image is refused; the message names key and field.
    """
    key = sample.get("__key__")
    if not isinstance(key, str) or not valid_key(key):
        raise EncodeError(
            f"expected a key without dots in its last part, '..' or a leading '/', got {key!r}"
        )
    if is_metadata(f"{key}."):
        raise EncodeError(
            f"expected a key that is not in a folder named __...__, which WebDataset passes over, got {key!r}"
        )
    images, fields = {}, {}
    for name, value in sample.items():
        if name.startswith("__"):
            continue
        if not valid_field(name):
            raise EncodeError(
                f"expected a field name in lower case without blanks, got {name!r}", key=key
            )
        if name.rpartition(".")[2] not in JPEG_EXTENSIONS:
            fields[name] = _to_bytes(name, value, key)
            continue
        if not isinstance(value, bytes | bytearray | memoryview):
            raise EncodeError(
                f"expected a JPEG's bytes in field {name!r}, got {type(value).__name__}", key=key
            )
        try:
            images[name] = encode_jpeg(bytes(value), script)
        except PCRError as error:
            raise type(error)(str(error), key=f"{key}.{name}") from error
    return EncodedSample(key, images, fields)


def _to_bytes(name: str, value: object, key: str) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview) and len(value) > MAX_PIECE_BYTES:
        raise EncodeError(
            f"field {name!r} of {len(value)} bytes is larger than {MAX_PIECE_BYTES}", key=key
        )
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    try:
        if isinstance(value, str):
            return value.encode()
        if isinstance(value, numbers.Integral):
            return str(int(value)).encode()
        if isinstance(value, list | dict | float) and name.rpartition(".")[2] in ("json", "jsn"):
            return json.dumps(value).encode()
    except (TypeError, ValueError) as error:
        raise EncodeError(f"cannot store field {name!r}: {error}", key=key) from error
    raise EncodeError(
        f"expected bytes, str or int in field {name!r}, got {type(value).__name__}", key=key
    )


def write_shard(
    url: str,
    samples: Sequence[EncodedSample],
    fmt: ShardFormat,
    *,
    names: tuple[Sequence[str], Sequence[str]] | None = None,
    options: storage.Options | None = None,
) -> ShardEntry:
    """Write one shard, atomically.

    Args:
        url: Where; the name must end with ``.tar``.
        samples: At least one.
        fmt: Script and layout.
        names: Streams and fields, so that all shards of a dataset list the same ones; by default those of the samples.
        options: fsspec storage options.

    Returns:
        The shard's entry for the dataset index.
    """
    name = url.rstrip("/").rpartition("/")[2]
    stem = name.removesuffix(".tar")
    index = _make_index(samples, fmt, names)
    index, index_bytes = lay_out(index, stem)
    with storage.atomic_write(url, options=options) as raw:
        file = _Checksummed(raw)
        _write_member(
            file, tar_header(index_name(index.schema, stem), len(index_bytes)), [index_bytes]
        )
        streams = [field for field, _ in index.schema.streams]
        for member in plan_members(index, stem):
            parts = (samples[s].images[streams[m]].pieces[row] for row, s, m in member.pieces)
            _write_member(file, member.header(), [*parts, member.literal])
        file.write(TRAILER)
    head_crc = int.from_bytes(index_bytes[8:12], "little")
    return ShardEntry(name, len(samples), head_crc, file.size, file.crc, index.head.prefix_stops)


class _Checksummed:
    """A file to write to, with the size and CRC-32C of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.crc = file, 0, 0

    def write(self, data: bytes) -> int:
        self.size += len(data)
        self.crc = crc32c(data, self.crc)
        return self.file.write(data)


def _write_member(file: _Checksummed, header: bytes, parts: Sequence[bytes]) -> None:
    file.write(header)
    size = 0
    for part in parts:
        size += file.write(part)
    file.write(bytes(round512(size) - size))


def _make_index(
    samples: Sequence[EncodedSample],
    fmt: ShardFormat,
    names: tuple[Sequence[str], Sequence[str]] | None,
) -> ShardIndex:
    """The index of the samples, without offsets and checksums of its own."""
    counts = collections.Counter(sample.key for sample in samples)
    if len(counts) != len(samples):
        raise EncodeError(
            f"expected distinct keys in a shard, {max(counts, key=counts.__getitem__)!r} is there more than once"
        )
    streams, fields = names or (
        _union(s.images for s in samples),
        _union(s.fields for s in samples),
    )
    preview = fmt.layout == "preview"
    schema = Schema(
        fmt.scan_script.name,
        fmt.scan_script.groups,
        fmt.layout,
        fmt.base if preview else 0,
        tuple((stream, "jpeg") for stream in streams),
        tuple(fields),
        tuple(field for field in fmt.preview_fields if field in fields) if preview else (),
    )
    num_rows, shape = fmt.scan_script.num_groups + 1, (len(samples), len(streams))
    try:
        check_schema(schema)
    except CorruptIndex as error:
        raise EncodeError(f"cannot write samples of so many or such fields: {error}") from error
    sizes, crcs = np.zeros((2, num_rows, *shape), "<u4")
    dims, orientation = np.zeros((*shape, 2), "<u2"), np.zeros(shape, "<u1")
    for s, sample in enumerate(samples):
        for m, stream in enumerate(streams):
            image = sample.images.get(stream)
            if image is None:
                continue
            sizes[:, s, m] = [len(piece) for piece in image.pieces]
            crcs[:, s, m] = _running_crcs(image.pieces)
            dims[s, m] = image.height, image.width
            orientation[s, m] = image.orientation
    offsets = np.zeros(shape if preview else (0, shape[1]), "<u8")
    values = {name: tuple(sample.fields.get(name) for sample in samples) for name in fields}
    keys = tuple(sample.key for sample in samples)
    head = Head(len(samples), 0, 0, 0, (0,) * num_rows)
    return ShardIndex(head, schema, sizes, crcs, dims, orientation, offsets, keys, values)


def _running_crcs(pieces: Sequence[bytes]) -> list[int]:
    """CRC-32C of each prefix of the scan groups, then that of the tail alone."""
    *groups, tail = pieces
    return [
        *[*itertools.accumulate(groups, lambda crc, piece: crc32c(piece, crc), initial=0)][1:],
        crc32c(tail),
    ]


def _union(names: Any) -> list[str]:
    return list(dict.fromkeys(name for sample in names for name in sample))


class ShardWriter:
    """Write samples to shards ``DST/NAME-000000.tar``, ... and their dataset index ``pcr.json``, in one process.

    >>> with ShardWriter("out", samples_per_shard=1024) as writer:  # doctest: +SKIP
    ...     writer.write({"__key__": "a/0001", "jpg": jpeg, "cls": 3})

    Args:
        dst: Folder, local or an fsspec URL.
        name: Shards' name before the number.
        samples_per_shard: A shard is held in memory until it is full.
        fmt: Script and layout.
        classes: Class names, stored in the dataset index.
        storage_options: fsspec storage options.
    """

    def __init__(
        self,
        dst: str | os.PathLike[str],
        *,
        name: str = "data",
        samples_per_shard: int = 1024,
        fmt: ShardFormat = ShardFormat(),
        classes: Sequence[str] = (),
        storage_options: storage.Options | None = None,
    ) -> None:
        check_name(name)
        if samples_per_shard < 1:
            raise EncodeError(f"expected at least one sample per shard, got {samples_per_shard}")
        dst = os.fspath(dst)
        self.dst, self.name, self.fmt, self.classes = dst, name, fmt, tuple(classes)
        self.samples_per_shard = samples_per_shard
        self._options = storage_options
        self._pending: list[EncodedSample] = []
        self._entries: list[ShardEntry] = []
        for used in (DATASET_INDEX, shard_name(name, 0)):
            if storage.exists(storage.join(dst, used), options=storage_options):
                raise EncodeError(
                    f"{dst} already holds a dataset ({used}): use another folder, or remove it"
                )

    def write(self, sample: Mapping[str, Any]) -> None:
        """Encode a sample and, when the shard is full, write it; see :func:`encode_sample`."""
        self._pending.append(encode_sample(sample, self.fmt.scan_script))
        if len(self._pending) >= self.samples_per_shard:
            self._flush()

    def _flush(self) -> None:
        url = storage.join(self.dst, shard_name(self.name, len(self._entries)))
        self._entries.append(write_shard(url, self._pending, self.fmt, options=self._options))
        self._pending = []

    def close(self) -> DatasetIndex:
        """Write the last shard and the dataset index."""
        if self._pending:
            self._flush()
        if not self._entries:
            raise EncodeError(f"no sample was written to {self.dst}")
        index = DatasetIndex(
            self.fmt.scan_script.name,
            self.fmt.scan_script.num_groups,
            tuple(self._entries),
            self.classes,
        )
        write_dataset_index(self.dst, index, options=self._options)
        return index

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()


def write_dataset_index(
    dst: str, index: DatasetIndex, *, options: storage.Options | None = None
) -> None:
    """Write ``pcr.json`` into a folder, atomically."""
    with storage.atomic_write(storage.join(dst, DATASET_INDEX), options=options) as file:
        file.write(index.encode())
