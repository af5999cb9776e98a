"""What is never lossy."""

import torch
from torch import nn

from pcrshard.activation.exempt import (
    inside_compiled_call,
    is_compiled,
    is_sensitive,
    is_weight,
    parameter_storages,
    storage_id,
)


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
