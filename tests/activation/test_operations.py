"""No operation of PyTorch gets wrong gradients, whatever its backward does with what it saved."""

import contextlib
import itertools
import random
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from evidence.activations.models import ViT
from pcrshard import compress_activations
from pcrshard.activation import ActivationOptions

torch.set_num_threads(1)
BOUND = 0.02
# The relative error of a gradient, in bounds; gradients of masks are equal.
MOST = 8
ALL = ActivationOptions(min_bytes=0, min_dims=1)


def operations():
    """Operations with gradients that PyTorch's own tests list, by name."""
    pytest.importorskip("expecttest", reason="PyTorch's list of operations needs expecttest")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    found = {}
    for op in op_db:
        is_plain = op.supports_autograd and torch.float32 in op.dtypes
        if is_plain and not op.name.startswith(("linalg", "_refs", "fft", "sparse")):
            found.setdefault(f"{op.name} {op.variant_test_name}".strip(), op)
    return found


def odd(shape, generator):
    """Values of which many are 0, close to 0, at a limit, or far out."""
    values = torch.randn(shape, generator=generator) * 2
    kind = torch.randint(0, 8, shape, generator=generator)
    values = torch.where(kind == 0, values * 1e-3, values)
    values = torch.where(kind == 1, values.clamp(-1, 1), values)
    return torch.where(kind == 2, values * 6, values)


def gradient(function, arguments, codec=None):
    """Gradients of a weighted sum of the results, with the same random numbers each time."""
    saver = compress_activations(nn.Identity(), BOUND, codec, ALL) if codec else None
    leaves = [each for each in arguments if isinstance(each, torch.Tensor) and each.requires_grad]
    torch.manual_seed(0)
    with saver or contextlib.nullcontext():
        # Leaves are not compressed.
        inner = [each * 1.0 if any(each is leaf for leaf in leaves) else each for each in arguments]
        outs = function(*inner)
        outs = [out for out in (outs if isinstance(outs, tuple | list) else [outs])
                if isinstance(out, torch.Tensor) and out.requires_grad]  # fmt: skip
    total = sum((out.real * torch.linspace(0.5, 1.5, out.numel()).view(out.shape)).sum()
                for out in outs)  # fmt: skip
    return torch.autograd.grad(total, leaves, allow_unused=True)


@pytest.mark.changed("pcrshard/activation", "pcrshard/errorbound", "pcrshard/native")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("codec", ["zstd", pytest.param("bits", marks=pytest.mark.long)])
def test_every_operation_has_the_gradients_of_exact_tensors(codec, monkeypatch):
    """Of more than 400 cases of listed operations: within a few bounds."""
    wrong, count = {}, 0
    listed = operations()
    # For each input PyTorch searches the stack for its test, and formats it for each device: 20 ms.
    common = sys.modules["torch.testing._internal.common_utils"]
    monkeypatch.setattr(common, "extract_test_fn", lambda: None)
    monkeypatch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)
    for name, op in listed.items():
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        try:
            every = op.sample_inputs("cpu", torch.float32, requires_grad=True)
            samples = list(itertools.islice(every, 3))
        except Exception:  # needs what this machine lacks
            continue
        for sample in samples:
            values = (sample.input, *sample.args)
            if not isinstance(sample.input, torch.Tensor) or sample.input.numel() < 4:
                continue
            arguments = [
                each.detach().requires_grad_() if isinstance(each, torch.Tensor)
                and each.requires_grad else each for each in values
            ]  # fmt: skip

            def function(*inner, op=op, sample=sample):
                return op.op(*inner, **sample.kwargs)

            try:
                expected = gradient(function, arguments)
            except Exception:  # not of these arguments
                continue
            found = gradient(function, arguments, codec)
            count += 1
            largest = max((float(each.norm()) for each in expected if each is not None), default=0)
            for a, b in zip(found, expected, strict=True):
                if b is None or not b.isfinite().all():
                    continue
                # Some gradients cancel to 0; those of the results are about 1.
                scale = max(float(b.norm()), 0.01 * largest, 0.3 * b.numel() ** 0.5)
                error = float((a - b).norm()) / scale
                if not error <= MOST * BOUND:
                    wrong[name] = max(error, wrong.get(name, 0))
    assert count > 400
    assert not wrong


