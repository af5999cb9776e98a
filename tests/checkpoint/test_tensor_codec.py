"""One tensor's forms: each comes back exactly, and the smallest is taken."""

import dataclasses

import numpy as np
import pytest

from pcrshard.checkpoint.tensor_codec import (
    Described,
    check_coder,
    decode,
    encode,
    hold,
)
from pcrshard.checkpoint.tensors import TensorSpec
from pcrshard.errorbound import FLOAT_TYPES, Absolute, PointwiseRelative, RelativeStd, check_error
from pcrshard.errors import BrokenChain, CorruptCheckpoint

SPEC = TensorSpec("float32", (300, 200))
BF16 = TensorSpec("bfloat16", (300, 200))


def weights(seed=0, scale=0.02):
    return np.random.default_rng(seed).normal(0, scale, 60_000).astype(np.float32)


def words(values):
    return values.astype(np.float32).view(np.uint32)


def described(held, encoded):
    sizes = tuple(len(part) for part in encoded.parts)
    return Described(held.spec, held.lattice, encoded.coder, encoded.count, sizes)


def back(held, encoded, reference=None):
    return decode(described(held, encoded), memoryview(b"".join(encoded.parts)), reference)


def test_a_small_step_is_a_small_delta():
    """The paper's case: neighbouring versions on one lattice, within the bound."""
    old = weights()
    new = old + weights(1, 0.0005)
    first = hold(words(old), SPEC, RelativeStd(0.01), None)
    second = hold(words(new), SPEC, RelativeStd(0.01), first)
    assert second.lattice == first.lattice
    encoded = encode(second, first)
    assert encoded.coder == "delta"
    assert encoded.num_bytes < 0.5 * encode(second, None).num_bytes
    restored = back(second, encoded, first)
    assert np.array_equal(restored.codes, second.codes)
    assert check_error(words(new), restored.restore(), FLOAT_TYPES["float32"], second.lattice) <= 1


def test_values_without_relation_are_stored_on_their_own():
    """Momentum: the difference would be larger than the values."""
    first = hold(words(weights()), SPEC, RelativeStd(0.1), None)
    second = hold(words(weights(7)), SPEC, RelativeStd(0.1), first)
    encoded = encode(second, first)
    assert encoded.coder == "intra"
    assert np.array_equal(back(second, encoded).codes, second.codes)


def test_an_unchanged_tensor_costs_no_payload():
    """Frozen layers, on a lattice and losslessly."""
    for bound in (RelativeStd(0.01), None):
        held = hold(words(weights()), SPEC, bound, None)
        encoded = encode(held, held)
        assert (encoded.coder, encoded.num_bytes) == ("same", 0)
        assert np.array_equal(back(held, encoded, held).restore(), held.restore())


@pytest.mark.parametrize(("share", "coder"), [(0.001, "sparse"), (0.05, "sparse"), (1.0, "delta")])
def test_lossless_deltas_take_the_smaller_form(share, coder):
    """Few changed bfloat16 words: their places; many: byte planes of the exclusive or."""
    rng = np.random.default_rng(0)
    old = FLOAT_TYPES["bfloat16"].narrow(weights().astype(np.float64))
    new = old.copy()
    changed = rng.random(len(old)) < share
    new[changed] ^= 1
    first = hold(old, BF16, None, None)
    second = hold(new, BF16, None, first)
    encoded = encode(second, first)
    assert encoded.coder == coder
    assert encoded.num_bytes < encode(second, None).num_bytes
    assert np.array_equal(back(second, encoded, first).words, new)
    reverse = encode(first, second)
    assert np.array_equal(back(first, reverse, second).words, old)


def test_the_sparse_form_of_weight_sync_is_fifty_times_smaller():
    """1 % of bfloat16 words changed by one unit in the last place."""
    rng = np.random.default_rng(0)
    old = FLOAT_TYPES["bfloat16"].narrow(np.random.default_rng(1).normal(0, 0.02, 500_000))
    new = old.copy()
    new[rng.random(len(old)) < 0.01] += 1
    spec = TensorSpec("bfloat16", (500, 1000))
    encoded = encode(hold(new, spec, None, None), hold(old, spec, None, None))
    assert old.nbytes / encoded.num_bytes > 50


