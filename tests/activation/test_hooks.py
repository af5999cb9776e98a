"""The same memory is kept once, and only that."""

import torch

from pcrshard.activation.hooks import Hooks, Limits
from pcrshard.activation.stored import Blob, Constant, Kept, Ledger


def make(*, min_bytes=0):
    ledger = Ledger()
    encoded = []

    def encode(flat, ordinal, row):
        encoded.append((ordinal, flat.numel()))
        return Constant(flat[:1].clone(), flat.numel())

    hooks = Hooks(encode, ledger, Limits(min_bytes, 1))
    hooks.begin(set())
    return hooks, encoded, ledger


def test_a_tensor_that_is_saved_twice_is_encoded_once():
    """By storage, offset, shape, strides, type and version."""
    hooks, encoded, ledger = make()
    values = torch.ones(4, 4, requires_grad=True) * 1
    blob = hooks.pack(values)
    assert isinstance(blob, Blob)
    assert hooks.pack(values) is blob
    assert hooks.pack(values.view(4, 4)) is blob
    others = [values.t(), values[1:], values.view(16), values.view(2, 8)]
    kept = [hooks.pack(other) for other in others]
    assert len({id(each) for each in (blob, *kept)}) == 5
    assert [ordinal for ordinal, _ in encoded] == [0, 1, 2, 3, 4]
    assert ledger.live_bytes == 20


def test_a_blob_that_is_gone_is_made_again():
    """Its graph was freed, while the tensor lives on; its position stays."""
    hooks, encoded, ledger = make()
    values = torch.ones(4, requires_grad=True) * 1
    del_me = hooks.pack(values)
    del del_me
    assert ledger.live_bytes == 0
    blob = hooks.pack(values)
    assert ledger.live_bytes == 4
    assert [ordinal for ordinal, _ in encoded] == [0, 0]
    assert len(hooks.rows) == 1
    del blob


def test_unpacking_another_lets_go_of_the_last():
    """Of decoded tensors one is kept."""
    hooks, _, _ = make()
    first = hooks.pack(torch.ones(4, requires_grad=True) * 1)
    second = hooks.pack(torch.ones(4, requires_grad=True) * 2)
    one = hooks.unpack(first)
    assert hooks.unpack(first) is one
    hooks.unpack(second)
    assert hooks.unpack(first) is not one
    hooks.forget()
    assert first._decoded is None


def test_what_is_exempt_is_kept_by_reference():
    """Parameters by their storage, leaves, small tensors, those without gradient."""
    hooks, encoded, _ = make(min_bytes=100)
    weight = torch.nn.Parameter(torch.ones(100))
    buffer = torch.ones(100)
    hooks.begin({buffer.untyped_storage()._cdata})
    small = weight[:3] * 1
    for tensor in (weight, weight.half(), buffer, small):
        assert isinstance(hooks.pack(tensor), Kept)
    image = hooks.pack(torch.ones(100))
    assert image.row.kind == "lossless"
    assert encoded == [(1, 100)]
    assert [row.shape for row in hooks.rows] == [(3,), (100,)]
