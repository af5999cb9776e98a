"""A loaded prefix: its images in memory, each joined and compared with its checksum."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from .. import native
from ..checksum import crc32c
from ..errors import CorruptJpeg, CorruptPiece, PCRError, ScanUnavailable
from ..format.scan import FULL, Scan, check_scan
from ..format.shard_index import ShardIndex
from ..jpeg.markers import EOI
from ..jpeg.split import join_pieces
from ..native import scatter
from ..storage import Window
from ..storage.local_file import LocalFile

Sizes = NDArray[np.int64]
Sample = dict[str, Any]
Samples = Iterator[Sample]
Select = Callable[[str, str], bool]
OnError = Callable[[PCRError], bool]
Decode = Callable[[list[memoryview]], Any]


class Source(Protocol):
    """What a prefix was read from: a :class:`Shard`."""

    url: str

    @property
    def index(self) -> ShardIndex:
        """Where everything is."""

    def change_scan(self, prefix: Prefix, scan: Scan) -> Prefix:
        """The prefix of another scan."""


class Images(NamedTuple):
    """The images of a shard, by sample and then by stream: its units.

    Attributes:
        scan: The highest scan that they hold.
        jpegs: Whole JPEGs with their EOI; ``None`` for a stream that a sample lacks.
        tails: Metadata of each; empty below ``"full"``.
        damaged: Units whose JPEG or tail does not have its checksum.
    """

    scan: Scan
    jpegs: list[bytes | None]
    tails: list[bytes | None]
    damaged: frozenset[int]


def read_images(
    source: LocalFile | Window,
    index: ShardIndex,
    scan: Scan,
    *,
    check: bool,
) -> Images:
    """Read the part of a prefix that follows the index, once.

    Args:
        source: Holds the bytes up to the prefix stop.
        index: The shard's index.
        scan: What to read.
        check: Whether to compare checksums.

    Raises:
        TruncatedShard: The file ends early.
        OSError: It cannot be read.
    """
    scan = _highest_held(index, scan)
    return _read_rows(source, index, index.head.body_stop, 0, scan, check=check)


def extend_images(
    source: LocalFile | Window,
    index: ShardIndex,
    images: Images,
    scan: Scan,
    *,
    check: bool,
) -> Images:
    """Images of a higher scan, of which only what is missing is read; see :func:`read_images`."""
    scan = _highest_held(index, scan)
    first = num_scans(index, images.scan)
    start = index.head.prefix_stop(images.scan)
    more = _read_rows(source, index, start, first, scan, check=False)
    jpegs = [_longer(old, new) for old, new in zip(images.jpegs, more.jpegs, strict=True)]
    grown = more._replace(jpegs=jpegs)
    return grown._replace(damaged=frozenset(_find_damaged(index, grown))) if check else grown


def num_scans(index: ShardIndex, scan: Scan) -> int:
    """How many scan groups a scan has; the metadata of ``"full"`` are not one."""
    return min(check_scan(scan, index.num_groups), index.num_groups)


def _highest_held(index: ShardIndex, scan: Scan) -> Scan:
    """The highest scan whose prefix is not longer: the base groups of a preview lie together."""
    end = index.head.prefix_stop(scan)
    held = sum(stop <= end for stop in index.head.prefix_stops)
    return FULL if held > index.num_groups else held


def _read_rows(
    source: LocalFile | Window,
    index: ShardIndex,
    start: int,
    first: int,
    scan: Scan,
    *,
    check: bool,
) -> Images:
    """Images made of the groups after the first ones, and their metadata."""
    rows = num_scans(index, scan)
    stop = index.head.prefix_stop(rows)
    crcs = index.crcs[rows - 1] if check else None
    read = source.scatter(start, stop, _groups(index, first, rows), ending=EOI, crcs=crcs)
    if scan != FULL:
        return Images(scan, read.values, [], frozenset(read.damaged))
    crcs = index.crcs[-1] if check else None
    end = index.head.prefix_stop(FULL)
    tails = source.scatter(stop, end, _groups(index, rows, rows + 1), crcs=crcs)
    damaged = frozenset([*read.damaged, *tails.damaged])
    return Images(scan, read.values, tails.values, damaged)


def _groups(
    index: ShardIndex,
    first: int,
    stop: int,
) -> scatter.Groups:
    base = min(index.schema.base, stop) if first == 0 else 0
    starts = index.group_starts[first:stop]
    return scatter.Groups(index.sizes[first:stop], starts, base, index.base_offsets)


def _longer(old: bytes | None, new: bytes | None) -> bytes | None:
    if old is None or new is None:
        return old
    return old[: -len(EOI)] + new


def _find_damaged(index: ShardIndex, images: Images) -> Iterator[int]:
    expected = index.crcs[num_scans(index, images.scan) - 1].ravel().tolist()
    for unit, (jpeg, crc) in enumerate(zip(images.jpegs, expected, strict=True)):
        if jpeg is not None and crc32c(memoryview(jpeg)[: -len(EOI)]) != crc:
            yield unit
    for unit, tail in enumerate(images.tails):
        if tail is not None and crc32c(tail) != index.crcs[-1].flat[unit]:
            yield unit


class Prefix:
    """The samples of a prefix in memory; from :meth:`Shard.load`.

    Attributes:
        shard: What it was read from.
        index: The shard's index.
        scan: The scan of its samples.
        streams: Names of the image fields.
        num_bytes: What is held in memory until :meth:`close`, nearly.
    """

    def __init__(
        self,
        shard: Source,
        scan: Scan,
        images: Images,
    ) -> None:
        self.shard = shard
        self.scan = scan
        self.index = shard.index
        self.images = images
        self.streams = tuple(field for field, _ in self.index.schema.streams)
        self.num_bytes = self.index.head.prefix_stop(images.scan)
        self._lower: dict[Scan, Prefix] = {}
        self._num_scans = num_scans(self.index, scan)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back, except for the samples that the caller keeps."""
        self.images = self.images._replace(jpegs=[], tails=[])
        self._lower.clear()

    def at(self, scan: Scan) -> Prefix:
        """The same images at this or a lower scan; nothing is read or copied.

        Raises:
            ScanUnavailable: The scan is higher than what is held.
        """
        if scan == self.scan:
            return self
        if self.index.head.prefix_stop(scan) > self.num_bytes:
            message = f"asked for scan {scan} of a prefix of scan {self.scan}"
            raise ScanUnavailable(message, url=self.shard.url)
        if scan not in self._lower:
            self._lower[scan] = Prefix(self.shard, scan, self.images)
        return self._lower[scan]

    def samples(
        self,
        rows: Iterable[int] | None = None,
        *,
        select: Select | None = None,
        on_error: OnError | None = None,
        decode: Decode | None = None,
    ) -> Samples:
        """The samples of the shard.

        Args:
            rows: Which samples, in which order; all in the order of the shard by default.
            select: Called with (key, field); False leaves the field out.
            on_error: Called with the error of a damaged sample; True goes on with the next sample.
                By default the error is raised.
            decode: Called with the pieces of an image, one for each scan group; its result takes
                the place of the bytes.
                ``functools.partial(ImageDecoder(224, "random"), rng=rng)`` is one.

        Yields:
            ``__key__``, image fields as complete JPEGs, other fields as stored, all bytes.

        Raises:
            CorruptPiece: A sample is damaged; names its key and scan.
            ValueError: The prefix is closed.
        """
        plain = rows is None and select is None and decode is None
        if plain and (every := self._all_rows()) is not None:
            yield from every
            return
        for row in range(len(self.index.keys)) if rows is None else rows:
            try:
                sample = self.sample(row, select=select, decode=decode)
            except PCRError as error:
                if on_error is None or not on_error(error):
                    raise
                continue
            yield sample

    def _all_rows(self) -> list[Sample] | None:
        """All samples at once, made of columns; ``None`` where they must be made one by one."""
        jpegs = self._open_jpegs()
        fields = self.index.fields.values()
        as_read = self.scan == self.images.scan and not self.images.damaged
        if not (as_read and all(jpegs)) or any(None in column for column in fields):
            return None
        try:
            jpegs = self._with_tails(jpegs)
        except CorruptJpeg:
            return None
        step = len(self.streams)
        images = [jpegs[stream::step] for stream in range(step)]
        names = ("__key__", *self.streams, *self.index.fields)
        return scatter.rows(names, (self.index.keys, *images, *fields), len(self.index.keys))

    def _with_tails(self, jpegs: list[bytes | None]) -> list[bytes | None]:
        if not any(self.images.tails):
            return jpegs
        whole = list(jpegs)
        for unit, tail in enumerate(self.images.tails):
            jpeg = whole[unit]
            if tail is not None and jpeg is not None:
                whole[unit] = join_pieces([jpeg[: -len(EOI)]], tail)
        return whole

    def sample(
        self,
        row: int,
        *,
        select: Select | None = None,
        decode: Decode | None = None,
    ) -> Sample:
        """One sample by its position; see :meth:`samples`."""
        key = self.index.keys[row]
        sample: Sample = {"__key__": key}
        jpegs = self._open_jpegs()
        for unit, field in enumerate(self.streams, row * len(self.streams)):
            if jpegs[unit] is not None and (select is None or select(key, field)):
                sample[field] = self._image(unit, decode)
        for field, values in self.index.fields.items():
            value = values[row]
            if value is not None and (select is None or select(key, field)):
                sample[field] = value
        return sample

    def table(self, rows: list[int]) -> native.Table:
        """Where the images of some samples are in memory, for the native core.

        For shards of one stream. The table is valid until :meth:`close`.

        Returns:
            (len(rows), 1) addresses and sizes; size 0 for an image that is missing or damaged.
        """
        jpegs = self._open_jpegs()
        usable = [None if row in self.images.damaged else jpegs[row] for row in rows]
        return native.image_table(usable, self._ends[rows])

    @cached_property
    def _ends(self) -> Sizes:
        """(units,) bytes of each JPEG at this scan, without EOI."""
        sizes = self.index.sizes[: self._num_scans]
        ends: Sizes = sizes.reshape(self._num_scans, -1).sum(axis=0, dtype=np.int64)
        return ends

    def _open_jpegs(self) -> list[bytes | None]:
        jpegs = self.images.jpegs
        if len(jpegs) != len(self.index.keys) * len(self.streams):
            raise ValueError("expected to be asked for samples before the prefix was closed")
        return jpegs

    def _scans(self, unit: int) -> memoryview:
        """The scans of an image, without EOI."""
        view = memoryview(self.images.jpegs[unit] or b"")[: self._ends[unit]]
        self._check(unit, view)
        return view

    def _pieces(self, unit: int) -> list[memoryview]:
        """The bytes of each scan group of an image."""
        scans = self._scans(unit)
        stops = itertools.accumulate(self._sizes(unit), initial=0)
        return [scans[start:stop] for start, stop in itertools.pairwise(stops)]

    def _image(self, unit: int, decode: Decode | None) -> Any:
        if decode is None:
            return self._jpeg(unit)
        try:
            return decode(self._pieces(unit))
        except PCRError as error:
            raise type(error)(str(error), url=self.shard.url, key=self._key(unit)) from error

    def _jpeg(self, unit: int) -> bytes:
        jpeg = self.images.jpegs[unit] or b""
        whole = self.scan == self.images.scan
        scans = self._scans(unit)
        if not whole:
            return bytes(scans) + EOI
        tail = self.images.tails[unit] if self.scan == FULL else None
        if tail is None:
            return jpeg
        if unit in self.images.damaged:
            self._compare(unit, -1, crc32c(tail), len(tail))
        try:
            return join_pieces([scans], tail)
        except CorruptJpeg as error:
            message = f"the tail: {error}"
            key = self._key(unit)
            raise CorruptJpeg(message, url=self.shard.url, key=key, scan="tail") from error

    def _check(self, unit: int, scans: memoryview) -> None:
        """Of a damaged image, name the first scan whose bytes are not those that were written."""
        if unit not in self.images.damaged:
            return
        crc = 0
        start = 0
        for row, size in enumerate(self._sizes(unit)):
            crc = crc32c(scans[start : start + size], crc)
            self._compare(unit, row, crc, size)
            start += size

    def _sizes(self, unit: int) -> list[int]:
        """The bytes of each scan of an image."""
        rows = self.index.sizes[: self._num_scans]
        sizes: list[int] = rows.reshape(self._num_scans, -1)[:, unit].tolist()
        return sizes

    def _compare(
        self,
        unit: int,
        row: int,
        crc: int,
        size: int,
    ) -> None:
        expected = int(self.index.crcs[row].flat[unit])
        if crc != expected:
            raise CorruptPiece(
                f"expected CRC-32C {expected:08x}, got {crc:08x} for {size} bytes",
                url=self.shard.url,
                key=self._key(unit),
                scan="tail" if row == -1 else row + 1,
                offset=int(self.index.starts(FULL)[row].flat[unit]),
            )

    def _key(self, unit: int) -> str:
        return self.index.keys[unit // len(self.streams)]
