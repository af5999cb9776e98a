"""Where a table says that things are, there they are."""

import numpy as np

from pcrshard.format.group_table import join_tables
from pcrshard.format.piece_places import late_starts, piece_starts


def test_starts_point_at_the_pieces(table_shard, tables):
    """Where the table says a piece's own bytes are, there they are, in the order of the file, and
    with the shared header before them they have their checksum from group 1 on.
    """
    opened, data = table_shard
    table = join_tables(tables[:-1])
    starts = piece_starts(opened.index, table)
    own = table.own_bytes
    with opened.load() as prefix:
        jpegs = [jpeg for sample in prefix.samples() for jpeg in images_of(sample)]
        jpegs = [jpeg for jpeg in jpegs if jpeg != b"kept"]
    present = np.flatnonzero(table.sizes[0])
    assert len(jpegs) == len(present)
    for jpeg, unit in zip(jpegs, present.tolist(), strict=True):
        end = 0
        for row in range(opened.num_groups):
            start = int(starts[row, unit])
            mine = data[start : start + int(own[row, unit])]
            end += int(table.sizes[row, unit])
            assert jpeg[end - len(mine) : end] == mine


def images_of(sample):
    for name in ("jpg", "mask.jpg"):
        if name in sample:
            yield sample[name]
    yield from sample.get("views.jpg", [])


def test_late_values_lie_where_the_table_says(table_shard, tables):
    """The values of a late field lie one after the other in the group of its scan."""
    opened, data = table_shard
    for table in tables:
        for name, start in late_starts(opened.index, table).items():
            values = [sample.get(name) for sample in opened.samples()]
            if name == "jpg":
                values = [value for value in values if value == b"kept"]
            expected = b"".join(value for value in values if value)
            assert data[start : start + len(expected)] == expected
