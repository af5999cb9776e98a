"""Integers come back exactly, near their entropy; damaged bytes never end the process."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pcodec import ChunkConfig, DeltaSpec, ModeSpec, standalone

from pcrshard.errorbound import decode_integers, encode_integers
from pcrshard.errors import CorruptCheckpoint


@settings(max_examples=60)
@given(
    st.sampled_from(["u2", "i4", "u4", "i8", "u8"]).flatmap(
        lambda kind: hnp.arrays(kind, st.integers(0, 50))
    )
)
def test_integers_come_back(integers):
    """Any integers of 16 to 64 bits."""
    payload = encode_integers(integers)
    assert len(integers) or not payload
    assert np.array_equal(decode_integers(payload, len(integers), integers.dtype), integers)


@pytest.mark.parametrize("spread", [0.3, 3, 50])
def test_the_size_is_near_the_entropy(spread):
    """At least 97 % of the order-0 bound, for nearly empty, usual and wide codes."""
    codes = np.rint(np.random.default_rng(0).normal(0, spread, 500_000)).astype(np.int32)
    shares = np.unique(codes, return_counts=True)[1] / len(codes)
    entropy_bytes = -(shares * np.log2(shares)).sum() * len(codes) / 8
    assert entropy_bytes / len(encode_integers(codes)) > 0.97


CODES = {
    "one value": lambda rng, n: np.full(n, rng.integers(-(2**31), 2**31)),
    "mostly zero": lambda rng, n: rng.integers(-9, 9, n) * (rng.random(n) < 0.02),
    "normal": lambda rng, n: np.rint(rng.normal(0, 100, n)),
    "heavy tails": lambda rng, n: np.rint(rng.standard_t(2, n) * 5),
    "spikes": lambda rng, n: rng.integers(0, 300, n) * 200 + (rng.random(n) < 0.05),
    "top of the range": lambda rng, n: 2**31 - 1 - rng.integers(0, 1 << 16, n),
    "two signs, far apart": lambda rng, n: rng.choice([-(2**31), 2**31 - 1], n),
    "one far value": lambda rng, n: np.r_[np.rint(rng.normal(0, 4, n - 1)), 2**30],
    "any": lambda rng, n: rng.integers(-(2**31), 2**31, n),
}


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("count", [1, 2, 5, 600, (1 << 18) + 1, 600_003])
def test_codes_of_all_kinds_come_back_from_the_library(kind, count):
    """The pcodec library restores codes exactly, at most 1 % and 32 bytes larger than its own."""
    codes = CODES[kind](np.random.default_rng(count), count).astype(np.int32)
    payload = encode_integers(codes)
    assert np.array_equal(standalone.simple_decompress(payload), codes)
    plain = ChunkConfig(mode_spec=ModeSpec.classic(), delta_spec=DeltaSpec.no_op())
    assert len(payload) <= 1.01 * len(standalone.simple_compress(codes, plain)) + 32


@pytest.mark.parametrize(("length", "count"), [(100, 0), (100, 99), (100, 101), (0, 1)])
def test_another_number_of_integers_is_refused(length, count):
    """Neither a shorter nor a longer tensor is served."""
    payload = encode_integers(np.arange(length, dtype=np.int32))
    with pytest.raises(CorruptCheckpoint, match=r"expected|damaged"):
        decode_integers(payload, count, np.int32)


def test_damaged_bytes_are_refused_or_other_integers():
    """Flipped and cut payloads raise our error, or give integers that a checksum refuses."""
    rng = np.random.default_rng(0)
    payload = encode_integers(rng.integers(-50, 50, 3000, dtype=np.int32))
    refused = 0
    for _ in range(400):
        damaged = bytearray(payload[: rng.integers(1, len(payload) + 1)])
        damaged[rng.integers(len(damaged))] ^= int(rng.integers(1, 256))
        try:
            assert len(decode_integers(bytes(damaged), 3000, np.int32)) == 3000
        except CorruptCheckpoint:
            refused += 1
    assert refused > 300
