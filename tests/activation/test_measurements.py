"""What is measured: memory, noise, batches."""

import pytest
import torch
from support import run_python
from torch import nn
from torch.nn import functional

from pcrshard import compress_activations
from pcrshard.activation import ActivationOptions
from pcrshard.activation.measurements import gradient_noise

torch.set_num_threads(1)


PEAK = """
import torch
from pcrshard.activation.measurements import peak_memory
before = torch.ones(4_000_000)
with peak_memory() as peak:
    block = torch.ones(8_000_000)
    del block
print(peak.num_bytes)
"""


def test_the_peak_is_what_a_block_takes():
    """Memory that is touched and given back counts; what was there before does not."""
    # In a process of its own: memory that earlier tests gave back would be taken again.
    found = run_python("-c", PEAK).strip()
    if found == "None":
        pytest.skip("no /proc here")
    assert 31e6 < int(found) < 45e6


def network():
    """Strided, grouped, dilated, 1x1 and transposed convolutions, and batch normalization."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, groups=4),
        nn.ReLU(),
        nn.Conv2d(32, 32, 1),
        nn.ReLU(),
        nn.Conv2d(32, 24, 3, padding=2, dilation=2, bias=False),
        nn.ReLU(),
        nn.ConvTranspose2d(24, 16, 2, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_predicted_noise_is_what_is_measured(rounding):
    """Within 0.8 to 1.25 for every kind of convolution; nothing of the model has changed."""
    model = network()
    images = torch.randn(16, 3, 24, 24)
    labels = torch.randint(0, 10, (16,))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    saver = compress_activations(
        model, 0.05, "int8", ActivationOptions(min_bytes=0, rounding=rounding)
    )
    layers = gradient_noise(saver, model, lambda: functional.cross_entropy(model(images), labels))
    assert len(layers) == 5
    for layer in layers:
        ratio = layer.predicted_sigma / layer.measured_sigma
        assert 0.8 < ratio < 1.25, (layer.name, ratio)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert saver.ledger.live_bytes == 0


def test_a_failed_measurement_leaves_random_states_and_buffers():
    """An error in the loss does not change the random numbers or statistics of the training."""
    model = network()
    before = [torch.get_rng_state(), *(value.clone() for value in model.state_dict().values())]

    def fail():
        model(torch.randn(2, 3, 24, 24))
        raise KeyError

    with pytest.raises(KeyError):
        gradient_noise(compress_activations(model), model, fail)
    assert all(map(torch.equal, before, [torch.get_rng_state(), *model.state_dict().values()]))
