"""Models on an accelerator: memory is saved, and the host never waits for it.

Without one, the CPU stands in for it, and neither memory nor waiting is tested.
"""

import contextlib
import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from within import assert_within_in_blocks

from pcrshard import compress_activations
from pcrshard.activation import Absolute, ActivationOptions, GradientNoise, peak_memory

HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"
DEPTH = 12 if HAS_CUDA else 1
pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's compiler has many


def only_there(*values):
    """A case that the CPU, standing in, runs in long runs only."""
    return pytest.param(*values, marks=[] if HAS_CUDA else pytest.mark.long)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """Without an accelerator, nothing runs in the native core."""
    if not HAS_CUDA:
        monkeypatch.setattr("pcrshard.activation.blocks.CORE_DEVICE", "none")
        monkeypatch.setattr("pcrshard.activation.blocks._HAS_TRITON", False)


def network():
    torch.manual_seed(0)
    layers = []
    for inputs, outputs in ((3, 64), *[(64, 64)] * DEPTH, (64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    layers += [nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(128, 10)).to(DEVICE)


def images():
    size = 64 if HAS_CUDA else 8
    return torch.randn(32, 3, size, size, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def step(model, pixels, saver=None, dtype=None):
    """(loss, gradients) of a step; the same random numbers each time."""
    torch.manual_seed(2)
    model.zero_grad()
    with torch.autocast(DEVICE, dtype, enabled=dtype is not None):
        with saver or contextlib.nullcontext():
            out = model(pixels)
        loss = functional.cross_entropy(out.float(), torch.arange(32, device=DEVICE) % 10)
    loss.backward()
    return loss.detach(), torch.cat([weight.grad.flatten() for weight in model.parameters()])


@pytest.mark.parametrize("layout", [only_there(torch.contiguous_format), torch.channels_last])
@pytest.mark.parametrize(("codec", "dtype", "least"), [
    ("auto", None, 3.3), ("bits", torch.bfloat16, 1.6),
    only_there("int8", None, 2.6), only_there("int8", torch.bfloat16, 1.4),
])  # fmt: skip
def test_memory_is_saved_without_waiting(codec, dtype, least, layout):
    """Peak memory falls, gradients stay close, and neither pass waits for the device."""
    model = network().to(memory_format=layout)
    pixels = images().contiguous(memory_format=layout)
    for _ in range(2):
        with peak_memory(DEVICE) as plain_peak:
            plain_loss, plain = step(model, pixels, None, dtype)
    saver = compress_activations(model, 0.05, codec)
    for _ in range(3):  # compiles, then for other sizes
        step(model, pixels, saver, dtype)
    with peak_memory(DEVICE) as peak:
        loss, gradients = step(model, pixels, saver, dtype)
    assert float(loss) == pytest.approx(float(plain_loss), rel=1e-3)
    assert float((gradients - plain).norm() / plain.norm()) < 0.05
    assert saver.report().ratio > least
    assert saver.ledger.live_bytes == 0
    if not HAS_CUDA:
        return
    assert peak.num_bytes < 0.75 * plain_peak.num_bytes
    model[-4] = nn.Identity()  # the range of pooling's indices is read
    with saver:
        model(pixels)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with saver:
            out = model(pixels)
        out.square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("bound", [0.05, Absolute(0.05)])
@pytest.mark.parametrize("codec", ["int8", "bits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [64 * 24 * 40, 2_000_003])
def test_the_bound_holds_except_near_outliers(bound, codec, dtype, count):
    """Only a block of 64 with an outlier has a larger bound, and only one with a NaN is lost."""
    torch.manual_seed(0)
    values = torch.randn(count, device=DEVICE).to(dtype)
    values[values.abs() < 0.3] = 0
    values[[100, 101, 300, 700]] = torch.tensor([50, -50, math.inf, math.nan], dtype=dtype)
    values = values.view(1, 1, -1).requires_grad_()
    saver = compress_activations(nn.Identity(), bound, codec, ActivationOptions(inputs=True))
    with saver:
        out = (values * 1).square().sum()
    out.backward()
    (row,) = [row for row in saver.report().rows if row.kind == "lossy"]
    exact = values.detach()
    most = 60 if codec == "bits" and bound == 0.05 else 124
    assert_within_in_blocks(exact.flatten(), values.grad.flatten() / 2, row.error_bound, most)
    ordinary = exact[exact.abs() < 20].double()
    deviation = 1 if isinstance(bound, Absolute) else 1.05 * float(ordinary.std())
    assert row.error_bound <= 0.05 * deviation * 1.000001
    assert row.stored_bytes < row.raw_bytes / (3.5 if dtype == torch.float32 else 1.8)


@pytest.mark.parametrize("codec", ["int8", "bits"])
def test_one_huge_value_leaves_the_others_a_useful_bound(codec):
    """A value near the end of the type's range costs its block, not the whole tensor."""
    values = torch.randn(1, 1, 250_000, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    values[..., 5] = 3e37
    values.requires_grad_()
    saver = compress_activations(nn.Identity(), 0.05, codec, ActivationOptions(inputs=True))
    with saver:
        out = (values * 1).square().sum()
    out.backward()
    (row,) = [row for row in saver.report().rows if row.kind == "lossy"]
    assert row.error_bound < 0.05 * 16 * 1.05


def test_adaptive_bounds():
    """GradientNoise sets bounds on an accelerator, too, and reports them."""
    model, pixels = network(), images()
    saver = compress_activations(model, GradientNoise(), "int8")
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for _ in range(4):
        step(model, pixels, saver)
        optimizer.step()
        saver.step(optimizer)
    report = saver.report()
    assert len(report.layers) == DEPTH + 2
    read = [row for row in report.rows if row.read_by and row.kind == "lossy"]
    assert len(read) == DEPTH + 1
    assert all(0 < row.error_bound <= 0.2501 * row.deviation for row in read)


@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("codec", ["int8", "bits"])
def test_compiled_by_inductor(codec):
    """A compiled model on the device has the same loss, and gradients that are close."""
    model, pixels = network(), images()
    compiled = torch.compile(model, fullgraph=True)
    saver = compress_activations(compiled, 0.05, codec)
    losses, gradients = zip(
        *(step(compiled, pixels, each, torch.bfloat16) for each in (None, saver)), strict=True
    )
    assert float(losses[1]) == pytest.approx(float(losses[0]), rel=1e-2)
    assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < 0.1
