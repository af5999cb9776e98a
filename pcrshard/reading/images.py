"""What a prefix holds besides its index: images, metadata and late fields, joined and checked."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..format.group_table import (
    GroupTable,
    decode_tables,
    join_tables,
)
from ..format.piece_places import group_starts, late_starts
from ..format.scan import FULL, Scan, check_scan
from ..format.shard_index import U32, ShardIndex
from ..jpeg.markers import EOI
from ..native import scatter
from ..storage import Window
from ..storage.local_file import LocalFile

Source = LocalFile | Window
# A value of a late field: its name, and the position of its sample.
LateValue = tuple[str, int]


class Images(NamedTuple):
    """The images of a shard, by sample, stream and place in a list: its units.

    Attributes:
        scan: The highest scan that they hold; 0 for none.
        table: The pieces that they were joined from; ``None`` at scan 0.
        tail_table: Those of the metadata; ``None`` below ``"full"``.
        jpegs: Whole JPEGs with their EOI; ``None`` for a stream that a sample lacks.
        tails: Metadata of each; empty below ``"full"``.
        late: For each late field up to this scan, a value or ``None`` for each sample.
        damaged: Units whose JPEG or tail does not have its checksum.
        damaged_late: Values of late fields that do not have theirs.
    """

    scan: Scan
    table: GroupTable | None
    tail_table: GroupTable | None
    jpegs: list[bytes | None]
    tails: list[bytes | None]
    late: dict[str, list[bytes | None]]
    damaged: frozenset[int]
    damaged_late: frozenset[LateValue]

    @property
    def is_damaged(self) -> bool:
        """Whether anything does not have its checksum."""
        return bool(self.damaged or self.damaged_late)


def no_images(index: ShardIndex) -> Images:
    """Those of scan 0."""
    return Images(
        scan=0,
        table=None,
        tail_table=None,
        jpegs=[None] * index.num_units,
        tails=[],
        late={},
        damaged=frozenset(),
        damaged_late=frozenset(),
    )


def read_images(
    source: Source,
    index: ShardIndex,
    scan: Scan,
    *,
    check: bool,
    url: str | None = None,
) -> Images:
    """Read the part of a prefix that follows the index, once.

    Args:
        source: Holds the bytes up to the prefix stop.
        index: The shard's index.
        scan: What to read.
        check: Whether to compare checksums of images; those of tables always are.
        url: Named in errors.

    Raises:
        CorruptIndex: A table breaks a rule of SPEC.md.
        TruncatedShard: The file ends early.
        OSError: It cannot be read.
    """
    return extend_images(source, index, no_images(index), scan, check=check, url=url)


def extend_images(
    source: Source,
    index: ShardIndex,
    images: Images,
    scan: Scan,
    *,
    check: bool,
    url: str | None = None,
) -> Images:
    """Images of a higher scan, of which only what is missing is read; see :func:`read_images`."""
    scan = _highest_held(index, scan)
    first = num_scans(index, images.scan)
    rows = num_scans(index, scan)
    road = _Road(source, index, check, url)
    grown = images
    if rows > first:
        grown = _grow(images, road.read(range(first, rows), images.table))
    if scan == FULL:
        grown = _finish(grown, road.read(range(rows, rows + 1), None))
    return grown._replace(scan=scan)


def _grow(images: Images, more: Images) -> Images:
    """Images with the pieces of the groups that follow."""
    if images.table is None or more.table is None:
        return more
    pairs = zip(images.jpegs, more.jpegs, strict=True)
    return _with_late(images, more)._replace(
        table=join_tables([images.table, more.table]),
        jpegs=[_longer(old, new) for old, new in pairs],
    )


def _longer(old: bytes | None, new: bytes | None) -> bytes | None:
    if old is None or new is None:
        return old
    return b"".join([memoryview(old)[: -len(EOI)], new])


def _finish(images: Images, tail: Images) -> Images:
    """Images with their metadata."""
    return _with_late(images, tail)._replace(
        tails=tail.jpegs,
        tail_table=tail.table,
    )


def _with_late(images: Images, more: Images) -> Images:
    """Images with the late values of another range, and with what is damaged there."""
    return images._replace(
        late=images.late | more.late,
        damaged=images.damaged | more.damaged,
        damaged_late=images.damaged_late | more.damaged_late,
    )


def num_scans(index: ShardIndex, scan: Scan) -> int:
    """How many scan groups a scan has; the metadata of ``"full"`` are not one."""
    return min(check_scan(scan, index.num_groups, 0), index.num_groups)


def _highest_held(index: ShardIndex, scan: Scan) -> Scan:
    """The highest scan whose prefix is not longer: the base groups of a preview lie together."""
    position = check_scan(scan, index.num_groups, 0)
    if position == 0:
        return 0
    stops = index.head.prefix_stops
    held = sum(stop <= stops[position - 1] for stop in stops)
    return FULL if held > index.num_groups else held


@dataclasses.dataclass(frozen=True)
class _Road:
    """From a file to images."""

    source: Source
    index: ShardIndex
    check: bool
    url: str | None

    def read(self, rows: range, before: GroupTable | None) -> Images:
        """What successive groups have, or the tail alone: its pieces as ``jpegs``.

        Args:
            rows: The groups, from 0.
            before: Tables of the groups before them, whose checksums run on.
        """
        index = self.index
        places = list(index.table_places(rows.start, rows.stop))
        parts = [self.source.read(place.start, place.stop) for place in places]
        table = decode_tables(index, places, parts, url=self.url)
        late = [values.crcs for _, values in table.late.values()]
        seeds = None if before is None else _seeds(before, late)
        ends = index.head.stops
        items = self.source.scatter(
            ends[rows.start],
            ends[rows.stop],
            _groups(index, table),
            ending=EOI if rows.start < index.num_groups else b"",
            num_ended=index.num_units,
            crcs=_expected(table, late) if self.check else None,
            seeds=seeds,
        )
        return _sort_items(index, table, items)


def _expected(table: GroupTable, late: list[U32]) -> U32:
    """The checksums of pieces, and of late values."""
    crcs: U32 = table.crcs[-1]
    return np.concatenate([crcs, *late]) if late else crcs


def _seeds(before: GroupTable, late: list[U32]) -> U32:
    """Where checksums go on from: pieces from those before them, late values from 0."""
    starts = [np.zeros_like(crcs) for crcs in late]
    return np.concatenate([before.crcs[-1], *starts])


def _groups(index: ShardIndex, table: GroupTable) -> scatter.Groups:
    """Where the items of a range are: units first, then the values of late fields."""
    starts = group_starts(index, table.rows)
    base = min(len(table.rows), index.schema.base) if len(table.offsets) else 0
    plain = scatter.Groups(
        table.sizes,
        starts,
        base,
        table.offsets,
        table.header_sizes,
        table.headers,
    )
    return _add_late(index, table, plain) if table.late else plain


def _add_late(
    index: ShardIndex,
    table: GroupTable,
    plain: scatter.Groups,
) -> scatter.Groups:
    """Groups with a row for each late field, after the row of the group that it is in."""
    starts = [*plain.starts, *late_starts(index, table).values()]
    width = index.num_units + len(table.late) * index.num_samples
    shape = (len(starts), width)
    header_sizes = _widen(table.header_sizes, shape)
    offsets = _widen(table.offsets[None], (1, width))
    late_rows = [row for row, _ in table.late.values()]
    # Rows of groups, then those of late fields; sorted by group, the former come first.
    rows = np.argsort([*table.rows, *late_rows], kind="stable")
    return scatter.Groups(
        _all_sizes(index, table, shape)[rows],
        np.array(starts, np.int64)[rows],
        plain.base,
        offsets[0],
        header_sizes[rows],
        table.headers,
    )


def _all_sizes(
    index: ShardIndex,
    table: GroupTable,
    shape: tuple[int, int],
) -> npt.NDArray[Any]:
    """Sizes of pieces, then a row for each late field, whose values have columns of their own."""
    sizes = _widen(table.sizes, shape)
    first = index.num_units
    for row, (_, values) in enumerate(table.late.values(), len(table.rows)):
        stop = first + index.num_samples
        sizes[row, first:stop] = values.stored
        first = stop
    return sizes


def _widen(columns: npt.NDArray[Any], shape: tuple[int, int]) -> npt.NDArray[Any]:
    """Columns in the first corner of an array that is 0 elsewhere."""
    wide = np.zeros(shape, columns.dtype)
    rows, width = columns.shape
    wide[:rows, :width] = columns
    return wide


def _sort_items(
    index: ShardIndex,
    table: GroupTable,
    items: scatter.Items,
) -> Images:
    """Items of a range as pieces and late values."""
    units = index.num_units
    late = _late_items(index, table, items)
    damaged = frozenset(unit for unit in items.damaged if unit < units)
    damaged_late = _damaged_late(index, tuple(late), items)
    jpegs = items.values[:units] if late else items.values
    return Images(
        scan=0,
        table=table,
        tail_table=None,
        jpegs=jpegs,
        tails=[],
        late=late,
        damaged=damaged,
        damaged_late=damaged_late,
    )


def _late_items(
    index: ShardIndex,
    table: GroupTable,
    items: scatter.Items,
) -> dict[str, list[bytes | None]]:
    """The values of each late field by sample."""
    late = {}
    start = index.num_units
    for name, (_, values) in table.late.items():
        stop = start + index.num_samples
        found = items.values[start:stop]
        # An empty value has no item, as an absent one has none.
        for row in np.flatnonzero(values.sizes == 0).tolist():
            found[row] = b""
        late[name] = found
        start = stop
    return late


def _damaged_late(
    index: ShardIndex,
    names: tuple[str, ...],
    items: scatter.Items,
) -> frozenset[tuple[str, int]]:
    """The late values that are damaged, by field and sample."""
    units = index.num_units
    places = [divmod(item - units, index.num_samples) for item in items.damaged if item >= units]
    return frozenset((names[place], row) for place, row in places)
