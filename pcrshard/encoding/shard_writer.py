"""Writing samples to shards, in one process.

:func:`encode_sample` encodes one sample, :func:`write_shard` writes a list of them as one shard,
and :class:`ShardWriter` writes a stream of samples. :mod:`.encode_dataset` encodes a whole dataset
in parallel.
"""

from __future__ import annotations

import collections
import itertools
import json
import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from .. import storage
from ..checksum import crc32c
from ..errors import EncodeError, naming
from ..format.columns import ABSENT
from ..format.dataset_index import DATASET_INDEX, DatasetIndex, ShardEntry
from ..format.group_table import GroupTable, LateValues
from ..format.names import (
    MAX_KEY_BYTES,
    check_name,
    is_jpeg_field,
    is_metadata,
    numbered,
    shard_name,
    valid_field,
    valid_key,
)
from ..format.scan_script import ScanScript
from ..format.schema import IMAGE, IMAGE_LIST, Schema
from ..format.shard_format import FieldNames, ShardFormat
from ..format.shard_head import BLOCK, Head
from ..format.shard_index import MAX_LISTED, MAX_PIECE_BYTES, ShardIndex
from ..format.tar_members import TRAILER, Member, index_name, lay_out, plan_members
from ..storage.ownership import give_up_folder, take_folder
from .encode_jpeg import EncodedImage, encode_jpeg
from .labels import check_classes, count_classes


class EncodedSample(NamedTuple):
    """A sample that is ready to be written.

    Attributes:
        key: Its key.
        images: Its JPEG fields, each an image or a list of images.
        fields: Its other fields; one named like a JPEG field is a passthrough file.
    """

    key: str
    images: dict[str, EncodedImage | list[EncodedImage]]
    fields: dict[str, bytes]


_BYTES = bytes | bytearray | memoryview
Samples = Sequence[EncodedSample]
Units = Sequence[EncodedImage]


def encode_sample(
    sample: Mapping[str, Any],
    encode_image: Callable[[str, bytes], EncodedImage | None] = lambda _, file: encode_jpeg(file),
) -> EncodedSample:
    """Encode a sample in WebDataset's format.

    Args:
        sample: ``__key__``, image fields as bytes, and other fields as bytes, str, int, or values
            that JSON can represent. Fields with a JPEG extension become progressive streams; a list
            of up to 64 JPEGs in one field becomes a stream of lists. Names that start with ``__``
            are dropped.
        encode_image: Called with the name and the bytes of each image; returns the encoded image,
            or ``None`` to store the bytes unchanged.

    Raises:
        EncodeError: A key or field name is invalid.
        CorruptJpeg, UnsupportedJpeg: An image is rejected; the message names its key and field.
    """
    key = sample.get("__key__")
    if not isinstance(key, str) or not valid_key(key) or is_metadata(f"{key}."):
        raise EncodeError(
            f"expected a key of at most {MAX_KEY_BYTES} bytes without dots in its last part, '..', "
            f"a leading '/' or a folder named __...__, which WebDataset skips, got {key!r}"
        )
    encoded = EncodedSample(key, {}, {})
    for name, value in sample.items():
        if name.startswith("__"):
            continue
        try:
            if not valid_field(name):
                raise EncodeError(f"expected a lowercase field name without spaces, got {name!r}")
            if is_jpeg_field(name):
                _encode_images(encoded, name, value, encode_image)
            else:
                encoded.fields[name] = _field_bytes(name, value)
        except EncodeError as error:
            raise EncodeError(str(error), key=key) from error
    return encoded