@pytest.mark.parametrize("kind", ["one dimension", "tiny", "integers", "zeros", "whole numbers"])
def test_what_a_bound_does_not_help_is_lossless(kind):
    """One-dimensional, tiny, integer, constant tensors, and those whose words are smaller."""
    values = weights()
    spec = SPEC
    if kind == "one dimension":
        spec = TensorSpec("float32", (60_000,))
    elif kind == "tiny":
        values = values[:15]
        spec = TensorSpec("float32", (3, 5))
    elif kind == "integers":
        spec = TensorSpec("int32", SPEC.shape)
    elif kind == "zeros":
        values[:] = 0
    else:
        values = np.repeat(np.arange(6.0), 10_000)
    bound = Absolute(1e-6) if kind == "whole numbers" else RelativeStd(0.01)
    held = hold(words(values), spec, bound, None)
    assert held.lattice is None
    restored = back(held, encode(held, None)).restore()
    assert np.array_equal(restored, words(values))


def test_a_lattice_is_left_when_the_scale_moves():
    """A bound that was 1 % of the old deviation must not become 5 % of the new one."""
    first = hold(words(weights()), SPEC, RelativeStd(0.01), None)
    near = hold(words(weights() * 0.95), SPEC, RelativeStd(0.01), first)
    assert near.lattice == first.lattice
    far = hold(words(weights() * 0.2), SPEC, RelativeStd(0.01), first)
    assert far.lattice.error_bound == pytest.approx(0.2 * first.lattice.error_bound, rel=1e-3)
    assert encode(far, first).coder == "intra"
    larger = hold(words(weights() * 5), SPEC, RelativeStd(0.01), first)
    assert larger.lattice != first.lattice


def test_another_shape_or_type_starts_again():
    """The tensor is stored on its own; the rest of the version stays a delta."""
    first = hold(words(weights()), SPEC, RelativeStd(0.01), None)
    other = hold(words(weights()), TensorSpec("float32", (200, 300)), RelativeStd(0.01), first)
    assert encode(other, first).coder == "intra"


def test_second_moments_on_a_log_lattice_move_little():
    """exp_avg_sq is coded as a difference, relative to each value."""
    old = weights().astype(np.float64) ** 2
    new = 0.999 * old + 0.001 * weights(3).astype(np.float64) ** 2
    bound = PointwiseRelative(0.1)
    first = hold(words(old), SPEC, bound, None)
    second = hold(words(new), SPEC, bound, first)
    encoded = encode(second, first)
    assert encoded.coder == "delta"
    assert second.spec.num_bytes / encoded.num_bytes > 15


def test_special_values_come_back_in_every_form():
    """Escapes belong to their own version, not to the reference."""
    old = words(weights())
    new = words(weights() + weights(1, 0.0005))
    old[:3] = [0x7FC00001, 0x80000000, 1]
    new[1000:1003] = [0xFF800000, 0x80000000, 0x7F800001]
    first = hold(old, SPEC, RelativeStd(0.01), None)
    second = hold(new, SPEC, RelativeStd(0.01), first)
    restored = back(second, encode(second, first), first).restore()
    assert restored[1000:1003].tolist() == [0xFF800000, 0x80000000, 0x7F800001]
    assert restored[0] != old[0]


def test_a_wrong_reference_is_refused():
    """Missing, of another shape, or on another lattice."""
    first = hold(words(weights()), SPEC, RelativeStd(0.01), None)
    second = hold(words(weights() + weights(1, 0.0005)), SPEC, RelativeStd(0.01), first)
    encoded = encode(second, first)
    other = hold(words(weights()), SPEC, RelativeStd(0.02), None)
    reshaped = dataclasses.replace(first, spec=TensorSpec("float32", (200, 300)))
    for reference in (None, other, reshaped):
        with pytest.raises(BrokenChain, match="expected"):
            back(second, encoded, reference)


@pytest.mark.parametrize("coder", ["other", None, 3, [], "sparse"])
def test_unknown_coders_are_refused(coder):
    """The sparse form is for words only."""
    lattice = hold(words(weights()), SPEC, RelativeStd(0.01), None).lattice
    with pytest.raises(CorruptCheckpoint, match="expected a coder"):
        check_coder(coder, lattice)
