"""Encoded samples become an index and tables."""

import numpy as np
import pytest

from pcrshard import ShardFormat
from pcrshard.checksum import crc32c
from pcrshard.encoding.shard_tables import list_units, make_index, make_tables
from pcrshard.encoding.shard_writer import encode_sample
from pcrshard.errors import EncodeError
from pcrshard.format.shard_format import FieldNames
from pcrshard.testing import make_jpeg

NAMES = FieldNames(("jpg",), ("npy",), ("views.jpg",))


def samples_of(*counts):
    """Samples with so many views; every second one has an image, every third an array."""
    samples = []
    for i, count in enumerate(counts):
        sample = {"__key__": f"k{i}", "views.jpg": [make_jpeg(j, 8, 9) for j in range(count)]}
        if i % 2 == 0:
            sample["jpg"] = make_jpeg(i, 20, 30)
        if i % 3 == 0:
            sample["npy"] = b"array" * i
        samples.append(encode_sample(sample))
    return samples


def test_units_are_in_the_order_of_samples_and_streams():
    """The images of a sample follow each other, and one that is missing keeps its place."""
    samples = samples_of(2, 0, 1)
    index = make_index(samples, ShardFormat().schema(NAMES))
    units = list_units(samples, index.schema)
    sizes = [(unit.height, unit.width) if unit else None for unit in units]
    assert sizes == [(20, 30), (8, 9), (8, 9), None, (20, 30), (8, 9)]
    assert index.first_units == [0, 3, 4, 6]
    assert index.unit_counts.tolist() == [[1, 2], [1, 0], [1, 1]]
    assert index.dims[3].tolist() == [0, 0]


def test_headers_are_shared_and_pieces_whole():
    """The header and the own bytes of a piece are the piece; its checksum runs on over all."""
    samples = samples_of(1, 1)
    index = make_index(samples, ShardFormat().schema(NAMES))
    units = list_units(samples, index.schema)
    running = [0] * len(units)
    for table in make_tables(samples, index)[:-1]:
        headers = table.headers
        for i, unit in enumerate(units):
            size = int(table.header_sizes[0, i])
            piece = unit.pieces[table.rows.start] if unit else b""
            assert piece[:size] == headers[:size]
            headers = headers[size:]
            assert int(table.sizes[0, i]) == len(piece)
            running[i] = crc32c(piece, running[i])
        assert table.crcs[0].tolist() == running
        assert headers == b""
        assert not np.any(table.header_sizes > table.sizes)


def test_late_values_are_in_the_table_of_their_scan():
    """And in no other; absent and empty values are told apart."""
    samples = samples_of(0, 0, 0, 0)
    fmt = ShardFormat(deferred={"npy": 3})
    tables = make_tables(samples, make_index(samples, fmt.schema(NAMES)))
    assert [row for table in tables for row, _ in table.late.values()] == [2]
    _, values = tables[2].late["npy"]
    assert values.sizes.tolist() == [0, 0xFFFFFFFF, 0xFFFFFFFF, 15]


def test_keys_are_distinct():
    """Two samples of one key would be one in a WebDataset."""
    with pytest.raises(EncodeError, match="'k0' is there more than once"):
        make_index(samples_of(0) * 2, ShardFormat().schema(NAMES))
