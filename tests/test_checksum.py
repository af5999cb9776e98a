"""CRC-32C is the one of the standard."""

from pcrshard.checksum import crc32c


def test_vectors_of_the_standard():
    """RFC 3720, appendix B.4: any other polynomial would read no shard of another writer."""
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(bytes(range(31, -1, -1))) == 0x113FDB5C


def test_a_checksum_runs_on():
    """The checksum of a prefix is the start of that of a longer one: the format relies on it."""
    assert crc32c(b"world", crc32c(b"hello ")) == crc32c(b"hello world")
