"""Contents of a prefix after its index: images, metadata and deferred fields, checked in place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..checksum import crc32c
from ..errors import CorruptIndex
from ..format.columns import ABSENT
from ..format.group_table import GroupTable, decode_tables, group_starts, late_starts
from ..format.scan import Scan, check_scan
from ..format.shard_index import ShardIndex
from ..native.pieces import Table, address, find_damaged, join, place_pieces

# A value of a deferred field: the field's name and the sample's position.
LateValue = tuple[str, int]


class Pieces(NamedTuple):
    """Locations of the pieces of all units, for consecutive groups or for the tail.

    Attributes:
        table: The table that the shard stores for them.
        buffer: (bytes,) uint8, the prefix.
        native: (U, 2 R) address and size of the header and the own bytes of each piece, in order.
    """

    table: GroupTable
    buffer: NDArray[np.uint8]
    native: Table

    def of_unit(self, unit: int) -> list[memoryview]:
        """Return copies of a unit's piece in each group."""
        row = self.native[unit]
        return [join(row[first : first + 2]).data for first in range(0, len(row), 2)]

    def start(self, row: int, unit: int) -> int:
        """Return the absolute start of a piece's own bytes."""
        return int(self.native["data"][unit, 2 * row + 1]) - address(self.buffer)


@dataclass(eq=False)
class Contents:
    """The buffer of a prefix and the locations of its contents.

    The images of a shard, by sample, stream and place in a list, are its units.

    Attributes:
        buffer: (bytes,) uint8, the bytes ``[0, prefix stop)`` of the shard.
        index: The shard's index.
        groups: Pieces of images; ``None`` at scan 0.
        tail: Pieces of metadata; ``None`` below ``"full"``.
        damaged: Units whose image or metadata fails its checksum.
        late: For each deferred field up to this scan, a value or ``None`` per sample.
        damaged_late: Values of deferred fields that fail their checksum.
    """

    buffer: NDArray[np.uint8]
    index: ShardIndex
    groups: Pieces | None = None
    tail: Pieces | None = None
    damaged: set[int] = field(default_factory=set)
    late: dict[str, list[bytes | None]] = field(default_factory=dict)
    damaged_late: set[LateValue] = field(default_factory=set)

    @property
    def is_damaged(self) -> bool:
        """Whether anything fails its checksum."""
        return bool(self.damaged or self.damaged_late)


def num_scans(index: ShardIndex, scan: Scan) -> int:
    """Return the number of scan groups up to a scan; the metadata of ``"full"`` is not a group."""
    return min(check_scan(scan, index.num_groups, 0), index.num_groups)


def find_contents(
    buffer: NDArray[np.uint8],
    index: ShardIndex,
    scan: Scan,
    *,
    url: str | None = None,
) -> Contents:
    """Locate the contents of a prefix and verify their checksums in one sweep.

    Args:
        buffer: (bytes,) uint8, ``[0, stop)`` of the shard.
        index: The shard's index.
        scan: Highest scan to locate; 0 for the index alone.
        url: Named in errors.

    Raises:
        CorruptIndex: A table breaks a rule of SPEC.md.
    """
    contents = Contents(buffer, index)
    if num_scans(index, scan):
        # The base groups of a preview share their end, and so may groups without pieces.
        held = sum(stop <= len(buffer) for stop in index.head.prefix_stops)
        contents.groups = _find_pieces(contents, range(min(held, index.num_groups)), url)
        if held > index.num_groups:
            contents.tail = _find_pieces(contents, range(index.num_groups, held), url)
    return contents


def _find_pieces(contents: Contents, rows: range, url: str | None) -> Pieces:
    """Return the pieces of some groups, after adding their deferred fields and their damage."""
    buffer, index = contents.buffer, contents.index
    places = list(index.table_places(rows.start, rows.stop))
    table = decode_tables(index, places, buffer.data, url=url)
    native = place_pieces(
        table.sizes,
        table.header_sizes,
        group_starts(index, rows),
        min(len(rows), index.schema.base) if len(table.offsets) else 0,
        table.offsets,
        table.headers,
        buffer,
    )
    if native is None:
        raise CorruptIndex("a piece is not in the prefix", url=url)
    contents.damaged.update(find_damaged(native, table.crcs[-1]))
    starts = late_starts(index, table) if table.late else {}
    for name, values in table.late.items():
        start = starts[name]
        found = contents.late[name] = []
        stored = zip(values.sizes.tolist(), values.crcs.tolist(), strict=True)
        for row, (size, crc) in enumerate(stored):
            if size == ABSENT:
                found.append(None)
                continue
            value = bytes(buffer.data[start : start + size])
            start += size
            if value and crc32c(value) != crc:
                contents.damaged_late.add((name, row))
            found.append(value)
    return Pieces(table, buffer, native)
