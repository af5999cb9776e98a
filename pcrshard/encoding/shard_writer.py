"""Writing samples to shards, in one process.

:func:`encode_sample` encodes one sample, :func:`write_shard` writes a list of them as one shard,
and :class:`ShardWriter` writes a stream of samples. :mod:`.encode_dataset` encodes a whole dataset
in parallel.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import numbers
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from .. import storage
from ..checksum import crc32c
from ..errors import EncodeError, naming
from ..format.columns import ABSENT
from ..format.dataset_index import (
    DATASET_INDEX,
    DatasetIndex,
    ImageCounts,
    ShardEntry,
    ShardTable,
)
from ..format.group_table import GroupTable, LateValues
from ..format.kinds import Kinds, decide_kinds, read_kinds
from ..format.levels import Levels
from ..format.names import (
    MAX_KEY_BYTES,
    check_name,
    is_jpeg_field,
    is_metadata,
    is_other_image,
    numbered,
    shard_name,
    valid_field,
    valid_key,
)
from ..format.sample_columns import COLUMNS, SampleColumns, encode_columns
from ..format.scan_script import STANDARD, ScanScript
from ..format.schema import IMAGE, IMAGE_LIST, Schema
from ..format.shard_format import ShardFormat
from ..format.shard_head import BLOCK, TRAILER, Head
from ..format.shard_index import (
    MAX_LISTED,
    MAX_PIECE_BYTES,
    MAX_PROFILES,
    ShardIndex,
    State,
)
from ..format.tar_members import Member, index_name, lay_out, plan_members
from ..jpeg.color_profiles import is_wide
from ..storage.ownership import give_up_folder, take_folder
from .calibrate import SAMPLE, calibrate
from .encode_jpeg import EncodedImage, encode_jpeg, keep_whole
from .labels import check_classes, count_classes


class EncodedSample(NamedTuple):
    """A sample that is ready to be written.

    Attributes:
        key: Its key.
        images: Its image fields, each an image or a list of images.
        fields: Its other fields.
    """

    key: str
    images: dict[str, EncodedImage | list[EncodedImage]]
    fields: dict[str, bytes]


_BYTES = bytes | bytearray | memoryview
Samples = Sequence[EncodedSample]
Units = Sequence[EncodedImage]


def encode_sample(
    sample: Mapping[str, Any],
    encode_image: Callable[[str, bytes], EncodedImage] = lambda _, file: encode_jpeg(file),
    kinds: Mapping[str, str] = types.MappingProxyType({}),
) -> EncodedSample:
    """Encode a sample in WebDataset's format.

    Args:
        sample: ``__key__``, image fields as bytes, and other fields as bytes, str, int, or values
            that JSON can represent. A list of up to 64 images in one field is a list. Names that
            start with ``__`` are dropped.
        encode_image: Called with the name and the bytes of each image.
        kinds: The kind of each field, where known; otherwise, fields with a JPEG extension and
            lists are images.

    Raises:
        EncodeError: A key or field name is invalid, or a value does not fit its kind.
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
        is_list = isinstance(value, list | tuple)
        kind = kinds.get(name)
        if kind is None and (is_jpeg_field(name) or (is_list and is_other_image(name))):
            kind = IMAGE_LIST if is_list else IMAGE
        try:
            if not valid_field(name):
                raise EncodeError(f"expected a lowercase field name without spaces, got {name!r}")
            if kind not in (IMAGE, IMAGE_LIST):
                encoded.fields[name] = _field_bytes(name, value)
                continue
            if is_list != (kind == IMAGE_LIST):
                expected = "a list of images" if kind == IMAGE_LIST else "one image"
                raise EncodeError(f"expected {expected} in field {name!r}")
            images = _encode_images(encoded.key, name, value if is_list else [value], encode_image)
            encoded.images[name] = images if is_list else images[0]
        except EncodeError as error:
            raise EncodeError(str(error), key=key) from error
    return encoded