def _encode_images(
    encoded: EncodedSample,
    name: str,
    value: Any,
    encode_image: Callable[[str, bytes], EncodedImage | None],
) -> None:
    """Add the image or the list of images of a field.

    A file to store unchanged becomes a field. In a list, all files then become numbered fields.
    """
    is_list = isinstance(value, list | tuple)
    files = {numbered(name, i): file for i, file in enumerate(value)} if is_list else {name: value}
    if len(files) > MAX_LISTED:
        raise EncodeError(f"expected at most {MAX_LISTED} images in {name!r}, got {len(files)}")
    images = []
    for field, file in files.items():
        if not isinstance(file, _BYTES):
            got = type(file).__name__
            raise EncodeError(f"expected a JPEG's bytes in field {field!r}, got {got}")
        with naming(key=f"{encoded.key}.{field}"):
            images.append(encode_image(field, bytes(file)))
    layered = [image for image in images if image is not None]
    if len(layered) < len(images):
        encoded.fields.update((field, _field_bytes(field, file)) for field, file in files.items())
    else:
        encoded.images[name] = layered if is_list else layered[0]


def _field_bytes(name: str, value: object) -> bytes:
    """Return the bytes of a field that is not a JPEG.

    Raises:
        EncodeError: The value has another type or is too large.
    """
    if isinstance(value, _BYTES):
        if len(value) > MAX_PIECE_BYTES:
            raise EncodeError(
                f"expected at most {MAX_PIECE_BYTES} bytes in field {name!r}, got {len(value)}"
            )
        return bytes(value)
    try:
        if isinstance(value, str):
            return value.encode()
        if isinstance(value, numbers.Integral):
            return str(int(value)).encode()
        if name.endswith(("json", "jsn")):
            return json.dumps(value).encode()
    except (TypeError, ValueError) as error:
        raise EncodeError(f"cannot store field {name!r}: {error}") from error
    raise EncodeError(f"expected bytes, str or int in field {name!r}, got {type(value).__name__}")


def write_shard(
    url: str,
    samples: Samples,
    fmt: ShardFormat,
    *,
    names: FieldNames = FieldNames((), ()),
    options: storage.Options = None,
    replace: bool = True,
) -> ShardEntry:
    """Write one shard, atomically.

    Args:
        url: Where to write it; the name must end with ``.tar``.
        samples: At least one sample.
        fmt: Script and layout.
        names: Fields to list before any others of the samples, so that all shards of a dataset
            list the same ones.
        options: fsspec storage options.
        replace: Whether the file may exist already.

    Returns:
        The shard's entry for the dataset index.

    Raises:
        EncodeError: Two samples have the same key, or there are too many fields.
        StorageError: The shard cannot be written, or exists.
    """
    name = storage.file_name(url)
    stem = name.removesuffix(".tar")
    # Each field once, in order of first appearance.
    streams, others = dict.fromkeys(names.streams), dict.fromkeys(names.others)
    for sample in samples:
        for field, image in sample.images.items():
            streams[field, IMAGE_LIST if isinstance(image, list) else IMAGE] = None
        others |= dict.fromkeys(sample.fields)
    schema = fmt.schema(FieldNames(tuple(streams), tuple(others)))
    units = _list_units(samples, schema)
    index = _make_index(samples, units, schema)
    index, tables, index_bytes = lay_out(index, _make_tables(samples, units, index), stem)
    size = 0
    crc = 0
    with storage.atomic_write(url, options=options, replace=replace) as file:
        first = Member(index_name(schema, stem), 0, len(index_bytes), literal=index_bytes)
        members = (first, *plan_members(index, tables, stem))
        contents = _member_bytes(members, samples, units, schema.base)
        for data in itertools.chain(contents, [TRAILER]):
            file.write(data)
            size += len(data)
            crc = crc32c(data, crc)
    head = index.head
    return ShardEntry(
        name,
        len(samples),
        head.crc32c,
        size,
        crc,
        head.prefix_stops,
        head.index_stop,
    )


def _list_units(samples: Samples, schema: Schema) -> Units:
    """Return the images of a shard in order, an empty one for each stream that a sample lacks."""
    num_pieces = len(schema.groups) + 1
    missing = EncodedImage((b"",) * num_pieces, (0,) * num_pieces, 0, 0, 0)
    units: list[EncodedImage] = []
    for sample in samples:
        for field, codec in schema.streams:
            image = sample.images.get(field, [] if codec == IMAGE_LIST else missing)
            units += image if isinstance(image, list) else [image]
    return units


