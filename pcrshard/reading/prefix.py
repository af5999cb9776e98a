"""A loaded prefix: its images in memory, in place, each verified by its checksum."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ..checksum import crc32c
from ..errors import CorruptJpeg, CorruptPiece, PCRError, ScanUnavailable
from ..format.names import is_other_image, numbered
from ..format.scan import FULL, Scan, check_scan
from ..jpeg.markers import EOI
from ..jpeg.orientation import with_orientation
from ..jpeg.split import join_pieces
from ..native.pieces import Table, empty_table, join
from .contents import Contents, Pieces, num_scans

if TYPE_CHECKING:
    from .shard import Shard

Sample = dict[str, Any]
Samples = Iterator[Sample]
Select = Callable[[str, str], bool]
OnError = Callable[[PCRError], bool]
Decode = Callable[[list[memoryview]], Any]
Jpeg = TypeVar("Jpeg", bytes, memoryview)


def number_lists(sample: Sample) -> Sample:
    """Return a sample with each image of a list as its own field: ``images.0.jpg``, ..."""
    flat: Sample = {}
    for field, value in sample.items():
        if isinstance(value, list):
            flat |= {numbered(field, place): image for place, image in enumerate(value)}
        else:
            flat[field] = value
    return flat


class Prefix:
    """The samples of a prefix in memory; from :meth:`Shard.load`.

    Attributes:
        shard: The source.
        index: The shard's index.
        scan: The scan of the samples.
        streams: Names of the image fields; none at scan 0.
        fields: The other fields at this scan; for each, a value or ``None`` per sample.
        names: Names of all fields at this scan, images first.
        num_bytes: Bytes held in memory until :meth:`close`.
    """

    def __init__(self, shard: Shard, scan: Scan, contents: Contents) -> None:
        self.shard = shard
        self.scan = scan
        self.index = contents.index
        self._contents: Contents | None = contents
        schema = self.index.schema
        position = check_scan(scan, self.index.num_groups, 0)
        self._num_scans = num_scans(self.index, scan)
        self.streams = tuple(field for field, _ in schema.streams) if position else ()
        held = {name: contents.late[name] for name, first in schema.late if first <= position}
        self.fields: dict[str, Sequence[bytes | None]] = {**self.index.fields, **held}
        self.names = schema.names_at(position)
        self.num_bytes = len(contents.buffer)
        self._lower: dict[Scan, Prefix] = {}

    @property
    def contents(self) -> Contents:
        """The prefix in memory.

        Raises:
            ValueError: The prefix is closed.
        """
        if self._contents is None:
            raise ValueError("expected to be asked for samples before the prefix was closed")
        return self._contents

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the memory, unless a decoder still reads it; samples remain valid."""
        self._contents = None
        for lower in self._lower.values():
            lower.close()
        self._lower.clear()

    def at(self, scan: Scan) -> Prefix:
        """Return the same images at this or a lower scan; nothing is read or copied.

        Raises:
            ScanUnavailable: The scan is higher than the loaded one.
        """
        if scan == self.scan:
            return self
        if self.index.head.prefix_stop(scan) > self.num_bytes:
            message = f"asked for scan {scan} of a prefix of scan {self.scan}"
            raise ScanUnavailable(message, url=self.shard.url)
        if scan not in self._lower:
            self._lower[scan] = Prefix(self.shard, scan, self.contents)
        return self._lower[scan]

    def samples(
        self,
        *,
        select: Select | None = None,
        on_error: OnError | None = None,
        decode: Decode | None = None,
    ) -> Samples:
        """Yield the samples of the shard in its order.

        Args:
            select: Called with (key, field); False leaves the field out.
            on_error: Called with the error of a damaged sample; if it returns True, the sample is
                skipped. By default, the error is raised.
            decode: Called with the pieces of an image, one per scan group; its result replaces the
                bytes. For example, ``ImageDecoder(224, "random")``.

        Yields:
            ``__key__``, image fields as complete JPEGs, other fields as stored, all bytes. Below
            full fidelity, an image has no metadata except its EXIF orientation.

        Raises:
            CorruptPiece: A sample is damaged; the error names its key and scan.
            ValueError: The prefix is closed.
        """
        for row in range(self.index.num_samples):
            try:
                sample = self.sample(row, select=select, decode=decode)
            except PCRError as error:
                if on_error is None or not on_error(error):
                    raise
                continue
            yield sample

    def sample(
        self,
        row: int,
        *,
        select: Select | None = None,
        decode: Decode | None = None,
    ) -> Sample:
        """Return one sample by position; see :meth:`samples`."""
        key = self.index.keys[row]
        sample: Sample = {"__key__": key}
        for field in self.names:
            if select is None or select(key, field):
                value = self.value(row, field, decode)
                if value is not None:
                    sample[field] = value
        return sample

    def value(self, row: int, field: str, decode: Decode | None = None) -> Any:
        """Return one field of a sample, ``None`` if the sample lacks it; see :meth:`sample`."""
        if field in self.streams:
            units = self.units_of(row, field)
            if field in self.index.schema.lists:
                return [self._image(unit, decode) for unit in units]
            if units:
                return self._image(units[0], decode)
        found = self.fields.get(field)
        if found is None or found[row] is None:
            return None
        if (field, row) in self.contents.damaged_late:
            raise CorruptPiece(
                f"expected the field {field} to have its CRC-32C",
                url=self.shard.url,
                key=self.index.keys[row],
                scan=dict(self.index.schema.late)[field],
            )
        return found[row]

    def units_of(self, row: int, field: str) -> range:
        """Return the units of a sample's image field, none if the sample lacks the field."""
        if field not in self.streams:
            return range(0)
        first = row * len(self.streams) + self.streams.index(field)
        stop = first + 1
        if self.index.schema.lists:
            first, stop = self._first_units[first : stop + 1]
        is_there = field in self.index.schema.lists or self.index.dims[first, 0]
        return range(first, stop) if is_there else range(0)

    @cached_property
    def _first_units(self) -> list[int]:
        """The first unit of each sample in each stream, then the number of units."""
        return [0, *self.index.unit_counts.cumsum().tolist()]

    def _oriented(self, unit: int, jpeg: Jpeg) -> Jpeg | bytes:
        """Return a JPEG with an orientation tag, which only the metadata of full fidelity has."""
        orientation = int(self.index.orientation[unit])
        return with_orientation(jpeg, orientation) if orientation > 1 else jpeg

    @cached_property
    def passthrough_images(self) -> frozenset[str]:
        """Image fields stored unchanged because they could not be rearranged into scans.

        In a shard without any JPEG, these include images such as PNG; next to a JPEG, such images
        are taken for masks.
        """
        schema = self.index.schema
        streams = {field for field, _ in schema.streams}
        if streams:
            return frozenset(streams & {field for field, _ in schema.late})
        images = {field for field in self.fields if is_other_image(field)}
        return frozenset(images)

    def table(self, units: list[int]) -> Table:
        """Return the addresses of some images for the native core, valid until :meth:`close`.

        Returns:
            (len(units), P) addresses and sizes of their pieces, in order; sizes of 0 for an image
            that is missing or damaged.
        """
        contents = self.contents
        if contents.groups is None:
            return empty_table(len(units), 1)
        table = contents.groups.native[units, : 2 * self._num_scans]
        if contents.damaged:
            table["size"][[unit in contents.damaged for unit in units]] = 0
        return table

    def _image(self, unit: int, decode: Decode | None) -> Any:
        contents = self.contents  # held until its bytes are copied: another thread may close
        groups = contents.groups
        assert groups is not None  # asked for at scan 1 or higher
        tail = contents.tail if self.scan == FULL and decode is None else None
        if unit in contents.damaged:
            self._find_damage(unit, groups, range(self._num_scans))
            if tail is not None:
                self._find_damage(unit, tail, range(1))
        if decode is None and (tail is None or not tail.table.sizes[0, unit]):
            jpeg = join(groups.native[unit, : 2 * self._num_scans], EOI).tobytes()
            return bytes(self._oriented(unit, jpeg))
        pieces = groups.of_unit(unit)[: self._num_scans]
        try:
            if decode is not None:
                pieces[0] = memoryview(self._oriented(unit, pieces[0]))
                return decode(pieces)
            assert tail is not None
            return join_pieces(pieces, bytes(tail.of_unit(unit)[0]))
        except PCRError as error:
            url, key = self.shard.url, self._key(unit)
            if decode is None:
                raise CorruptJpeg(f"the tail: {error}", url=url, key=key, scan="tail") from error
            raise type(error)(str(error), url=url, key=key) from error

    def _find_damage(self, unit: int, pieces: Pieces, rows: range) -> None:
        """Raise an error that names the first damaged scan of an image, if one of ``rows`` is."""
        table = pieces.table
        crc = 0
        for row, piece in zip(rows, pieces.of_unit(unit), strict=False):
            crc = crc32c(piece, crc)
            expected = int(table.crcs[row, unit])
            if crc != expected:
                scan = table.rows[row] + 1
                raise CorruptPiece(
                    f"expected CRC-32C {expected:08x}, got {crc:08x} for {len(piece)} bytes",
                    url=self.shard.url,
                    key=self._key(unit),
                    scan="tail" if scan > self.index.num_groups else scan,
                    offset=pieces.start(row, unit),
                )

    def _key(self, unit: int) -> str:
        row = bisect.bisect_right(self.index.first_units, unit) - 1
        return self.index.keys[row]
