"""The index: head, schema, columns, dataset index."""

import numpy as np

from pcrshard import Shard
from pcrshard.checksum import crc32c
from pcrshard.format.shard_index import decode_head, decode_index, encode_body


def test_crc32c_is_castagnoli():
    """The checksum is the one that RFC 3720 appendix B.4 gives for its test patterns."""
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E


def test_an_index_survives_encoding(shard_urls):
    """What is written is what is read."""
    index = Shard(shard_urls[0]).index
    again = decode_index(decode_head(index.head.encode()), encode_body(index)[0])
    assert (again.head, again.schema, again.keys, again.fields) == (
        index.head,
        index.schema,
        index.keys,
        index.fields,
    )
    for name in ("counts", "dims", "orientation"):
        assert np.array_equal(getattr(again, name), getattr(index, name)), name
