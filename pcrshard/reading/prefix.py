"""A loaded prefix: its images in memory, each joined and compared with its checksum."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import native
from ..checksum import crc32c
from ..errors import CorruptJpeg, CorruptPiece, PCRError, ScanUnavailable
from ..format.names import is_other_image, numbered
from ..format.piece_places import piece_starts
from ..format.scan import FULL, Scan, check_scan
from ..format.shard_index import ShardIndex
from ..jpeg.markers import EOI
from ..jpeg.orientation import with_orientation
from ..jpeg.split import join_pieces
from ..native import scatter
from .images import Images, num_scans

Sizes = NDArray[np.int64]
Sample = dict[str, Any]
Samples = Iterator[Sample]
Select = Callable[[str, str], bool]
OnError = Callable[[PCRError], bool]
Decode = Callable[[list[memoryview]], Any]
Jpeg = TypeVar("Jpeg", bytes, memoryview, bytes | None)


def number_lists(sample: Sample) -> Sample:
    """A sample with each image of a list as a field of its own: ``images.0.jpg``, ..."""
    if not any(isinstance(value, list) for value in sample.values()):
        return sample
    flat: Sample = {}
    for field, value in sample.items():
        if isinstance(value, list):
            flat |= {numbered(field, place): image for place, image in enumerate(value)}
        else:
            flat[field] = value
    return flat


class Source(Protocol):
    """What a prefix was read from: a :class:`Shard`."""

    url: str

    @property
    def index(self) -> ShardIndex:
        """Where everything is."""

    def change_scan(self, prefix: Prefix, scan: Scan) -> Prefix:
        """The prefix of another scan."""


class Prefix:
    """The samples of a prefix in memory; from :meth:`Shard.load`.

    Attributes:
        shard: What it was read from.
        index: The shard's index.
        scan: The scan of its samples.
        streams: Names of the image fields; none at scan 0.
        fields: The other fields that this scan has: for each a value or ``None`` by sample.
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
        schema = self.index.schema
        position = check_scan(scan, self.index.num_groups, 0)
        self._num_scans = num_scans(self.index, scan)
        self.streams = tuple(field for field, _ in schema.streams) if position else ()
        held = {name: images.late[name] for name, first in schema.late if first <= position}
        self.fields: dict[str, Sequence[bytes | None]] = {**self.index.fields, **held}
        self.num_bytes = self.index.head.prefix_stop(images.scan)
        self._lower: dict[Scan, Prefix] = {}

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
                the place of the bytes. ``ImageDecoder(224, "random")`` is one.

        Yields:
            ``__key__``, image fields as complete JPEGs, other fields as stored, all bytes. Below
            full fidelity an image has none of its metadata but an EXIF orientation.

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
        jpegs = self._open_jpegs() if self.streams else []
        fields = self.fields.values()
        unsound = self.images.damaged or self.images.damaged_late
        as_read = self.scan == self.images.scan and not unsound and not self.index.schema.lists
        if not (as_read and all(jpegs)) or any(None in column for column in fields):
            return None
        try:
            jpegs = self._with_tails(jpegs)
        except CorruptJpeg:
            return None
        if self.scan != FULL and self._turned:
            jpegs = list(map(self._oriented, itertools.count(), jpegs))
        step = len(self.streams)
        images = [jpegs[stream::step] for stream in range(step)]
        names = ("__key__", *self.streams, *self.fields)
        return scatter.rows(names, (self.index.keys, *images, *fields), len(self.index.keys))

    def _with_tails(self, jpegs: list[bytes | None]) -> list[bytes | None]:
        if not any(self.images.tails):
            return jpegs
        whole = list(jpegs)
        for unit, tail in enumerate(self.images.tails):
            jpeg = whole[unit]
            if tail is not None and jpeg is not None:
                whole[unit] = join_pieces([memoryview(jpeg)[: -len(EOI)]], tail)
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
        self._open_jpegs()
        for field, units in self.units(row):
            is_list = field in self.index.schema.lists
            if (units or is_list) and (select is None or select(key, field)):
                images = [self._image(unit, decode) for unit in units]
                sample[field] = images if is_list else images[0]
        return sample | self.other_fields(row, select)

    def other_fields(self, row: int, select: Select | None = None) -> Sample:
        """A sample without the images that the scans hold; see :meth:`sample`."""
        key = self.index.keys[row]
        sample: Sample = {"__key__": key}
        for field, values in self.fields.items():
            value = values[row]
            if value is not None and (select is None or select(key, field)):
                self._check_late(field, row)
                sample[field] = value
        return sample

    def units(self, row: int) -> Iterator[tuple[str, Sequence[int]]]:
        """Each image field of a sample, and which units it has: none where it lacks the field."""
        unit = self.index.first_units[row]
        lists = self.index.schema.lists
        counts = self.index.unit_counts[row].tolist() if lists else [1] * len(self.streams)
        for field, count in zip(self.streams, counts, strict=False):
            here = range(unit, unit + count)
            unit += count
            is_there = field in lists or self.images.jpegs[here[0]] is not None
            yield field, here if is_there else ()

    @cached_property
    def _turned(self) -> frozenset[int]:
        """Images whose EXIF orientation is not that of their pixels."""
        return frozenset(np.flatnonzero(self.index.orientation > 1).tolist())

    def _oriented(self, unit: int, jpeg: Jpeg) -> Jpeg | bytes:
        """A JPEG that says which way up it is, which its metadata say at full fidelity only."""
        if jpeg is None or unit not in self._turned:
            return jpeg
        return with_orientation(jpeg, int(self.index.orientation[unit]))

    @cached_property
    def kept_images(self) -> frozenset[str]:
        """Fields of images that are stored as files: those that could not be layered.

        Where a shard has no JPEG at all they are the images that are no JPEG, such as PNG; beside
        a JPEG these are taken for masks or the like.
        """
        schema = self.index.schema
        streams = {field for field, _ in schema.streams}
        if streams:
            return frozenset(streams & {field for field, _ in schema.late})
        images = {field for field in self.fields if is_other_image(field)}
        return frozenset(images)

    @property
    def has_one_image(self) -> bool:
        """Whether each sample has one image at most, so that its unit is its position."""
        return len(self.streams) == 1 and not self.index.schema.lists

    def table(self, units: list[int]) -> native.Table:
        """Where some images are in memory, for the native core; it is valid until :meth:`close`.

        Where :attr:`has_one_image` holds, the unit of a sample is its row.

        Returns:
            (len(units), 1) addresses and sizes; size 0 for an image that is missing or damaged.
        """
        self._open_jpegs()
        return self._table[units]

    @cached_property
    def _table(self) -> native.Table:
        """That of all images."""
        damaged = self.images.damaged
        usable = [
            () if jpeg is None or unit in damaged else (jpeg,)
            for unit, jpeg in enumerate(self._open_jpegs())
        ]
        table = native.piece_table(usable)
        table["size"] = np.minimum(table["size"], self._ends[:, None])
        return table

    @cached_property
    def _sizes(self) -> NDArray[np.uint32]:
        """(scans, units) bytes of each piece up to this scan."""
        table = self.images.table
        return np.zeros((0, self.index.num_units), np.uint32) if table is None else table.sizes

    @cached_property
    def _ends(self) -> Sizes:
        """(units,) bytes of each JPEG at this scan, without EOI."""
        ends: Sizes = self._sizes[: self._num_scans].sum(axis=0, dtype=np.int64)
        return ends

    def _open_jpegs(self) -> list[bytes | None]:
        jpegs = self.images.jpegs
        if len(jpegs) != self.index.num_units:
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
        stops = itertools.accumulate(self._row_sizes(unit), initial=0)
        return [scans[start:stop] for start, stop in itertools.pairwise(stops)]

    def _image(self, unit: int, decode: Decode | None) -> Any:
        if decode is None:
            return self._jpeg(unit)
        # Outside of the try: what is wrong with them already says where.
        pieces = self._pieces(unit)
        pieces[0] = memoryview(self._oriented(unit, pieces[0]))
        try:
            return decode(pieces)
        except PCRError as error:
            raise type(error)(str(error), url=self.shard.url, key=self._key(unit)) from error

    def _jpeg(self, unit: int) -> bytes:
        jpeg = self.images.jpegs[unit] or b""
        whole = self.scan == self.images.scan
        scans = self._scans(unit)
        if not whole:
            return b"".join((self._oriented(unit, scans), EOI))
        tail = self.images.tails[unit] if self.scan == FULL else None
        if tail is None:
            return jpeg if self.scan == FULL else self._oriented(unit, jpeg)
        if unit in self.images.damaged:
            self._compare(unit, self.index.num_groups, crc32c(tail))
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
        for row, size in enumerate(self._row_sizes(unit)):
            crc = crc32c(scans[start : start + size], crc)
            self._compare(unit, row, crc)
            start += size

    def _row_sizes(self, unit: int) -> list[int]:
        sizes: list[int] = self._sizes[: self._num_scans, unit].tolist()
        return sizes

    def _compare(
        self,
        unit: int,
        row: int,
        crc: int,
    ) -> None:
        is_tail = row == self.index.num_groups
        table = self.images.tail_table if is_tail else self.images.table
        if table is None:
            return
        at = (row - table.rows.start, unit)
        expected = int(table.crcs[at])
        if crc != expected:
            raise CorruptPiece(
                f"expected CRC-32C {expected:08x}, got {crc:08x} for {table.sizes[at]} bytes",
                url=self.shard.url,
                key=self._key(unit),
                scan="tail" if is_tail else row + 1,
                offset=int(piece_starts(self.index, table)[at]),
            )

    def _check_late(self, field: str, row: int) -> None:
        if (field, row) not in self.images.damaged_late:
            return
        raise CorruptPiece(
            f"expected the field {field} to have its CRC-32C",
            url=self.shard.url,
            key=self.index.keys[row],
            scan=dict(self.index.schema.late)[field],
        )

    def _key(self, unit: int) -> str:
        row = bisect.bisect_right(self.index.first_units, unit) - 1
        return self.index.keys[row]
