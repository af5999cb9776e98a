"""The sparse form leads both ways, and its index cannot point outside."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pcrshard.errorbound import (
    decode_index,
    decode_words,
    encode_index,
    encode_integers,
    encode_words,
    find_changes,
)
from pcrshard.errors import CorruptCheckpoint

# Other jobs may have the machine.
PATIENT = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("kind", ["u1", "u2", "u4", "u8"])
def test_changes_lead_from_either_version_to_the_other(kind):
    """One form serves forward and backward deltas."""
    rng = np.random.default_rng(0)
    old = rng.integers(0, 200, 5000).astype(kind)
    new = old.copy()
    new[rng.choice(5000, 50, replace=False)] += 1
    index, words = find_changes(new, old)
    count = len(index)
    assert count == 50
    index = decode_index(encode_index(index), count, len(old))
    words = decode_words(encode_words(words), count, np.dtype(kind))
    forward = old.copy()
    forward[index] ^= words
    backward = new.copy()
    backward[index] ^= words
    assert np.array_equal(forward, new)
    assert np.array_equal(backward, old)


@PATIENT
@given(st.sets(st.integers(0, 10**6)))
def test_any_index_comes_back(numbers):
    """Gaps of any size, none included."""
    index = np.array(sorted(numbers), np.int64)
    assert np.array_equal(decode_index(encode_index(index), len(index), 10**6 + 1), index)


@pytest.mark.parametrize("gaps", [[0, 1], [5, 0], [2**32 - 1, 1], [101, 1], [50, 51]])
def test_an_index_outside_is_refused(gaps):
    """A hostile index can neither repeat nor leave the tensor."""
    payload = encode_integers(np.array(gaps, np.uint32))
    with pytest.raises(CorruptCheckpoint, match="increasing numbers below 100"):
        decode_index(payload, 2, 100)


def test_more_changes_than_words_are_refused():
    """Before memory is taken for them."""
    with pytest.raises(CorruptCheckpoint, match="at most 5"):
        decode_index(b"", 10**15, 5)
    with pytest.raises(CorruptCheckpoint, match="expected 3 words"):
        decode_words(encode_words(np.zeros(4, np.uint8)), 3, np.dtype("u1"))
