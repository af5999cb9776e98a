"""The table of a group: what is written is read, and every changed byte is found."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcrshard import Shard, ShardFormat
from pcrshard.encoding.shard_writer import encode_sample, write_shard
from pcrshard.errors import CorruptIndex
from pcrshard.format.group_table import decode_table, join_tables, late_starts, piece_starts
from pcrshard.testing import make_jpeg


@pytest.fixture(scope="module", params=["compact", "preview"])
def shard(request, tmp_path_factory):
    """Colour and gray images, a stream that some samples lack, a list, late fields, a kept file."""
    samples = []
    for i, mode in enumerate(["RGB", "L", "RGB", "CMYK"]):
        sample = {"__key__": f"k{i}", "jpg": make_jpeg(i, 30 + i, 41, mode), "npy": b"n" * i}
        sample["views.jpg"] = [make_jpeg(i, 8, 8)] * i
        if i % 2:
            sample["mask.jpg"] = make_jpeg(i, 9, 9, "L")
        else:
            sample["json"] = b"{}"
        samples.append(sample)
    samples.append({"__key__": "k4", "jpg": b"kept"})
    encoded = [encode_sample(sample, on_unlayered=lambda file, _: file) for sample in samples]
    path = tmp_path_factory.mktemp("tables") / "a-000000.tar"
    late = {"npy": 2, "json": "full"}
    write_shard(str(path), encoded, ShardFormat(layout=request.param, late=late))
    return Shard(str(path)), path.read_bytes()


def tables_of(shard, data):
    places = shard.index.table_places(0, shard.num_groups + 1)
    return [decode_table(shard.index, place, data[place.start : place.stop]) for place in places]


def test_a_table_survives_encoding(shard):
    """What is written is what is read, byte for byte."""
    opened, data = shard
    tables = tables_of(*shard)
    places = opened.index.table_places(0, opened.num_groups + 1)
    for table, place in zip(tables, places, strict=True):
        assert table.encoded == data[place.start : place.stop]
    assert tables[0].rows.start == 0
    assert tables[-1].rows.stop == opened.num_groups + 1


def test_starts_point_at_the_pieces(shard):
    """Where the table says a piece's own bytes are, there they are, in the order of the file, and
    with the shared header before them they have their checksum from group 1 on.
    """
    opened, data = shard
    table = join_tables(tables_of(*shard)[:-1])
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


def test_late_values_lie_where_the_table_says(shard):
    """The values of a late field lie one after the other in the group of its scan."""
    opened, data = shard
    for table in tables_of(*shard):
        for name, start in late_starts(opened.index, table).items():
            values = [sample.get(name) for sample in opened.samples()]
            if name == "jpg":
                values = [value for value in values if value == b"kept"]
            expected = b"".join(value for value in values if value)
            assert data[start : start + len(expected)] == expected


@given(st.data())
def test_any_changed_byte_of_a_table_is_found(shard, data):
    """No byte of a table can change unnoticed."""
    opened, content = shard
    places = list(opened.index.table_places(0, opened.num_groups + 1))
    place = data.draw(st.sampled_from(places))
    table = bytearray(content[place.start : place.stop])
    table[data.draw(st.integers(0, len(table) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptIndex, match="the table of"):
        decode_table(opened.index, place, table)