def _encode_images(
    key: str,
    name: str,
    files: Sequence[Any],
    encode_image: Callable[[str, bytes], EncodedImage],
) -> list[EncodedImage]:
    if len(files) > MAX_LISTED:
        raise EncodeError(f"expected at most {MAX_LISTED} images in {name!r}, got {len(files)}")
    images = []
    for place, file in enumerate(files):
        if not isinstance(file, _BYTES):
            got = type(file).__name__
            raise EncodeError(f"expected the bytes of an image in field {name!r}, got {got}")
        with naming(key=f"{key}.{name if len(files) == 1 else numbered(name, place)}"):
            images.append(encode_image(name, bytes(file)))
    return images


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


_NOTHING = Kinds({}, ())


def decide_schema(samples: Samples, fmt: ShardFormat, given: Kinds = _NOTHING) -> Schema:
    """Return the schema of a dataset that begins with these samples.

    Args:
        samples: Encoded samples.
        fmt: Script and layout.
        given: What the user says of fields, which need not be in the samples.

    Raises:
        EncodeError: A field is one image in a sample and a list in another, or there are too many
            fields.
    """
    known = dict(given.fields)
    for sample in samples:
        for name, image in sample.images.items():
            kind = IMAGE_LIST if isinstance(image, list) else IMAGE
            if known.setdefault(name, kind) != kind:
                message = f"expected field {name!r} to be a list of images in every sample, or none"
                raise EncodeError(message, key=sample.key)
    names = [[*sample.images, *sample.fields] for sample in samples]
    return fmt.schema(decide_kinds(names, known) | known, given.parts)


def _fit(sample: EncodedSample, schema: Schema) -> EncodedSample:
    """Return a sample as the schema has it: files of image fields become units.

    Raises:
        EncodeError: A field is not in the schema, or not of its kind.
    """
    images, fields = dict(sample.images), dict(sample.fields)
    for name in (*sample.images, *sample.fields):
        field = schema.by_name.get(name)
        if field is not None and field.kind == IMAGE and name in fields:
            images[name] = keep_whole(fields.pop(name), schema.num_groups)
        kind = IMAGE_LIST if isinstance(images.get(name), list) else IMAGE
        fits = field is not None and (kind == field.kind if name in images else not field.is_image)
        if not fits:
            expected = field.kind if field else f"one of {list(schema.by_name)}"
            raise EncodeError(
                f"field {name!r} contradicts the schema, which the first shard decided: expected "
                f"{expected}; kinds= and lists= of ShardWriter say it beforehand",
                key=sample.key,
            )
    return EncodedSample(sample.key, images, fields)


class WrittenShard(NamedTuple):
    """A shard that was written: its entry, the CRC-32C of its file, and what images it has."""

    entry: ShardEntry
    file_crc32c: int
    counts: ImageCounts


def write_shard(
    url: str,
    samples: Samples,
    schema: Schema,
    *,
    options: storage.Options = None,
    replace: bool = True,
) -> tuple[WrittenShard, SampleColumns]:
    """Write one shard, atomically.

    Args:
        url: Where to write it; the name must end with ``.tar``.
        samples: At least one sample.
        schema: The schema of the dataset.
        options: fsspec storage options.
        replace: Whether the file may exist already.

    Returns:
        What was written, and the columns of its samples.

    Raises:
        EncodeError: Two samples have the same key, or one contradicts the schema.
        StorageError: The shard cannot be written, or exists.
    """
    name = storage.file_name(url)
    stem = name.removesuffix(".tar")
    samples = [_fit(sample, schema) for sample in samples]
    units = _list_units(samples, schema)
    index = _make_index(samples, units, schema)
    index, tables, index_bytes = lay_out(index, _make_tables(samples, units, index), stem)
    crc = 0
    with storage.atomic_write(url, options=options, replace=replace) as file:
        first = Member(index_name(schema, stem), 0, len(index_bytes), literal=index_bytes)
        members = (first, *plan_members(index, tables, stem))
        contents = _member_bytes(members, samples, units, schema.base)
        for data in itertools.chain(contents, [TRAILER]):
            file.write(data)
            crc = crc32c(data, crc)
    written = WrittenShard(ShardEntry.of_head(name, index.head), crc, count_images(index))
    return written, SampleColumns.of(index)


