"""Indexes of plain tars, with which they are read as they are: SPEC.md section 2.4.

A tar is listed by its headers and the first bytes of its pictures, and each part of it gets an
index of its own, in a schema of its own. Once all tars have theirs, the schema of all is known;
indexes of another schema are written again, without the tars. So a run can be interrupted, and done
in parts on several machines, and only tars that have changed are listed again.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from .. import storage
from ..checksum import crc32c
from ..errors import EncodeError, PCRError
from ..format.columns import ABSENT
from ..format.dataset_index import (
    DATASET_INDEX,
    MAX_DATASET_INDEX_BYTES,
    DatasetIndex,
    ShardEntry,
    ShardTable,
)
from ..format.kinds import in_list, plan_kinds, read_kinds
from ..format.names import is_jpeg_field, is_other_image, numbered, place_in_list
from ..format.plain_tar import PLAIN, PlainTar, plain_tar_index
from ..format.sample_columns import SampleColumns
from ..format.schema import IMAGE, IMAGE_LIST, Field, Schema, decode_schema
from ..format.shard_head import HEAD_STOP, Head, read_head, round512
from ..format.shard_index import ShardIndex, State, decode_index
from ..format.tar_members import index_name, lay_out_plain_tar, tar_header
from ..jpeg.picture_size import picture_size
from ..redaction import get_logger, redact_url
from .labels import check_classes, count_classes
from .samples import LABEL_FIELD, FieldRef, StorageOptions, Unlayered
from .shard_writer import write_dataset_index
from .sources import list_tar_files
from .tars import (
    TARS_AT_A_TIME,
    Member,
    ReadMember,
    TarReader,
    free_key,
    warn_of_unsorted,
)
from .wids import is_wids, read_wids

_log = get_logger("pcrshard")
# Values up to this size are read with the headers, and stored in the index.
_MOST_VALUE_BYTES = 1024
# A tar is cut into parts of this size, which are what the loader reads and mixes.
PART_BYTES = 128 << 20
_CHUNK = 1 << 20
Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class IndexOptions:
    """How plain tars are indexed.

    Attributes:
        checksums: Store the CRC-32C of every member, which reads all of the tars. Every sample is
            then verified when it is read. Otherwise a tar must still be the version that was
            indexed: of its size, and ETag or time of writing.
        on_error: What to do with a tar that is damaged, and a sample that cannot be addressed:
            ``raise`` an error, or ``skip`` the sample, or the tar from the damage on.
        classes: Names of the labels 0, 1, ...
        split: Split of the source to index (``train``, ``val``...).
        keep_numbered: Keep numbered images (``images.0.jpg``, ``images.1.jpg``...) in their fields.
            Otherwise, images numbered from 0 become a list, ``images.jpg``.
        kinds: What fields hold, where their names do not say: ``{"mask.png": "mask"}``.
        lists: Fields with a list of images per sample, even if no sample of this source shows it.
    """

    checksums: bool = False
    on_error: str = "raise"
    classes: tuple[str, ...] = ()
    split: str | None = None
    keep_numbered: bool = False
    kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    lists: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        read_kinds(self.kinds, self.lists)
        check_classes(self.classes)
        if self.on_error not in ("raise", "skip"):
            raise EncodeError(f"expected on_error 'raise' or 'skip', got {self.on_error!r}")


class Indexed(NamedTuple):
    """What a run has done.

    Attributes:
        folder: Where the indexes are.
        dataset: The dataset index; ``None`` after a part if others still have tars to index.
        num_tars: Tars of this part.
        num_listed: Those of them that were listed now; the others had an index.
        skipped: What was left out of these.
    """

    folder: str
    dataset: DatasetIndex | None
    num_tars: int
    num_listed: int
    skipped: tuple[Unlayered, ...]


class _Place(NamedTuple):
    """A member: where it is, and what is known of it.

    Attributes:
        start: Where its data begins.
        size: Its bytes.
        crc: Its CRC-32C; 0 without checksums.
        value: Its bytes, if they are few and no picture.
        dims: Height and width of a picture, upright; 0, 0 if unknown.
    """

    start: int
    size: int
    crc: int
    value: bytes | None
    dims: tuple[int, int]


class _Sample(NamedTuple):
    """A sample: its key, and its members by name."""

    key: str
    members: dict[str, _Place]


class _Tar(NamedTuple):
    """What is known of a tar once it has its indexes.

    Attributes:
        entries: The entry of each part.
        columns: The columns of each part.
        schema: Their schema.
        names: Names of fields as samples have them, each with the key of the first such sample.
        num_classes: The highest label + 1.
    """

    entries: list[ShardEntry]
    columns: list[SampleColumns]
    schema: Schema
    names: dict[tuple[str, ...], str]
    num_classes: int


def index_tars(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str] | None = None,
    options: IndexOptions = IndexOptions(),
    *,
    part: tuple[int, int] | None = None,
    progress: Progress | None = None,
    storage_options: StorageOptions = None,
) -> Indexed:
    """Index WebDataset tars, so that PCRDataset and PCRLoader read them as they are.

    Reads headers, small values and the first bytes of pictures, in ranges, of 16 tars at a time; a
    compressed tar is read whole. Tars that have an index of their version already are not read, so
    that the same call resumes an interrupted run, and indexes tars that were added or have changed.

    Args:
        src: A folder, URL, pattern, or wids index (``.json``) of tars.
        dst: Folder for ``pcr.json`` and the index of each tar; by default that of the tars.
        options: What is read, and how fields are understood.
        part: (I, N) indexes only the tars whose number is I modulo N; the part that finds that all
            tars have an index writes ``pcr.json``.
        progress: Called with (tars done, all tars of this part).
        storage_options: fsspec storage options of the tars and of ``dst``.

    Raises:
        EncodeError: A tar or a sample cannot be indexed, or ``dst`` holds another dataset.
        StorageError: A tar cannot be read, or an index not written.
    """
    src = os.fspath(src)
    tars = list_tar_files(src, options.split, storage_options)
    expected = read_wids(src, storage_options) if is_wids(src) else {}
    folders = {storage.parent(tar.url) for tar in tars}
    names = [storage.file_name(tar.url) for tar in tars]
    if len(folders) > 1 or len(set(names)) < len(names):
        raise EncodeError(
            f"expected tars of one folder, got {sorted(map(redact_url, folders))}: index each "
            "folder by itself, and give PCRDataset a list of them"
        )
    (folder,) = folders
    target = storage.plain_path(os.fspath(dst)) if dst is not None else folder
    first, step = part or (0, 1)
    if not 0 <= first < step:
        raise EncodeError(f"expected a part I/N with I from 0 to N-1, got {first}/{step}")
    run = _Run(target, options, storage_options)
    run.check_target()
    own = tars[first::step]
    skipped: list[Unlayered] = []
    found: dict[str, _Tar] = {}
    num_listed = 0
    with ThreadPoolExecutor(TARS_AT_A_TIME, "pcrshard-index") as threads:
        try:
            for done, (tar, result) in enumerate(
                zip(own, threads.map(run.index, own), strict=True)
            ):
                found[tar.url] = result.tar
                _check_count(tar.url, result.tar, expected)
                num_listed += result.is_new
                skipped += result.skipped
                if progress is not None:
                    progress(done + 1, len(own))
            others = [tar for tar in tars if tar.url not in found]
            run.list_target()  # others may have finished meanwhile
            if not all(run.has_index(tar) for tar in others):
                return Indexed(target, None, len(own), num_listed, tuple(skipped))
            found |= {
                tar.url: each
                for tar, each in zip(others, threads.map(run.known, others), strict=True)
                if each is not None
            }
            if len(found) < len(tars):
                return Indexed(target, None, len(own), num_listed, tuple(skipped))
            index = run.finish([found[tar.url] for tar in tars], _relative(folder, target), threads)
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    return Indexed(target, index, len(own), num_listed, tuple(skipped))


def _check_count(url: str, tar: _Tar, expected: Mapping[str, int]) -> None:
    """Warn of a tar that has not as many samples as a wids index says."""
    count = sum(entry.num_samples for entry in tar.entries)
    if count != expected.get(url, count):
        _log.warning(
            "%s: expected %d samples, as the wids index says, got %d",
            redact_url(url),
            expected[url],
            count,
        )


def _relative(folder: str, target: str) -> str:
    """Return where the tars are, seen from the folder of the index, without secrets."""
    if storage.is_local(folder) and storage.is_local(target):
        paths = (os.path.realpath(storage.plain_path(each)) for each in (folder, target))
        return os.path.relpath(*paths)
    if folder == target:
        return "."
    return redact_url(folder, query="")


class _Result(NamedTuple):
    """A tar and its index."""

    tar: _Tar
    is_new: bool
    skipped: list[Unlayered]


class _Run:
    """A run of :func:`index_tars`."""

    def __init__(self, target: str, options: IndexOptions, access: StorageOptions) -> None:
        self.target = target
        self.options = options
        self.store = storage.Store.of(access)
        self.list_target()

    def list_target(self) -> None:
        """Find out which indexes are there."""
        self.there = set(storage.list_names(self.target, options=self.store))

    def check_target(self) -> None:
        """Refuse to replace the index of another dataset."""
        url = storage.join(self.target, DATASET_INDEX)
        if DATASET_INDEX in self.there:
            data = storage.read_bytes(url, max_bytes=MAX_DATASET_INDEX_BYTES, options=self.store)
            if DatasetIndex.decode(data, url=url).schema.layout != PLAIN:
                raise EncodeError("expected no other dataset there: choose another folder", url=url)

    def has_index(self, tar: FieldRef) -> bool:
        """Return whether the first part of a tar has an index, of whatever version."""
        return plain_tar_index(storage.file_name(tar.url), 0) in self.there

    def index(self, tar: FieldRef) -> _Result:
        """Index a tar, unless its index is there."""
        skipped: list[Unlayered] = []
        reader = TarReader(tar, self.options.on_error == "skip", self.store, look=self._look)
        reader.find_version()
        known = self.known(tar, reader.version)
        if known is not None:
            return _Result(known, False, skipped)
        samples = []
        keys: set[str] = set()
        again: list[str] = []
        begins = []
        items: Iterable[Any] = storage.collect(reader.samples(), tar.url, self.store.retry)
        for each in items:
            if isinstance(each, Unlayered):
                _log.warning("%s: %s", each.source, each.reason)
                skipped.append(each)
            elif each is not None:
                key = each.key
                if key in keys:
                    again.append(key)
                    key = free_key(key, keys)
                keys.add(key)
                samples.append(_Sample(key, {m.field: _place_of(m) for m in each.members}))
                begins.append(each.members[0].offset)
        if again:
            warn_of_unsorted(tar.url, again)
        if not samples:
            reason = skipped[0].reason if skipped else "it has no samples"
            raise EncodeError(f"nothing of this tar can be indexed: {reason}", url=tar.url)
        cuts = [0, *(_cuts(samples, begins) if not reader.is_packed else ()), len(samples)]
        names = _name_sets(samples)
        schema = _schema(names, _small_fields(samples), self.options, is_one=True)
        about = PlainTar(
            reader.size or 0,
            0,
            0,
            len(cuts) - 1,
            reader.is_packed,
            reader.version,
            *(np.zeros(0, kind) for kind in ("<i8", "<u4", "<u4")),
        )
        entries, columns = [], []
        for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
            own = dataclasses.replace(about, begin=begins[start], part=number)
            index = _make_index(samples[start:stop], schema, own, self.options.checksums)
            entries.append(self._write(tar.url, index))
            columns.append(SampleColumns.of(index))
        return _Result(_Tar(entries, columns, schema, names, _num_classes(samples)), True, skipped)

    def _look(self, field: str, size: int, read: ReadMember) -> _Place:
        """Find what an index says of a member besides its place."""
        crc = 0
        head = None
        if self.options.checksums or size <= _MOST_VALUE_BYTES:
            # Read once and in order: it may be a stream.
            head = read(0, _CHUNK)
            crc = crc32c(head)
            for start in range(_CHUNK, size, _CHUNK):
                crc = crc32c(read(start, _CHUNK), crc)
        dims = None
        if is_jpeg_field(field) or is_other_image(field):
            dims = picture_size(read if head is None else lambda at, n: head[at : at + n])
        value = head if size <= _MOST_VALUE_BYTES else None
        return _Place(0, size, crc * self.options.checksums, value, dims or (0, 0))

    def known(self, tar: FieldRef, version: str | None = None) -> _Tar | None:
        """Return what the indexes of a tar say; ``None`` without ones of its version."""
        name = storage.file_name(tar.url)
        if not self.has_index(tar):
            return None
        if version is None:
            reader = TarReader(tar, False, self.store)
            reader.find_version()
            version = reader.version
        found: list[ShardIndex] = []
        parts = 1
        while len(found) < parts:
            url = storage.join(self.target, plain_tar_index(name, len(found)))
            try:
                index = _read_index(url, self.store)
            except PCRError:
                return None
            about = index.tar
            if about is None or not version or about.version != version:
                return None
            if about.part != len(found) or (self.options.checksums and not about.is_checked):
                return None
            parts = about.parts
            found.append(index)
        if len({index.schema for index in found}) > 1:
            return None  # a run was interrupted while it wrote them again
        samples = [sample for index in found for sample in _samples_of(index)]
        entries = [ShardEntry.of_head(name, index.head) for index in found]
        columns = list(map(SampleColumns.of, found))
        return _Tar(entries, columns, found[0].schema, _name_sets(samples), _num_classes(samples))

    def _write(self, tar_url: str, index: ShardIndex) -> ShardEntry:
        """Write the index of a part of a tar; return its entry."""
        assert index.tar is not None
        name = storage.file_name(tar_url)
        index, data = lay_out_plain_tar(index)
        url = storage.join(self.target, plain_tar_index(name, index.tar.part if index.tar else 0))
        member = tar_header(index_name(index.schema, ""), len(data)) + data
        with storage.atomic_write(url, options=self.store, durable=False) as file:
            file.write(member.ljust(round512(len(member)), b"\0"))
        return ShardEntry.of_head(name, index.head)

    def finish(
        self, tars: Sequence[_Tar], folder: str, threads: ThreadPoolExecutor
    ) -> DatasetIndex:
        """Bring all indexes to one schema, and write the dataset index."""
        names: dict[tuple[str, ...], str] = {}
        for tar in tars:
            for own, key in tar.names.items():
                names.setdefault(own, key)
        fields = {field for tar in tars for field in tar.schema.fields}
        small = {field.name for field in fields} - {field.name for field in fields if field.scan}
        schema = _schema(names, small, self.options)

        def rewrite(tar: _Tar) -> list[ShardEntry]:
            if tar.schema == schema:
                return tar.entries
            return [
                self._rewrite(entry.name, number, schema)
                for number, entry in enumerate(tar.entries)
            ]

        entries = [entry for own in threads.map(rewrite, tars) for entry in own]
        index = DatasetIndex(
            schema,
            ShardTable.of(entries),
            self.options.classes,
            max(tar.num_classes for tar in tars),
            tars=folder,
        )
        columns = SampleColumns.join([each for tar in tars for each in tar.columns])
        return write_dataset_index(self.target, index, columns, options=self.store)

    def _rewrite(self, name: str, part: int, schema: Schema) -> ShardEntry:
        url = storage.join(self.target, plain_tar_index(name, part))
        index = _read_index(url, self.store)
        assert index.tar is not None
        samples = list(_samples_of(index))
        made = _make_index(samples, schema, index.tar, index.tar.is_checked)
        return self._write(name, made)


def _read_index(url: str, store: storage.Access) -> ShardIndex:
    data = storage.read_bytes(url, options=store)
    head = read_head(data, url=url)
    return decode_index(head, data[HEAD_STOP : head.body_stop], url=url)


def _place_of(member: Member) -> _Place:
    place: _Place = member.found
    return place._replace(start=member.range[0])


def _cuts(samples: Sequence[_Sample], begins: Sequence[int]) -> Iterator[int]:
    """Yield the samples at which another part of a tar begins."""
    start = begins[0]
    for number, (sample, begin) in enumerate(zip(samples, begins, strict=True)):
        stop = max(place.start + place.size for place in sample.members.values())
        if number and stop - start > PART_BYTES:
            yield number
            start = begin


def _name_sets(samples: Iterable[_Sample]) -> dict[tuple[str, ...], str]:
    """Return the names of fields as samples have them, each with the key of the first one."""
    found: dict[tuple[str, ...], str] = {}
    for sample in samples:
        found.setdefault(tuple(sample.members), sample.key)
    return found


def _small_fields(samples: Iterable[_Sample]) -> set[str]:
    """Return the fields of which all values are known."""
    sizes: collections.Counter[str] = collections.Counter()
    for sample in samples:
        for name, place in sample.members.items():
            sizes[name] = max(sizes[name], place.size)
    return {name for name, size in sizes.items() if size <= _MOST_VALUE_BYTES}


def _num_classes(samples: Iterable[_Sample]) -> int:
    labels = (sample.members.get(LABEL_FIELD) for sample in samples)
    return count_classes({LABEL_FIELD: each.value} for each in labels if each and each.value)


def _schema(
    names: Mapping[tuple[str, ...], str],
    small: set[str],
    options: IndexOptions,
    *,
    is_one: bool = False,
) -> Schema:
    """Return a schema.

    Args:
        names: Names of fields as samples have them.
        small: Fields whose values are all small, which the index has.
        options: What a user says of fields.
        is_one: Whether these are the samples of one tar, which may lack fields of others.
    """
    given = options.kinds
    if is_one:
        there = set(itertools.chain.from_iterable(names))
        given = {name: kind for name, kind in given.items() if name.partition(":")[0] in there}
    kinds, parts = plan_kinds(names, given, options.lists, keep_numbered=options.keep_numbered)
    found = []
    for name, kind in kinds.items():
        is_small = name in small and kind not in (IMAGE, IMAGE_LIST)
        # Kinds are checked where they are given.
        found.append(Field(name, kind, 0 if is_small else 1))  # type: ignore[arg-type]
    found.sort(key=lambda field: (not field.is_image, field.kind == IMAGE_LIST))
    try:
        return decode_schema(Schema("none", (), PLAIN, 0, tuple(found), parts, ()).encode())
    except PCRError as error:
        raise EncodeError(f"cannot index samples with these fields: {error}") from error


def _make_index(
    samples: Sequence[_Sample], schema: Schema, about: PlainTar, is_checked: bool
) -> ShardIndex:
    """Return the index of a part of a tar, without its head."""
    lists = set(schema.lists)
    units: list[_Place | None] = []
    counts = []
    for sample in samples:
        own = sample.members
        numbers: dict[str, list[tuple[int, _Place]]] = {name: [] for name in schema.lists}
        for name, place in own.items():
            if (of := in_list(name, lists)) != name:
                numbers[of].append(((place_in_list(name) or ("", 0))[1], place))
        for name in schema.streams:
            if name in numbers:
                units += [place for _, place in sorted(numbers[name])]
            else:
                units.append(own.get(name))
        counts.append([len(each) for each in numbers.values()])
    others = [field.name for field in schema.fields if not field.is_image]
    members = units + [sample.members.get(name) for name in others for sample in samples]
    tar = dataclasses.replace(
        about,
        starts=np.array([place.start if place else 0 for place in members], np.int64),
        sizes=np.array([place.size if place else ABSENT for place in members], "<u4"),
        crcs=np.array(
            [place.crc if place else 0 for place in members] if is_checked else [], "<u4"
        ),
    )
    dims = [place.dims if place else (0, 0) for place in units]
    zeros = np.zeros(len(units), "<u2")
    return ShardIndex(
        Head(len(samples), 0, 0, 0, 0, (0,), (0,), (0,)),
        schema,
        counts=np.array(counts, "<u1").reshape(len(samples), len(lists)),
        states=np.array([State.WHOLE if place else State.MISSING for place in units], "<u1"),
        dims=np.array(dims, "<u2").reshape(-1, 2),
        orientation=zeros.astype("<u1"),
        profile_numbers=zeros,
        keys=tuple(sample.key for sample in samples),
        profiles=(),
        fields={
            name: tuple(_value(sample.members.get(name)) for sample in samples)
            for name in schema.columns
        },
        tar=tar,
    )


def _value(place: _Place | None) -> bytes | None:
    return place.value if place else None


def _samples_of(index: ShardIndex) -> Iterator[_Sample]:
    """Yield the samples that an index was made of."""
    tar, schema = index.tar, index.schema
    assert tar is not None
    starts, sizes = tar.starts.tolist(), tar.sizes.tolist()
    crcs = tar.crcs.tolist() if tar.is_checked else [0] * len(starts)
    dims = index.dims.tolist()
    others = [field.name for field in schema.fields if not field.is_image]
    unit = 0
    for row, key in enumerate(index.keys):
        members = {}
        for stream, count in zip(schema.streams, index.unit_counts[row].tolist(), strict=True):
            is_list = stream in schema.lists
            for place in range(count):
                if sizes[unit] != ABSENT:
                    name = numbered(stream, place) if is_list else stream
                    size = tuple(dims[unit])
                    members[name] = _Place(starts[unit], sizes[unit], crcs[unit], None, size)
                unit += 1
        for name in others:
            member = index.member_rows(name)[row]
            if sizes[member] != ABSENT:
                value = index.fields[name][row] if name in index.fields else None
                members[name] = _Place(starts[member], sizes[member], crcs[member], value, (0, 0))
        yield _Sample(key, members)
