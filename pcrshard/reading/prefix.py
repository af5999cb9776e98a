"""A loaded prefix: its images in memory, in place, each verified by its checksum."""

from __future__ import annotations

import bisect
import copy
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..checksum import crc32c
from ..errors import CorruptIndex, CorruptJpeg, CorruptPiece, PCRError, ScanUnavailable, naming
from ..format.columns import ABSENT
from ..format.group_table import GroupTable, decode_tables, group_starts, late_starts
from ..format.names import numbered
from ..format.plain_tar import PlainTar
from ..format.scan import FULL, Scan, check_scan
from ..format.shard_index import ShardIndex
from ..jpeg.color_profiles import with_profile
from ..jpeg.markers import EOI
from ..jpeg.orientation import with_orientation
from ..jpeg.split import join_pieces
from ..lazy import lazy
from ..memory import Buffer
from ..native.pieces import Table, address, empty_table, find_damaged, join, place_pieces
from .plain_tar import Extents, whole_shard

if TYPE_CHECKING:
    from .shard import Shard

Sample = dict[str, Any]
Samples = Iterator[Sample]
OnError = Callable[[PCRError], bool]


def number_lists(sample: Sample) -> Sample:
    """Return a sample with each image of a list as its own field: ``images.0.jpg``, ..."""
    flat: Sample = {}
    for field, value in sample.items():
        if isinstance(value, list):
            flat |= {numbered(field, place): image for place, image in enumerate(value)}
        else:
            flat[field] = value
    return flat


class _MemberValues(Sequence[bytes | None]):
    """The values of a field of a plain tar, which are copied when they are asked for."""

    def __init__(self, members: Table, present: NDArray[np.bool_]) -> None:
        self._members, self._present = members, present

    def __len__(self) -> int:
        return len(self._present)

    def __getitem__(self, row: Any) -> Any:
        return join(self._members[row]).tobytes() if self._present[row] else None