def count_images(index: ShardIndex) -> ImageCounts:
    """Return the numbers of images of a shard."""
    wide = [number for number, profile in enumerate(index.profiles, 1) if is_wide(profile)]
    found = (
        index.states != State.MISSING,
        index.states >= State.WHOLE,
        index.states == State.UNDECODABLE,
        np.isin(index.profile_numbers, wide),
    )
    return ImageCounts(*(int(each.sum()) for each in found))


def _list_units(samples: Samples, schema: Schema) -> Units:
    """Return the images of a shard in order, an empty one for each stream that a sample lacks."""
    num_pieces = schema.num_groups + 1
    nothing = (0,) * num_pieces
    missing = EncodedImage((b"",) * num_pieces, nothing, 0, 0, 0, state=State.MISSING)
    units: list[EncodedImage] = []
    for sample in samples:
        for field in schema.streams:
            image = sample.images.get(field, [] if field in schema.lists else missing)
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
    nothing = (0,) * (schema.num_groups + 1)
    # Numbered from 1, in order of first appearance.
    profiles = dict.fromkeys(unit.profile for unit in units if unit.profile)
    number_of = {profile: number for number, profile in enumerate(profiles, 1)} | {b"": 0}
    if len(profiles) > MAX_PROFILES:
        raise EncodeError(
            f"expected at most {MAX_PROFILES} ICC profiles in a shard, got {len(profiles)}; "
            "use fewer samples per shard"
        )
    return ShardIndex(
        Head(len(samples), 0, 0, 0, 0, nothing, nothing, nothing),
        schema,
        counts=np.array(lengths, "<u1").reshape(len(samples), len(schema.lists)),
        states=np.array([unit.state for unit in units], "<u1"),
        dims=np.array([(unit.height, unit.width) for unit in units], "<u2").reshape(-1, 2),
        orientation=np.array([unit.orientation for unit in units], "<u1"),
        profile_numbers=np.array([number_of[unit.profile] for unit in units], "<u2"),
        keys=keys,
        profiles=tuple(profiles),
        fields={
            name: tuple(sample.fields.get(name) for sample in samples) for name in schema.columns
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
        fmt: Script and layout. Where the images decide, the first 64 samples wait in memory until
            they have.
        kinds: What fields hold, where their names do not say: ``{"mask.png": "mask",
            "json:objects.bbox": "boxes:xywh"}``. These, and the fields of the first shard, are the
            schema of all shards: a later sample that has another field, or one of another kind,
            is refused.
        lists: Fields with a list of images per sample.
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
        kinds: Mapping[str, str] = types.MappingProxyType({}),
        lists: Sequence[str] = (),
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
        # Of the first samples; and these themselves, until a script is chosen by them.
        self._first_jpegs: list[bytes] = []
        self._waiting: list[Mapping[str, Any]] | None = [] if fmt.is_open else None
        self._pending: list[EncodedSample] = []
        self._entries: list[ShardEntry] = []
        self._counts = ImageCounts()
        self._columns: list[SampleColumns] = []
        self._given = read_kinds(kinds, lists)
        self._schema: Schema | None = None
        self._num_classes = 0
        self._closed = False
        take_folder(self.dst, "ShardWriter", enter=False, options=storage_options)

    def write(self, sample: Mapping[str, Any]) -> None:
        """Encode a sample and, when the shard is full, write it; see :func:`encode_sample`.

        Raises:
            EncodeError: The key or a field is invalid, or contradicts the schema, or the writer is
                closed.
            CorruptJpeg, UnsupportedJpeg: An image cannot be rearranged.
            StorageError: A full shard cannot be written.
        """
        if self._closed:
            raise EncodeError("expected an open writer, got a closed one", url=self.dst)
        if len(self._first_jpegs) < SAMPLE:
            for name in filter(is_jpeg_field, sample):
                value = sample[name]
                files = value if isinstance(value, list | tuple) else [value]
                self._first_jpegs += [bytes(file) for file in files if isinstance(file, _BYTES)]
        if self._waiting is None:
            self._encode(sample)
        else:
            encode_sample(sample, self._encode_image(STANDARD), self._given.fields)  # raises now
            self._waiting.append(dict(sample))
            if len(self._waiting) == SAMPLE:
                self._encode_waiting()

    @staticmethod
    def _encode_image(script: ScanScript | Levels) -> Callable[[str, bytes], EncodedImage]:
        def encode_image(name: str, file: bytes) -> EncodedImage:
            if is_jpeg_field(name):
                return encode_jpeg(file, script)
            return keep_whole(file, script.num_groups)

        return encode_image

    def _encode_waiting(self) -> None:
        waiting, self._waiting = self._waiting or [], None
        try:
            script = calibrate(self.fmt, self._first_jpegs).script
        except EncodeError:
            give_up_folder(self.dst, options=self._options)
            raise
        self.fmt = dataclasses.replace(self.fmt, script=script)
        for sample in waiting:
            self._encode(sample)

    def _encode(self, sample: Mapping[str, Any]) -> None:
        if self._schema is None:
            kinds = self._given.fields
        else:
            kinds = {name: field.kind for name, field in self._schema.by_name.items()}
        encoded = encode_sample(sample, self._encode_image(self.fmt.scan_script), kinds)
        self._num_classes = max(self._num_classes, count_classes([encoded.fields]))
        self._pending.append(encoded)
        if len(self._pending) >= self.samples_per_shard:
            self._flush()

    def _flush(self) -> None:
        self._schema = self._schema or decide_schema(self._pending, self.fmt, self._given)
        url = storage.join(self.dst, shard_name(self.name, len(self._entries)))
        written, columns = write_shard(
            url, self._pending, self._schema, options=self._options, replace=False
        )
        self._columns.append(columns)
        self._entries.append(written.entry)
        self._counts = self._counts.plus(written.counts)
        self._pending = []

    def close(self) -> DatasetIndex:
        """Write the last shard and the dataset index.

        Raises:
            EncodeError: No sample was written.
            StorageError: The shard or the index cannot be written.
        """
        if self._waiting:
            self._encode_waiting()
        if self._pending:
            self._flush()
        if self._schema is None:
            give_up_folder(self.dst, options=self._options)
            raise EncodeError("no sample was written", url=self.dst)
        self._closed = True
        calibration = calibrate(self.fmt, self._first_jpegs)
        index = DatasetIndex(
            self._schema,
            ShardTable.of(self._entries),
            tuple(self.classes),
            self._num_classes,
            calibration.levels,
            calibration.similarity,
            counts=self._counts,
        )
        columns = SampleColumns.join(self._columns)
        index = write_dataset_index(self.dst, index, columns, options=self._options, replace=False)
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
    index: DatasetIndex,
    columns: SampleColumns,
    *,
    options: storage.Access = None,
    replace: bool = True,
) -> DatasetIndex:
    """Write ``pcr.columns`` and then ``pcr.json`` into a folder, each atomically.

    Returns:
        The index as it was written, which says what the columns are.
    """
    data, entries = encode_columns(index.shards, columns)
    index = dataclasses.replace(index, columns=entries)
    for name, parts in ((COLUMNS, data), (DATASET_INDEX, (index.encode(),))):
        url = storage.join(dst, name)
        with storage.atomic_write(url, options=options, replace=replace) as file:
            file.writelines(parts)
    return index
