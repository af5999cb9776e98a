"""Writing samples to shards, in one process.

:func:`encode_sample` encodes one sample, :func:`write_shard` writes a list of them as one shard,
and :class:`ShardWriter` writes a stream of samples. :mod:`.encode_dataset` encodes a whole dataset
in parallel.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from .. import storage
from ..checksum import crc32c
from ..errors import EncodeError, PCRError
from ..format.dataset_index import DATASET_INDEX, DatasetIndex, ShardEntry
from ..format.names import (
    check_name,
    is_jpeg_field,
    is_metadata,
    numbered,
    shard_name,
    valid_field,
    valid_key,
)
from ..format.shard_format import FieldNames, ShardFormat
from ..format.shard_index import BLOCK, MAX_LISTED
from ..format.tar_members import TRAILER, Member, index_name, lay_out, plan_members, tar_header
from .encode_jpeg import EncodedImage, encode_jpeg
from .labels import count_classes
from .shard_tables import (
    BYTES,
    EncodedSample,
    Samples,
    Units,
    field_bytes,
    list_units,
    make_index,
    make_tables,
)


def encode_sample(
    sample: Mapping[str, Any],
    encode_image: Callable[[str, bytes], EncodedImage | bytes] = lambda _, file: encode_jpeg(file),
) -> EncodedSample:
    """Encode a sample in WebDataset's format.

    Args:
        sample: ``__key__``, image fields as bytes, and other fields as bytes, str, int, or values
            that JSON can represent. Fields with a JPEG extension become progressive streams; a list
            of up to 64 JPEGs in one field becomes a stream of lists. Names that start with ``__``
            are dropped.
        encode_image: Called with the name and the bytes of each image; returns the encoded image,
            or bytes to store unchanged.

    Raises:
        EncodeError: A key or field name is invalid.
        CorruptJpeg, UnsupportedJpeg: An image is rejected; the message names its key and field.
    """
    key = _checked_key(sample.get("__key__"))
    encoded = EncodedSample(key, {}, {}, {})
    for name, value in sample.items():
        if name.startswith("__"):
            continue
        try:
            if not valid_field(name):
                raise EncodeError(f"expected a lowercase field name without spaces, got {name!r}")
            if not is_jpeg_field(name):
                encoded.fields[name] = field_bytes(name, value)
            elif isinstance(value, list | tuple):
                _encode_list(encoded, name, value, encode_image)
            else:
                image = _encode_image(key, name, value, encode_image)
                if isinstance(image, EncodedImage):
                    encoded.images[name] = image
                else:
                    encoded.fields[name] = image
        except EncodeError as error:
            raise EncodeError(str(error), key=key) from error
    return encoded


def _encode_image(
    key: str,
    name: str,
    value: object,
    encode_image: Callable[[str, bytes], EncodedImage | bytes],
) -> EncodedImage | bytes:
    if not isinstance(value, BYTES):
        raise EncodeError(f"expected a JPEG's bytes in field {name!r}, got {type(value).__name__}")
    try:
        return encode_image(name, bytes(value))
    except EncodeError:
        raise
    except PCRError as error:
        raise type(error)(str(error), key=f"{key}.{name}") from error


def _encode_list(
    encoded: EncodedSample,
    name: str,
    value: Sequence[object],
    encode_image: Callable[[str, bytes], EncodedImage | bytes],
) -> None:
    """Add a list of images, or their files under numbered names if any is a passthrough file."""
    if len(value) > MAX_LISTED:
        raise EncodeError(f"expected at most {MAX_LISTED} images in {name!r}, got {len(value)}")
    files = {numbered(name, i): image for i, image in enumerate(value)}
    images = [
        _encode_image(encoded.key, field, file, encode_image) for field, file in files.items()
    ]
    layered = [image for image in images if isinstance(image, EncodedImage)]
    if len(layered) == len(images):
        encoded.lists[name] = layered
    else:
        encoded.fields.update((field, field_bytes(field, file)) for field, file in files.items())


def _checked_key(key: object) -> str:
    if not isinstance(key, str) or not valid_key(key):
        raise EncodeError(
            f"expected a key without dots in its last part, '..' or a leading '/', got {key!r}"
        )
    if is_metadata(f"{key}."):
        raise EncodeError(
            "expected a key that is not in a folder named __...__, "
            f"which WebDataset skips, got {key!r}"
        )
    return key


def write_shard(
    url: str,
    samples: Samples,
    fmt: ShardFormat,
    *,
    names: FieldNames | None = None,
    options: storage.Options = None,
) -> ShardEntry:
    """Write one shard, atomically.

    Args:
        url: Where to write it; the name must end with ``.tar``.
        samples: At least one sample.
        fmt: Script and layout.
        names: Fields to list, so that all shards of a dataset list the same ones. Default: the
            fields of the samples.
        options: fsspec storage options.

    Returns:
        The shard's entry for the dataset index.

    Raises:
        EncodeError: Two samples have the same key, or there are too many fields.
    """
    name = storage.file_name(url)
    stem = name.removesuffix(".tar")
    if names is None:
        fields = [(sample.images, sample.fields, sample.lists) for sample in samples]
        names = FieldNames(*map(_distinct, zip(*fields, strict=True)))
    schema = fmt.schema(names)
    units = list_units(samples, schema)
    index = make_index(samples, units, schema)
    index, tables, index_bytes = lay_out(index, make_tables(samples, units, index), stem)
    size = 0
    crc = 0
    with storage.atomic_write(url, options=options) as file:
        file_header = tar_header(index_name(schema, stem), len(index_bytes))
        padding = bytes(-len(index_bytes) % BLOCK)
        contents = _member_bytes(plan_members(index, tables, stem), samples, units, schema.base)
        for data in itertools.chain([file_header, index_bytes, padding], contents, [TRAILER]):
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


def _distinct(fields: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """Return each name once, in order of first appearance."""
    return tuple(dict.fromkeys(itertools.chain.from_iterable(fields)))


def _member_bytes(
    members: Iterable[Member],
    samples: Samples,
    units: Units,
    base: int,
) -> Iterator[bytes]:
    """Yield the bytes of the members after the index, including headers and padding."""
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
        dst: Folder, local or an fsspec URL.
        name: Prefix of the shard names, before the number.
        samples_per_shard: Samples per shard, 1024 by default. The current shard is held in memory
            until it is full.
        fmt: Script and layout.
        classes: Class names, stored in the dataset index. The number of classes is that of the
            names, or the highest integer in ``cls`` + 1 if that is larger.
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
        storage_options: storage.Options = None,
    ) -> None:
        check_name(name)
        if samples_per_shard < 1:
            raise EncodeError(f"expected at least one sample per shard, got {samples_per_shard}")
        self.dst = os.fspath(dst)
        self.name = name
        self.samples_per_shard = samples_per_shard
        self.fmt = fmt
        self.classes = tuple(classes)
        self._options = storage_options
        self._pending: list[EncodedSample] = []
        self._entries: list[ShardEntry] = []
        self._num_classes = 0
        for used in (DATASET_INDEX, shard_name(self.name, 0)):
            url = storage.join(self.dst, used)
            if storage.exists(url, options=self._options):
                raise EncodeError(
                    f"already holds a dataset ({used}): use another folder, or remove it",
                    url=self.dst,
                )

    def write(self, sample: Mapping[str, Any]) -> None:
        """Encode a sample and, when the shard is full, write it; see :func:`encode_sample`."""
        script = self.fmt.scan_script
        encoded = encode_sample(sample, lambda _, file: encode_jpeg(file, script))
        self._num_classes = max(self._num_classes, count_classes([encoded.fields]))
        self._pending.append(encoded)
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
            raise EncodeError("no sample was written", url=self.dst)
        script, num_groups = self.fmt.scan_script.name, self.fmt.scan_script.num_groups
        entries = tuple(self._entries)
        index = DatasetIndex(script, num_groups, entries, self.classes, self._num_classes)
        write_dataset_index(self.dst, index, options=self._options)
        return index

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()


def write_dataset_index(
    dst: str,
    index: DatasetIndex,
    *,
    options: storage.Options = None,
) -> None:
    """Write ``pcr.json`` into a folder, atomically."""
    with storage.atomic_write(storage.join(dst, DATASET_INDEX), options=options) as file:
        file.write(index.encode())