class Prefix:
    """The samples of a prefix in memory; from :meth:`Shard.load`.

    The images of a shard, by sample, stream and place in a list, are its units. The memory is
    reused once nothing refers to the prefix; samples remain valid.

    Args:
        shard: The source.
        index: The shard's index.
        buffer: (bytes,) uint8, ``[0, stop)`` of the shard.
        scan: The scan of the samples.
        extents: Of a plain tar, the ranges in memory.

    Attributes:
        tables: The tables of all groups in memory, and of the tail; missing at scan 0 and for plain
            tars.
        damaged: Units, and (field, position) of values of deferred fields, that fail their
            checksum.
        streams: Names of the image fields; none at scan 0.
        fields: The other fields at this scan; for each, a value or ``None`` per sample.
        names: The names of all fields at this scan, images first.

    Raises:
        CorruptIndex: A table breaks a rule of SPEC.md.
    """

    tables: GroupTable
    # (U, 2 R) address and size of the header and the own bytes of each piece, in order.
    _native: Table

    def __init__(
        self,
        shard: Shard,
        index: ShardIndex,
        buffer: NDArray[np.uint8],
        scan: Scan,
        extents: Extents | None = None,
    ) -> None:
        self.shard = shard
        self.index = index
        self.buffer = buffer
        self.damaged: set[int | tuple[str, int]] = set()
        self._late: dict[str, Sequence[bytes | None]] = {}
        # Members of a plain tar that are there but were not read.
        self._unread: NDArray[np.bool_] | None = None
        if index.tar is not None:
            if scan == FULL:
                self._find_members(index.tar, extents or whole_shard(index))
            self._choose(scan)
            return
        # The base groups of a preview share their end, and so may groups without pieces.
        held = sum(stop <= len(buffer) for stop in index.head.prefix_stops)
        if held:
            self._find_pieces(held)
        self._choose(scan)

    def _find_pieces(self, held: int) -> None:
        """Find the pieces of the first groups, their deferred fields and their damage."""
        buffer, index, url = self.buffer, self.index, self.shard.url
        places = list(index.table_places(0, held))
        self.tables = table = decode_tables(index, places, buffer.data, url=url)
        native = place_pieces(
            table.sizes,
            table.header_sizes,
            group_starts(index, table.rows),
            index.schema.base,
            table.offsets,
            table.headers,
            buffer,
        )
        if native is None:
            raise CorruptIndex("a piece is not in the prefix", url=url)
        self._native = native
        for rows in (table.rows[: index.num_groups], table.rows[index.num_groups :]):
            if rows:
                pieces = np.ascontiguousarray(native[:, 2 * rows.start : 2 * rows.stop])
                self.damaged.update(find_damaged(pieces, table.crcs[rows[-1]]))
        for name, place in (late_starts(index, table) if table.late else {}).items():
            start, values = place, table.late[name]
            found: list[bytes | None] = []
            self._late[name] = found
            stored = zip(values.sizes.tolist(), values.crcs.tolist(), strict=True)
            for row, (size, crc) in enumerate(stored):
                value = None
                if size != ABSENT:
                    value = bytes(buffer.data[start : start + size])
                    start += size
                    if crc32c(value) != crc:
                        self.damaged.add((name, row))
                found.append(value)

    def _find_members(self, tar: PlainTar, extents: Extents) -> None:
        """Find the members of a plain tar that are in memory, and their damage."""
        index = self.index
        places = extents.place(tar.starts, tar.stops)
        present, held = tar.are_present, places >= 0
        # In the second column: a member has no shared header.
        members = empty_table(len(places), 2)
        own = present & held
        members["data"][:, 1] = np.where(own, places + address(self.buffer), 0)
        members["size"][:, 1] = np.where(own, tar.sizes, 0)
        if (present & ~held).any():
            self._unread = present & ~held
        self._native = members[: index.num_units]
        damaged = set(find_damaged(members, tar.crcs)) if tar.is_checked else set()
        self.damaged.update(unit for unit in damaged if unit < index.num_units)
        for name, _ in index.schema.late:
            rows = index.member_rows(name)
            self._late[name] = _MemberValues(members[rows.start : rows.stop], present[rows])
            self.damaged.update((name, rows.index(row)) for row in damaged if row in rows)

    def _is_unread(self, unread: NDArray[np.bool_], row: int, field: str) -> bool:
        """Return whether a field of a sample must be read, because it was not needed so far."""
        members = self.units_of(row, field)
        if field in self._late:
            members = [self.index.member_rows(field)[row]]
        return bool(unread[members].any())

    def _choose(self, scan: Scan) -> None:
        schema = self.index.schema
        position = check_scan(scan, self.index.num_groups, 0)
        self.scan = scan
        self._rows = range(position)
        # All of a plain tar is its only scan.
        self._num_scans = 1 if self.index.tar else min(position, self.index.num_groups)
        self.streams = schema.streams if position else ()
        late = {name: self._late[name] for name, first in schema.late if first <= position}
        self.fields: dict[str, Sequence[bytes | None]] = {**self.index.fields, **late}
        self.names = schema.names_at(position)

    @property
    def num_bytes(self) -> int:
        """Bytes of the shard that are held in memory."""
        return len(self.buffer)

    @lazy
    def memory_bytes(self) -> int:
        """About the bytes of memory that the prefix takes, with its index and its tables."""
        index = self.index
        # A buffer that is used again may be longer than the prefix.
        memory = self.buffer if self.buffer.base is None else self.buffer.base
        arrays = [*vars(index).values(), getattr(self, "_native", None)]
        if hasattr(self, "tables"):
            arrays += vars(self.tables).values()
        late = () if index.tar else self._late.values()
        values = itertools.chain(index.keys, *index.fields.values(), *late)
        return (
            len(memory)
            + sum(each.nbytes for each in arrays if isinstance(each, np.ndarray))
            + sum(map(sys.getsizeof, values))
        )

    def at(self, scan: Scan) -> Prefix:
        """Return the same images at this or a lower scan; nothing is read or copied.

        Raises:
            ScanUnavailable: The scan is higher than the loaded one.
        """
        if scan == self.scan:
            return self
        if not self.holds(scan):
            message = f"asked for scan {scan} of a prefix of scan {self.scan}"
            raise ScanUnavailable(message, url=self.shard.url)
        lower = copy.copy(self)
        lower._choose(scan)
        return lower

    def holds(self, scan: Scan) -> bool:
        """Return whether the bytes of a scan are in memory.

        Raises:
            ScanUnavailable: There is no such scan.
        """
        with naming(self.shard.url):
            stop = self.index.head.prefix_stop(scan)
        if self.index.tar is not None:
            return scan == 0 or hasattr(self, "_native")
        return stop <= self.num_bytes

    def without_metadata(self) -> Prefix:
        """Return the same images without what no decoder needs."""
        last = self.index.num_groups
        return self.at(last) if self.scan == FULL and last else self

    def samples(
        self,
        *,
        on_error: OnError | None = None,
    ) -> Samples:
        """Yield the samples of the shard in its order.

        Args:
            on_error: Called with the error of a damaged sample; if it returns True, the sample is
                skipped. By default, the error is raised.

        Yields:
            ``__key__``, image fields as complete JPEGs, other fields as stored, all bytes. Below
            full fidelity, an image has no metadata except its EXIF orientation.

        Raises:
            CorruptPiece: A sample is damaged; the error names its key and scan.
        """
        for row in range(self.index.num_samples):
            try:
                sample = self.sample(row)
            except PCRError as error:
                if on_error is None or not on_error(error):
                    raise
                continue
            yield sample

    def sample(self, row: int) -> Sample:
        """Return one sample by position; see :meth:`samples`.

        Raises:
            CorruptPiece: The sample is damaged.
        """
        sample: Sample = {"__key__": self.index.keys[row]}
        for field in self.names:
            value = self.value(row, field)
            if value is not None:
                sample[field] = value
        return sample

    def value(self, row: int, field: str) -> Any:
        """Return one field of a sample, ``None`` if the sample lacks it; see :meth:`samples`.

        Args:
            row: Position of the sample in the shard.
            field: Name of the field.

        Raises:
            CorruptPiece: The field is damaged.
        """
        if self._unread is not None and self._is_unread(self._unread, row, field):
            return self.shard.load_rows(self, np.array([row])).value(row, field)
        if field in self.streams:
            images = [self.image(unit) for unit in self.units_of(row, field)]
            if field in self.index.schema.lists:
                return images
            return images[0] if images else None
        if (field, row) in self.damaged:
            raise CorruptPiece(
                f"expected the field {field} to have its CRC-32C",
                url=self.shard.url,
                key=self.index.keys[row],
                scan=dict(self.index.schema.late)[field],
            )
        return self.fields[field][row] if field in self.fields else None

    def units_of(self, row: int, field: str) -> list[int]:
        """Return the units of a sample's image field, none if the sample lacks the field."""
        if field not in self.streams:
            return []
        place = row * len(self.streams) + self.streams.index(field)
        units = [place]
        if self.index.schema.lists:
            units = list(range(*self.index.first_units[place : place + 2]))
        missing = self.index.missing
        return [unit for unit in units if unit not in missing] if missing else units

    def _described(self, unit: int, jpeg: Buffer) -> Buffer:
        """Return a JPEG with its ICC profile and orientation, which full fidelity has itself."""
        orientation, profile = self.index.described.get(unit, (0, b""))
        if profile:
            jpeg = with_profile(jpeg, profile)
        return with_orientation(jpeg, orientation) if orientation > 1 else jpeg

    def table(self, units: list[int]) -> Table:
        """Return the addresses of some images for the native core, valid while the prefix is.

        Returns:
            (len(units), P) addresses and sizes of their pieces, in order; sizes of 0 for an image
            that is missing or damaged.
        """
        table = self._native[units, : 2 * self._num_scans]
        if self.damaged:
            table["size"][[unit in self.damaged for unit in units]] = 0
        return table

    def pieces(self, unit: int) -> list[memoryview]:
        """Return copies of an image's piece in each scan group.

        Raises:
            CorruptPiece: One is damaged.
        """
        self._check(unit)
        first, *rest = self._pieces(unit)[: self._num_scans]
        return [memoryview(self._described(unit, first)), *rest]

    def image(self, unit: int) -> bytes:
        """Return an image as a complete file.

        Raises:
            CorruptPiece: It is damaged.
        """
        if self._unread is not None and self._unread[unit]:
            rows = np.array([self._sample_of(unit)])
            return self.shard.load_rows(self, rows).image(unit)
        if self.damaged:
            self._check(unit)
        stop = 2 * self._num_scans
        scans = self._native[unit, :stop]
        if unit in self.index.whole:
            return join(scans).tobytes()
        if self.scan != FULL or not self.tables.sizes[-1, unit]:
            return bytes(self._described(unit, join(scans, EOI).tobytes()))
        try:
            return join_pieces([join(scans).data], bytes(join(self._native[unit, stop:])))
        except CorruptJpeg as error:
            url, key = self.shard.url, self._key(unit)
            raise CorruptJpeg(str(error), url=url, key=key, scan="tail") from error

    def _pieces(self, unit: int) -> list[memoryview]:
        """Return copies of an image's piece in each group of the scan, and of its metadata."""
        return [join(self._native[unit, 2 * row : 2 * row + 2]).data for row in self._rows]

    def _check(self, unit: int) -> None:
        """Raise an error that names the first damaged scan of an image, if there is one."""
        if unit not in self.damaged:
            return
        if self.index.tar is not None:
            raise CorruptPiece(
                f"expected CRC-32C {int(self.index.tar.crcs[unit]):08x}",
                url=self.shard.url,
                key=self._key(unit),
            )
        crc, tail = 0, self.index.num_groups
        for row, piece in enumerate(self._pieces(unit)):
            crc = crc32c(piece, crc * (row != tail))
            expected = int(self.tables.crcs[row, unit])
            if crc != expected:
                raise CorruptPiece(
                    f"expected CRC-32C {expected:08x}, got {crc:08x} for {len(piece)} bytes",
                    url=self.shard.url,
                    key=self._key(unit),
                    scan="tail" if row == tail else row + 1,
                )

    def _sample_of(self, unit: int) -> int:
        """Return the position of the sample that an image is of."""
        place = bisect.bisect_right(self.index.first_units, unit) - 1
        return place // len(self.streams)

    def _key(self, unit: int) -> str:
        return self.index.keys[self._sample_of(unit)]
