"""The same memory is kept once, and only that; and what is never lossy."""

import torch
from torch import nn

from pcrshard.activation.hooks import (
    Hooks,
    Limits,
    inside_compiled_call,
    is_compiled,
    is_sensitive,
    is_weight,
    parameter_storages,
    storage_id,
)
from pcrshard.activation.stored import Blob, Constant, Kept, Ledger


def make(*, min_bytes=0):
    ledger = Ledger()
    encoded = []

    def encode(flat, layout, ordinal, row):
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


# --- never lossy


def test_weights_are_known_through_views_and_casts():
    """What autocast and linear layers save of them."""
    weight = nn.Parameter(torch.randn(4, 5))
    for view in (
        weight,
        weight.t(),
        weight.bfloat16(),
        weight[1:].flatten().double(),
        weight.clone(),
    ):
        assert is_weight(view)
    assert not is_weight(weight * 2)
    assert not is_weight(torch.randn(3))
    assert not is_weight((weight.sum() * torch.ones(3)).view(3, 1))


def test_storages_of_parameters_and_buffers():
    """Also of those that share memory; meta tensors have none."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    storages = parameter_storages(model)
    assert storage_id(model[0].weight.detach().view(-1)) in storages
    assert storage_id(model[1].running_mean) in storages
    assert storage_id(torch.randn(3)) not in storages
    assert parameter_storages(nn.Linear(3, 4, device="meta")) == set()


def test_results_that_their_own_backward_divides_by():
    """Softmax, logarithms of it, roots and reciprocals."""
    values = torch.rand(4, 5, requires_grad=True)
    for result in (values.softmax(1), values.log_softmax(1), values.sqrt(), values.exp()):
        assert is_sensitive(result)
    assert not is_sensitive(values.relu())
    assert not is_sensitive(values)


def test_compiled_modules_are_found():
    """torch.compile(model), a compiled part, and model.compile()."""
    model = nn.Sequential(nn.Linear(3, 4))
    assert not is_compiled(model)
    assert is_compiled(torch.compile(model, backend="aot_eager"))
    assert is_compiled(nn.Sequential(torch.compile(model, backend="aot_eager")))
    model.compile(backend="aot_eager")
    assert is_compiled(model)
    assert not inside_compiled_call()