def _make_index(samples: Samples, units: Units, schema: Schema) -> ShardIndex:
    """Return the index of samples, with a placeholder head.

    Raises:
        EncodeError: Two samples have the same key.
    """
    keys = tuple(sample.key for sample in samples)
    key, count = collections.Counter(keys).most_common(1)[0]
    if count > 1:
        raise EncodeError(f"expected distinct keys in a shard, got {key!r} more than once")
    lengths = [[len(sample.images.get(field, ())) for field in schema.lists] for sample in samples]
    nothing = (0,) * (len(schema.groups) + 1)
    return ShardIndex(
        Head(len(samples), 0, 0, 0, nothing, nothing, 0),
        schema,
        counts=np.array(lengths, "<u1").reshape(len(samples), len(schema.lists)),
        dims=np.array([(unit.height, unit.width) for unit in units], "<u2").reshape(-1, 2),
        orientation=np.array([unit.orientation for unit in units], "<u1"),
        keys=keys,
        fields={
            name: tuple(sample.fields.get(name) for sample in samples) for name in schema.fields
        },
    )


def _make_tables(samples: Samples, units: Units, index: ShardIndex) -> list[GroupTable]:
    """Return the tables of all groups and the tail, without offsets."""
    num_pieces = index.num_groups + 1
    base = index.schema.base

    def by_group(values: list[Sequence[int]], dtype: str) -> np.ndarray:
        return np.array(values, dtype).reshape(-1, num_pieces).T

    sizes = by_group([[len(piece) for piece in unit.pieces] for unit in units], "<u4")
    crcs = by_group([_running_crcs(unit) for unit in units], "<u4")
    header_sizes = by_group([unit.header_sizes for unit in units], "<u2")
    # Base images stay whole in the file, because other readers show them directly.
    header_sizes[:base] = 0
    tables = []
    for rows, _, _ in index.table_places(0, num_pieces):
        last = rows[-1]
        own = slice(rows.start, rows.stop)
        headers = [
            unit.pieces[row][:size]
            for row in rows
            for unit, size in zip(units, header_sizes[row].tolist(), strict=True)
        ]
        table = GroupTable(
            rows,
            sizes[own],
            crcs[own],
            header_sizes[own],
            b"".join(headers),
            np.zeros(len(units) if last < base else 0, "<u8"),
            {name: _late_values(samples, name, last) for name in index.late_fields(last)},
        )
        tables.append(table)
    return tables


def _running_crcs(unit: EncodedImage) -> list[int]:
    """Return the CRC-32C of each prefix of the scan groups, then that of the tail alone."""
    *groups, tail = unit.pieces
    crcs = itertools.accumulate(groups, lambda crc, piece: crc32c(piece, crc), initial=0)
    return [*crcs, crc32c(tail)][1:]


def _late_values(samples: Samples, name: str, row: int) -> LateValues:
    values = [sample.fields.get(name) for sample in samples]
    sizes = [ABSENT if value is None else len(value) for value in values]
    crcs = [crc32c(value or b"") for value in values]
    return LateValues(row, np.array(sizes, "<u4"), np.array(crcs, "<u4"))


def _member_bytes(
    members: Iterable[Member],
    samples: Samples,
    units: Units,
    base: int,
) -> Iterator[bytes]:
    """Yield the bytes of members, including headers and padding."""
    for member in members:
        yield member.header()
        yield member.table
        for row, unit in member.pieces:
            image = units[unit]
            # Except in base groups, the headers of pieces are in the table.
            yield image.pieces[row][0 if row < base else image.header_sizes[row] :]
        for name in member.late:
            yield from (sample.fields.get(name, b"") for sample in samples)
        yield member.literal
        yield bytes(-member.size % BLOCK)


