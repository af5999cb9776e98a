"""Which module saves what, and what a convolution tells."""

import pytest
import torch
from torch import nn

from pcrshard import compress_activations
from pcrshard.activation.noise_bound import GradientNoise
from pcrshard.activation.trace import Trace, share_of_module


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(4, 6, 3, padding=1),
        nn.Conv2d(4, 6, 4, padding="same"),
        nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2),
        nn.Conv2d(4, 6, 1),
        nn.ConvTranspose2d(4, 6, 2, stride=2),
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_the_valid_share_of_a_module_is_the_energy_that_its_taps_see(module):
    """The weight gradient of ones by ones counts the pairs."""
    values = torch.ones(1, 4, 9, 9)
    output = module(values)
    output.sum().backward()
    per_tap = module.weight.grad.mean()
    positions = output.shape[-1] * output.shape[-2]
    assert share_of_module(module, values, output) == pytest.approx(float(per_tap) / positions)


def test_other_paddings_count_as_inside():
    """A reflected border is made of inputs."""
    module = nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect")
    values = torch.ones(1, 4, 9, 9)
    assert share_of_module(module, values, module(values)) == 1.0


@pytest.mark.parametrize("amp", [False, True])
def test_inputs_of_convolutions_are_found(amp):
    """Through a ReLU that saved them before, and through autocast's copies."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU())
    saver = compress_activations(model, GradientNoise(), min_bytes=0)
    images = torch.randn(2, 3, 12, 12)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp), saver:
        loss = model(images).square().mean()
    loss.backward()
    profile = saver.profiles["2"]
    (ordinal,) = profile.ordinals
    found = saver.report().rows[ordinal]
    assert found.shape == (2, 4, 10, 10)
    assert found.kind == "lossy"
    assert 0.2 < profile.nonzero_share < 0.8
    assert profile.num_outputs == 5
    assert profile.energy > 0
    layers = {layer.name: layer for layer in saver.report().layers}
    assert layers["2"].predicted_sigma > 0


def test_hooks_are_gone_afterwards():
    """A model is as it was: it can be pickled, scripted, compiled."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    trace = Trace(model, measure=True)
    assert model[0]._forward_hooks
    trace.close()
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks
    assert trace.name == ""
