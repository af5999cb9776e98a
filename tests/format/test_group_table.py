"""The table of a group: what is written is read, and every changed byte is found."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcrshard.errors import CorruptIndex
from pcrshard.format.group_table import decode_tables


def test_a_table_survives_encoding(table_shard, tables):
    """What is written is what is read, byte for byte."""
    opened, data = table_shard
    places = opened.index.table_places(0, opened.num_groups + 1)
    for table, place in zip(tables, places, strict=True):
        assert table.encoded == data[place.start : place.stop]
    assert tables[0].rows.start == 0
    assert tables[-1].rows.stop == opened.num_groups + 1


@given(st.data())
def test_any_changed_byte_of_a_table_is_found(table_shard, data):
    """No byte of a table can change unnoticed."""
    opened, content = table_shard
    places = list(opened.index.table_places(0, opened.num_groups + 1))
    place = data.draw(st.sampled_from(places))
    table = bytearray(content[place.start : place.stop])
    table[data.draw(st.integers(0, len(table) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptIndex, match="the table of"):
        decode_tables(opened.index, [place], [table])
