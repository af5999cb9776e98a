"""The adaptive bound: noise in proportion to the momentum."""

import pytest
import torch
from torch import nn

from pcrshard import compress_activations
from pcrshard.activation import ActivationOptions, GradientNoise

MODES = {
    "plain": lambda: nn.Conv2d(4, 6, 3, padding=1),
    "strided": lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "dilated": lambda: nn.Conv2d(4, 6, 3, dilation=2, padding=4),
    "same": lambda: nn.Conv2d(4, 6, 5, padding="same"),
    "grouped": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "reflected": lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_share_of_valid_pairs(mode):
    """V of the formula, against the weight gradient of ones by ones; hooks are gone afterwards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), MODES[mode]())
    saver = compress_activations(model, GradientNoise(), options=ActivationOptions(min_bytes=0))
    with saver:
        out = model(torch.randn(2, 3, 9, 9))
    out.square().mean().backward()
    ones = torch.ones(1, 4, 9, 9)
    model.zero_grad()
    counted = model[2](ones)
    counted.sum().backward()
    expected = float(model[2].weight.grad.mean()) / counted[0, 0].numel()
    assert saver.profiles["2"].valid_fraction == pytest.approx(expected)
    assert not model[2]._forward_hooks


@pytest.mark.parametrize("amp", [False, True])
def test_inputs_of_convolutions_are_found(amp):
    """Through a ReLU that saved them before, and through autocast's copies."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU())
    saver = compress_activations(model, GradientNoise(), options=ActivationOptions(min_bytes=0))
    images = torch.randn(2, 3, 12, 12)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp), saver:
        loss = model(images).square().mean()
    loss.backward()
    (found,) = [row for row in saver.report().rows if row.read_by == ("2",)]
    assert found.shape == (2, 4, 10, 10)
    assert found.kind == "lossy"
    layers = {layer.name: layer for layer in saver.report().layers}
    assert layers["2"].predicted_sigma > 0


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, 0.1),
        lambda p: torch.optim.SGD(p, 0.1),
    ],
)
@pytest.mark.parametrize("grad_scale", [1.0, 1024.0])
def test_the_noise_is_a_fraction_of_the_momentum(make, grad_scale):
    """SGD's buffer, Adam's first moment, or the gradient itself; gradient scaling cancels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh())
    images = torch.randn(8, 3, 16, 16)
    optimizer = make(model.parameters())
    saver = compress_activations(model, GradientNoise(0.05), options=ActivationOptions(min_bytes=0))
    for _ in range(2):
        with saver:
            loss = (model(images) - 1).square().mean()
        optimizer.zero_grad()
        (loss * grad_scale).backward()
        for parameter in model.parameters():
            parameter.grad /= grad_scale
        optimizer.step()
        saver.step(optimizer, grad_scale=grad_scale)
    profile = saver.profiles["2"]
    with saver:
        model(images)
    (row,) = [row for row in saver.report().rows if "2" in row.read_by]
    weight = model[2].weight
    state = optimizer.state.get(weight, {})
    momentum = state.get("momentum_buffer", state.get("exp_avg", weight.grad))
    sigma = row.error_bound * saver.bound.noise_per_bound(profile) / grad_scale
    wanted = 0.05 * float(momentum.abs().mean())
    clamped = row.error_bound / row.deviation
    assert sigma == pytest.approx(wanted, rel=1e-3) or clamped == pytest.approx(0.25, rel=1e-3)