LIMITED = {
    "relu6": functional.relu6,
    "relu6 in place": lambda x: functional.relu6(x, inplace=True),
    "hardtanh": functional.hardtanh,
    "hardtanh in place": lambda x: functional.hardtanh(x, inplace=True),
    "clamp": lambda x: x.clamp(-0.5, 1),
    "clamp from below": lambda x: x.clamp(min=0.25),
    "clamp in place": lambda x: x.clamp_(max=0.75),
    "threshold": lambda x: functional.threshold(x, 0.5, 0.0),
    "hardsigmoid": functional.hardsigmoid,
    "hardswish": functional.hardswish,
    "hardshrink": functional.hardshrink,
    "softshrink": functional.softshrink,
    "maximum": lambda x: torch.maximum(x, x.roll(1)),
    "amax": lambda x: x.amax(1),
    "max": lambda x: x.max(),
    "infinite norm": lambda x: x.norm(torch.inf),
    "aminmax": lambda x: x.aminmax(dim=1).max,
    "division": lambda x: x / (x.roll(1).abs() + 1e-2),
    "reciprocal": lambda x: (x.abs() + 1e-3).pow(-1),
    "logarithm": lambda x: (1.001 - x.sigmoid()).log(),
    "cross entropy": lambda x: functional.binary_cross_entropy(
        (4 * x).sigmoid(), (x > 0).float(), reduction="none"
    ),
    "squared error": lambda x: functional.mse_loss(x, x.detach() + 1e-3, reduction="none"),
    "straight-through": lambda x: x.clamp(-1, 1) + ((x * 8).round() / 8 - x).detach(),
    "saturated sigmoid": lambda x: (x * 8).sigmoid(),
    "saturated tanh": lambda x: (x * 8).tanh(),
    "steps": lambda x: torch.where(x > 0.3, x, 0.0),
}


@pytest.mark.parametrize("codec", ["zstd", "int8", "bits"])
@pytest.mark.parametrize("name", LIMITED)
@pytest.mark.parametrize("scale", [1, 7])
def test_limits_and_saturation(name, scale, codec):
    """Masks at limits are exact, saturated gradients keep their signs, quotients their values."""
    values = (odd((8, 16, 24), torch.Generator().manual_seed(1)) * scale).requires_grad_()
    (expected,) = gradient(LIMITED[name], [values])
    (found,) = gradient(LIMITED[name], [values], codec)
    assert float((found - expected).norm()) <= 2 * BOUND * float(expected.norm())
    is_large = expected.abs() > 1e-3 * expected.abs().max()
    assert torch.equal(found.sign()[is_large], expected.sign()[is_large])
    if name.startswith(("relu6", "hardtanh", "clamp", "threshold", "straight")):
        assert torch.equal(found, expected)


def test_a_mask_autoencoder_trains_like_plain():
    """A sigmoid's result, by whose distance from 0 and 1 the loss divides, stays between them."""
    grid = torch.arange(32.0)
    losses = {}
    for codec in (None, "zstd", "int8"):
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1)]
        model = nn.Sequential(*layers, nn.Sigmoid())
        saver = compress_activations(model, codec=codec) if codec else contextlib.nullcontext()
        optimizer = torch.optim.Adam(model.parameters(), 0.02)
        norms = []
        for step in range(30):
            centers = torch.rand(8, 2, 1, 1, generator=torch.Generator().manual_seed(step)) * 32
            distances = (grid[:, None] - centers[:, :1]) ** 2 + (grid - centers[:, 1:]) ** 2
            masks = (distances < 64).float()
            with saver:
                loss = nn.BCELoss()(model(masks), masks)
            optimizer.zero_grad()
            loss.backward()
            norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))
            optimizer.step()
        losses[codec] = float(loss.detach())
        assert max(norms) < 3
    assert max(losses.values()) < 1.05 * min(losses.values())


@pytest.mark.parametrize("codec", ["zstd", "int8"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_rows_of_small_deviation_keep_their_gradients(codec, dtype):
    """At initialization, a transformer's class token and positions are far smaller than others."""
    torch.manual_seed(0)
    model = ViT(10, size=64)
    model.blocks = model.blocks[:3]
    images, labels = torch.randn(4, 3, 64, 64), torch.arange(4)

    def gradients(context):
        model.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None), context:
            loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        return {name: each.grad.clone() for name, each in model.named_parameters()}

    exact = gradients(contextlib.nullcontext())
    found = gradients(compress_activations(model, 0.05, codec, ActivationOptions(min_bytes=1024)))
    errors = {
        name: float((found[name] - exact[name]).norm() / exact[name].norm())
        for name in exact if exact[name].norm() > 1e-6
    }  # fmt: skip
    dense = max(error for name, error in errors.items() if "linear" in name and "weight" in name)
    assert max(errors.values()) < 1.5 * dense, max(errors, key=errors.get)
    assert max(errors.values()) < 0.08
