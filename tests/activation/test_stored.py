"""What is kept in place of a tensor, and the count of its bytes."""

import gc

import pytest
import torch

from pcrshard.activation.codecs import make_codec
from pcrshard.activation.layout import layout_of
from pcrshard.activation.stored import Blob, Constant, Kept, Ledger, Row, encode_floats


def row():
    return Row("", "lossy", (8,), torch.float32, 32, 8)


def test_floats_are_coded_or_left_alone():
    """Smaller, or nothing."""
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    coded = encode_floats(values, 0.05, make_codec("bits"))
    assert coded.num_bytes < 10_000
    assert float((coded.decode() - values).abs().max()) <= 0.05
    assert encode_floats(values, 1e-5, make_codec("bits")) is None


def test_escapes_do_not_widen_the_bits_of_their_block():
    """One huge value costs its place in the list, not a wider block."""
    values = torch.full((6400,), 0.01)
    small = encode_floats(values, 0.1, make_codec("bits")).num_bytes
    values[100] = 1e9
    coded = encode_floats(values, 0.1, make_codec("bits"))
    assert coded.num_bytes == small + 8
    assert coded.decode()[100] == 1e9


def test_a_blob_keeps_what_it_decoded_until_told():
    """The next reader gets the same memory, unless somebody has written to it."""
    values = torch.full((8,), 3.0)
    blob = Blob(Constant(values[:1], 8), layout_of(values), row())
    first = blob.tensor()
    assert blob.tensor() is first
    first.add_(1)
    assert torch.equal(blob.tensor(), values)
    second = blob.tensor()
    blob.forget()
    assert blob.tensor() is not second


def test_the_ledger_counts_what_is_alive():
    """Up with a blob, down when it is collected; the peak stays; so does the timeline."""
    ledger = Ledger(timeline=True)
    values = torch.zeros(8)
    blobs = [Blob(Constant(values[:1], 8), layout_of(values), row()) for _ in range(3)]
    for blob in blobs:
        ledger.add(blob, 10)
    assert ledger.live_bytes == 30
    del blob, blobs
    gc.collect()
    assert ledger.live_bytes == 0
    assert ledger.peak_bytes == 30
    assert [live for _, live in ledger.timeline] == [10, 20, 30, 20, 10, 0]


def test_a_kept_tensor_says_when_it_was_changed():
    """As autograd does; and it holds no graph."""
    values = torch.randn(3, requires_grad=True) * 2
    kept = Kept(values)
    assert torch.equal(kept.tensor(), values)
    assert kept.tensor().grad_fn is None
    values.add_(1)
    with pytest.raises(RuntimeError, match=r"shape \(3,\) is at version 1; expected version 0"):
        kept.tensor()
