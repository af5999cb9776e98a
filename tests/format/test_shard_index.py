"""The index: schema and columns."""

import numpy as np

from pcrshard import Shard
from pcrshard.format.shard_index import decode_index, encode_body


def test_an_index_survives_encoding(shard_urls):
    """What is written is what is read."""
    index = Shard(shard_urls[0]).index
    again = decode_index(index.head, encode_body(index)[0])
    assert (again.head, again.schema, again.keys, again.fields) == (
        index.head,
        index.schema,
        index.keys,
        index.fields,
    )
    for name in ("counts", "dims", "orientation"):
        assert np.array_equal(getattr(again, name), getattr(index, name)), name
