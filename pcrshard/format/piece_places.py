"""Locations of pieces and deferred values in a shard (SPEC.md section 3); pure functions."""

from __future__ import annotations

import numpy as np

from .group_table import GroupTable
from .shard_head import BLOCK, round512
from .shard_index import I64, ShardIndex


def piece_starts(index: ShardIndex, table: GroupTable) -> I64:
    """Return the (R, U) absolute starts of each piece's own bytes.

    The table starts with group 1, or with a group after the base groups.
    """
    own = table.own_bytes
    first = np.array(group_starts(index, table.rows))
    starts: I64 = own.cumsum(axis=1) - own + first[:, None]
    if len(table.offsets):
        base = slice(index.schema.base)
        before = own[base].cumsum(axis=0) - own[base]
        starts[base] = table.offsets.astype(np.int64) + before
    return starts


def group_starts(index: ShardIndex, rows: range) -> list[int]:
    """Return the absolute start of each group's pieces; 0 for base groups, which are members."""
    head = index.head
    base = index.schema.base
    ends = head.stops
    return [0 if row < base else ends[row] + BLOCK + head.table_bytes[row] for row in rows]


def late_starts(index: ShardIndex, table: GroupTable) -> dict[str, int]:
    """Return the absolute start of each deferred field's values, which are contiguous."""
    starts = {}
    ends = _piece_stops(index, table)
    for name, (row, values) in table.late.items():
        starts[name] = ends[row]
        ends[row] += values.num_bytes
    return starts


def _piece_stops(index: ShardIndex, table: GroupTable) -> dict[int, int]:
    """Return where each row's deferred values start: after its pieces, or in the base's member."""
    stops = np.array(group_starts(index, table.rows)) + table.own_bytes.sum(axis=1)
    by_row = dict(zip(table.rows, stops.tolist(), strict=True))
    for row in table.rows:
        if row < index.schema.base:
            by_row[row] = index.head.prefix_stops[row] - round512(table.late_bytes(row))
    return by_row