class ShardWriter:
    """A writer of shards ``DST/NAME-000000.tar``, ... and their index ``pcr.json``.

    >>> with ShardWriter("out", samples_per_shard=1024) as writer:  # doctest: +SKIP
    ...     writer.write({"__key__": "a/0001", "jpg": jpeg, "cls": 3})

    Args:
        dst: Folder, local or an fsspec URL; empty or missing. From now until ``close``, it is this
            writer's: each process that writes shards at the same time needs a folder of its own.
        name: Prefix of the shard names, before the number.
        samples_per_shard: Samples per shard, 1024 by default. The current shard is held in memory
            until it is full.
        fmt: Script and layout.
        classes: Class names, stored in the dataset index. The number of classes is that of the
            names, or the highest integer in ``cls`` + 1 if that is larger.
        storage_options: fsspec storage options.

    Raises:
        EncodeError: The name or a class name is invalid, or ``samples_per_shard`` is below 1.
        StorageError: The folder is not empty, another writer has taken it, or it cannot be written.
    """

    def __init__(
        self,
        dst: str | os.PathLike[str],
        *,
        name: str = "data",
        samples_per_shard: int = 1024,
        fmt: ShardFormat = ShardFormat(),
        classes: Sequence[str] = (),
        storage_options: storage.Options = None,
    ) -> None:
        check_name(name)
        check_classes(classes)
        if samples_per_shard < 1:
            raise EncodeError(f"expected at least one sample per shard, got {samples_per_shard}")
        self.dst = os.fspath(dst)
        self.name = name
        self.samples_per_shard = samples_per_shard
        self.fmt = fmt
        self.classes = classes
        self._options = storage_options
        self._pending: list[EncodedSample] = []
        self._entries: list[ShardEntry] = []
        self._num_classes = 0
        self._closed = False
        take_folder(self.dst, "ShardWriter", enter=False, options=storage_options)

    def write(self, sample: Mapping[str, Any]) -> None:
        """Encode a sample and, when the shard is full, write it; see :func:`encode_sample`.

        Raises:
            EncodeError: The key or a field is invalid, or the writer is closed.
            CorruptJpeg, UnsupportedJpeg: An image cannot be rearranged.
            StorageError: A full shard cannot be written.
        """
        if self._closed:
            raise EncodeError("expected an open writer, got a closed one", url=self.dst)
        script = self.fmt.scan_script
        encoded = encode_sample(sample, lambda _, file: encode_jpeg(file, script))
        self._num_classes = max(self._num_classes, count_classes([encoded.fields]))
        self._pending.append(encoded)
        if len(self._pending) >= self.samples_per_shard:
            self._flush()

    def _flush(self) -> None:
        url = storage.join(self.dst, shard_name(self.name, len(self._entries)))
        entry = write_shard(url, self._pending, self.fmt, options=self._options, replace=False)
        self._entries.append(entry)
        self._pending = []

    def close(self) -> DatasetIndex:
        """Write the last shard and the dataset index.

        Raises:
            EncodeError: No sample was written.
            StorageError: The shard or the index cannot be written.
        """
        if self._pending:
            self._flush()
        if not self._entries:
            give_up_folder(self.dst, options=self._options)
            raise EncodeError("no sample was written", url=self.dst)
        self._closed = True
        index = write_dataset_index(
            self.dst,
            self.fmt.scan_script,
            self._entries,
            self.classes,
            self._num_classes,
            options=self._options,
            replace=False,
        )
        give_up_folder(self.dst, options=self._options)
        return index

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        elif not self._entries:
            give_up_folder(self.dst, options=self._options)


def write_dataset_index(
    dst: str,
    script: ScanScript,
    entries: Sequence[ShardEntry],
    classes: Sequence[str],
    num_classes: int,
    *,
    options: storage.Options = None,
    replace: bool = True,
) -> DatasetIndex:
    """Write ``pcr.json`` into a folder, atomically; return what it holds."""
    index = DatasetIndex(
        script.name, script.num_groups, tuple(entries), tuple(classes), num_classes
    )
    url = storage.join(dst, DATASET_INDEX)
    with storage.atomic_write(url, options=options, replace=replace) as file:
        file.write(index.encode())
    return index
