"""Codes that are predicted from other tensors': fewer bytes, and exactly the same tensors."""

import gc

import pytest
import torch
from torch import nn

from pcrshard import compress_activations


class Block(nn.Module):
    """Convolutions with normalization and a shortcut, as in a ResNet."""

    def __init__(self, width, act):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])
        self.act = act

    def forward(self, values):
        found = self.act(self.norms[0](self.first(values)))
        return self.act(self.norms[1](self.second(found)) + values)


def make_model(act, width=16, blocks=2):
    torch.manual_seed(0)
    stem = [nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), act]
    model = nn.Sequential(*stem, *(Block(width, act) for _ in range(blocks)))
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):  # as after training: some channels negative
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
    return model


def step(model, codec, images):
    """(report, gradients) of one step; live bytes are back at 0 after it."""
    saver = compress_activations(model, 0.05, codec)
    with saver:
        found = model(images)
        loss = found.float().square().mean()
    loss.backward()
    report = saver.report()
    gradients = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    del loss, found
    gc.collect()
    assert saver.ledger.live_bytes == 0
    return report, gradients


def images_of(size=24, batch=4):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("act", "frame", "gain"),
    [
        (nn.ReLU(), 0, 1.1),
        (nn.ReLU(inplace=True), 0, 1.1),
        (nn.ReLU6(), 0, 0.999),
        (nn.SiLU(), 0, 0.999),
        # What is at the left and right edges of each picture says nothing of the rest.
        (nn.ReLU(), 4, 1.12),
    ],
)
def test_gradients_are_the_same_bit_for_bit(act, frame, gain, memory_format):
    """A user who needs the memory pays in time only, whatever the activations are."""
    model = make_model(act).to(memory_format=memory_format)
    images = images_of(64 if frame else 24).to(memory_format=memory_format)
    images[..., :frame] = 0
    images[..., images.shape[-1] - frame :] = 0
    plain, expected = step(model, "zstd", images)
    found, gradients = step(model, "predicted", images)
    assert all(map(torch.equal, gradients, expected))
    assert [row.error_bound for row in found.rows] == [row.error_bound for row in plain.rows]
    assert found.ratio >= plain.ratio * gain


def test_a_graph_may_be_used_twice_and_in_parts():
    """Sources live as long as what is predicted from them, and are counted as long."""
    model = make_model(nn.ReLU())
    saver = compress_activations(model, codec="predicted")
    with saver:
        middle = model[:5](images_of())
        loss = model[5:](middle).square().mean()
    first = torch.autograd.grad(loss, middle, retain_graph=True)
    assert torch.equal(*first, *torch.autograd.grad(loss, middle))
    del loss
    gc.collect()
    assert saver.ledger.live_bytes > 0
    middle.sum().backward()
    del middle
    gc.collect()
    assert saver.ledger.live_bytes == 0
