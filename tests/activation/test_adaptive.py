"""Bounds of positions, from profiles."""

import pytest
import torch
from torch import nn

from pcrshard.activation.adaptive import AdaptiveBounds, mean_momentum
from pcrshard.activation.noise_bound import GradientNoise, Profile, noise_per_bound
from pcrshard.activation.stored import Row


def row(shape=(8, 4, 6, 6)):
    return Row("", "exact", shape, torch.float32, 100, 100)


def profile(*ordinals, energy=3.0):
    return Profile(0.5, 1.0, 4, 8, energy, 0.1, list(ordinals))


def test_the_noise_of_the_bound_is_the_share_of_the_momentum():
    """sigma = 1 % of M."""
    bounds = AdaptiveBounds(GradientNoise(0.01, least=1e-9, most=1e9), "nearest")
    bounds.update({"a": profile(1)}, [row(), row()], lambda name: 5.0)
    assert bounds.bound(1, row(), 1.0) * noise_per_bound(profile(1)) == pytest.approx(0.05)
    bounds.update({"a": profile(1)}, [row(), row()], lambda name: 5.0, scale=2.0)
    assert bounds.bound(1, row(), 1.0) * noise_per_bound(profile(1)) == pytest.approx(0.1)


def test_a_shared_input_gets_the_smallest_bound():
    """A block's first convolution and its shortcut read the same tensor."""
    bounds = AdaptiveBounds(GradientNoise(least=1e-9, most=1e9), "nearest")
    profiles = {"a": profile(0, energy=1.0), "b": profile(0, energy=100.0)}
    bounds.update(profiles, [row()], lambda name: 1.0)
    expected = 0.01 / noise_per_bound(profiles["b"])
    assert bounds.bound(0, row(), 1.0) == pytest.approx(expected)


def test_bounds_are_clamped_and_fall_back():
    """Never beyond 1e-4 to 0.25 of the deviation; another tensor, or no profile: 0.05 of it."""
    bounds = AdaptiveBounds(GradientNoise(), "nearest")
    assert bounds.bound(0, row(), 2.0) == 0.1
    bounds.update({"a": profile(0)}, [row()], lambda name: 1e9)
    assert bounds.bound(0, row(), 2.0) == 0.5
    bounds.update({"a": profile(0)}, [row()], lambda name: 1e-9)
    assert bounds.bound(0, row(), 2.0) == 2e-4
    assert bounds.bound(0, row((3, 4, 6, 6)), 2.0) == 2e-4  # a short batch
    assert bounds.bound(0, row((8, 5, 6, 6)), 2.0) == 0.1
    for mean in (None, 0.0, float("nan")):
        bounds.update({"a": profile(0)}, [row()], lambda name, mean=mean: mean)
        assert bounds.bound(0, row(), 2.0) == 0.1


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "momentum_buffer"),
        (lambda p: torch.optim.Adam(p, 0.1), "exp_avg"),
        (lambda p: torch.optim.SGD(p, 0.1), None),
    ],
)
def test_momentum_is_found_in_the_optimiser(make, key):
    """SGD's buffer, Adam's first moment, or the gradient itself."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3))
    optimizer = make(model.parameters())
    mean = mean_momentum(model, optimizer)
    assert mean("0") is None
    model(torch.randn(2, 2, 5, 5)).square().sum().backward()
    optimizer.step()
    weight = model[0].weight
    expected = weight.grad if key is None else optimizer.state[weight][key]
    assert mean_momentum(model, optimizer)("0") == pytest.approx(float(expected.abs().mean()))
