"""Compiled models keep codes instead of floats, inside of the compiled graph."""

import contextlib
import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from within import assert_within_in_blocks

from benchmarks.activation import held_bytes
from pcrshard import compress_activations
from pcrshard.activation import Absolute, ActivationOptions

torch.set_num_threads(1)
# Dynamo's own, where a compiled part reads the result of an eager one; Inductor's, when imported.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning"),
]
SMALL = ActivationOptions(min_bytes=1024)


@pytest.fixture(autouse=True)
def compilers():
    """Reset the compiler so that each test compiles from scratch."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Net(nn.Module):
    """Convolutions with normalization, pooling and a shortcut, then a block of a transformer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.pool = nn.MaxPool2d(2)
        self.block = nn.TransformerEncoderLayer(
            16, 2, 64, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.head = nn.Linear(16, 5)

    def forward(self, images):
        features = self.pool(self.norm(self.stem(images)).relu())
        return self.head(self.block(features.flatten(2).transpose(1, 2)).mean(1))


def batch(size=8):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(size, 3, 16, 16, generator=generator)
    return images, torch.randint(0, 5, (size,), generator=generator)


def make():
    torch.manual_seed(0)
    return Net()


def step(model, saver, size=8):
    """(loss, saved bytes, gradients) of a step; the same random numbers each time."""
    images, labels = batch(size)
    torch.manual_seed(2)
    model.zero_grad()
    with saver or contextlib.nullcontext():
        loss = functional.cross_entropy(model(images), labels)
    held = held_bytes(loss, model, images)
    loss.backward()
    gradients = {
        name.replace("_orig_mod.", ""): weight.grad.clone()
        for name, weight in model.named_parameters()
    }
    return float(loss.detach()), held, gradients


def error(found, expected):
    """The error of all gradients, relative to their norm."""
    both = [(found[name], expected[name]) for name in expected]
    wrong = sum(float((a - b).square().sum()) for a, b in both)
    return math.sqrt(wrong / sum(float(b.square().sum()) for _, b in both))


@pytest.mark.parametrize(
    ("backend", "codec"),
    [
        ("aot_eager", "int8"),
        pytest.param("aot_eager", "bits", marks=pytest.mark.long),
        pytest.param("inductor", "bits", marks=pytest.mark.long),
    ],
)
def test_a_full_graph_keeps_codes(backend, codec):
    """A third to a quarter of the bytes, the same loss, gradients as close as in eager code."""
    model = make()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    loss, plain_bytes, plain = step(compiled, None)
    saver = compress_activations(compiled, 0.05, codec, SMALL)
    same, held, gradients = step(compiled, saver)
    assert same == pytest.approx(loss, rel=1e-6)
    # Of so few channels the statistics of normalization are a tenth of the rest.
    assert plain_bytes > (3.6 if (backend, codec) == ("aot_eager", "bits") else 3.2) * held
    eager = compress_activations(model, 0.05, "int8", SMALL)
    _, _, usual = step(model, eager)
    # Inductor computes ReLU again, from inexact values.
    limit = 1.5 if backend == "aot_eager" else 5
    assert error(gradients, plain) < min(limit * error(usual, plain), 0.03)
    report = saver.report()
    assert report.ratio > 3.2
    names = {row.name for row in report.rows}
    assert {"stem", "block.linear1"} <= names
    again, _, repeated = step(compiled, saver)
    assert again == same
    assert error(repeated, gradients) == 0
    assert len(saver.report().rows) == len(report.rows)


def test_masks_and_indices_are_exact():
    """A ReLU's zeros, max-pooling's indices and dropout's masks: the same gradients where exact."""
    torch.manual_seed(0)
    values = torch.randn(4, 8, 16, 16, requires_grad=True)
    other = torch.randn(4, 8, 16, 16)

    def forward(values):
        scaled = values * 2.0
        kept = functional.dropout(scaled.relu() * other, 0.25)
        return functional.max_pool2d(kept, 2).sum() + (scaled > 1).float().mul(scaled).sum()

    expected = gradient_of(forward, values, None).clone()
    saver = compress_activations(nn.Identity(), 0.05, "int8", SMALL)
    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    found = gradient_of(compiled, values, saver)
    assert torch.equal(found, expected)
    kinds = {row.dtype: row for row in saver.report().rows if row.kind == "lossless"}
    assert kinds[torch.bool].raw_bytes == 8 * kinds[torch.bool].stored_bytes
    assert kinds[torch.int64].raw_bytes == 16 * kinds[torch.int64].stored_bytes


def test_what_is_compared_with_a_maximum_is_exact():
    """Pooling by amax has its gradient, where compiled code looks for the maximum in backward."""
    torch.manual_seed(0)
    values = torch.randn(4, 8, 16, 16, requires_grad=True)

    def forward(values):
        features = functional.gelu(functional.conv2d(values, torch.ones(4, 8, 3, 3)))
        return features.amax((2, 3)).square().sum()

    saver = compress_activations(nn.Identity(), 0.05, "int8", SMALL)
    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    found = gradient_of(compiled, values, saver)
    assert torch.allclose(found, gradient_of(forward, values, None))


LIMITED = {
    "relu6": functional.relu6,
    "clamp": lambda x: x.clamp(-0.5, 1),
    "division": lambda x: x / (x.roll(1).abs() + 1e-2),
    "reciprocal": lambda x: (x.abs() + 1e-3).pow(-1),
    "logarithm": lambda x: (1.001 - x.sigmoid()).log(),
    "cross entropy": lambda x: functional.binary_cross_entropy(
        (4 * x).sigmoid(), (x > 0).float(), reduction="none"
    ),
    "maximum": lambda x: torch.maximum(x, x.roll(1)),
    "squared error": lambda x: functional.mse_loss(x, x.detach() + 1e-3, reduction="none"),
}


@pytest.mark.parametrize("name", LIMITED)
def test_limits_and_divisors_are_exact(name):
    """What backward divides by, or compares with a limit, is exact in compiled code, too."""
    torch.manual_seed(0)
    values = torch.randn(4, 8, 16, 16).mul(4).requires_grad_()

    def forward(values):
        return LIMITED[name](values * 1.0)

    saver = compress_activations(nn.Identity(), 0.05, "int8", SMALL)
    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    found = gradient_of(lambda values: compiled(values).sum(), values, saver)
    expected = gradient_of(lambda values: forward(values).sum(), values, None)
    assert float((found - expected).norm()) <= 0.05 * float(expected.norm())


@pytest.mark.parametrize("norm", [nn.LayerNorm(64), nn.RMSNorm(64), nn.BatchNorm1d(32)])
def test_rows_and_channels_of_small_deviation_keep_their_gradients(norm):
    """A row or a channel a thousandth of the others' size has gradients as exact as theirs."""
    torch.manual_seed(0)
    size = torch.ones(32)
    size[::4] = 1e-3
    values = (torch.randn(16, 32, 64) * size[:, None]).requires_grad_()
    saver = compress_activations(nn.Identity(), 0.05, "int8", SMALL)

    def forward(values):
        return norm(values[None].cumsum(0)[0]).square()

    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    weights = torch.randn(16, 32, 64)
    found = gradient_of(lambda values: (compiled(values) * weights).sum(), values, saver)
    expected = gradient_of(lambda values: (forward(values) * weights).sum(), values, None)
    assert any(row.kind == "lossy" for row in saver.report().rows)
    for part in (slice(0, None, 4), slice(1, None, 4)):
        wrong = (found - expected)[:, part].norm() / expected[:, part].norm()
        assert float(wrong) < 0.1


def gradient_of(forward, values, saver):
    torch.manual_seed(3)
    with saver or contextlib.nullcontext():
        out = forward(values)
    return torch.autograd.grad(out, values)[0]


def square(values):
    """Squares of sums of one value each, which compilers do not compute twice."""
    return values[None].cumsum(0)[0].pow(2)


@pytest.mark.parametrize("bound", [0.05, Absolute(0.05)])
@pytest.mark.parametrize("codec", ["int8", "bits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bound_holds_except_near_outliers(bound, codec, dtype):
    """Only a block of 64 with an outlier has a larger bound, and only one with a NaN is lost."""
    torch.manual_seed(0)
    values = torch.randn(64, 24, 40).to(dtype)
    values[values.abs() < 0.3] = 0
    values[3, 2, :2] = torch.tensor([30, -30], dtype=dtype)
    values[5:7, 2, 3] = torch.tensor([math.inf, math.nan], dtype=dtype)
    values = values.transpose(0, 1).requires_grad_()
    saver = compress_activations(nn.Identity(), bound, codec, SMALL)
    compiled = torch.compile(square, backend="aot_eager", fullgraph=True)
    found = gradient_of(lambda values: compiled(values).sum(), values, saver) / 2
    exact, back = values.detach().flatten(), found.flatten()  # in the order of the sums
    ordinary = exact[exact.abs() < 20].double()
    deviation = 1 if isinstance(bound, Absolute) else 1.03 * float(ordinary.std())
    most = 60 if codec == "bits" and bound == 0.05 else 124
    assert_within_in_blocks(exact, back, 0.05 * deviation, most)
    (row,) = saver.report().rows
    assert row.stored_bytes < row.raw_bytes / (3.5 if dtype == torch.float32 else 1.8)


def _odd_tensors():
    normal = torch.randn(64, 16, 256, generator=torch.Generator().manual_seed(0))
    one = torch.zeros_like(normal)
    one[3, 5, 7] = 1e30
    rare = normal * (torch.rand(normal.shape, generator=torch.Generator().manual_seed(1)) < 0.002)
    return {
        "zeros": normal * 0,
        "equal": normal * 0 + 0.3,
        "one outlier": one,
        "rare": rare,
        "tiny": normal * 1e-30,
        "huge": normal * 1e30,
        "heavy tails": (normal * 3).exp(),
    }


@pytest.mark.parametrize("codec", ["int8", "bits"])
def test_no_tensor_is_too_odd(codec):
    """Constant, sparse, tiny, huge and heavy-tailed values keep their signs and most digits."""
    compiled = torch.compile(square, backend="aot_eager", fullgraph=True)
    saver = compress_activations(nn.Identity(), 0.05, codec, SMALL)
    for name, values in _odd_tensors().items():
        values.requires_grad_()
        scale = 0.5 / max(float(values.detach().abs().max()), 1e-30)
        found = gradient_of(lambda values: (compiled(values) * scale).sum(), values, saver)
        exact, found = values.detach().double(), (found / (2 * scale)).double()
        assert torch.equal(found.sign(), exact.sign()), name
        most = {"zeros": 0, "equal": 1e-6, "one outlier": 1e-6}.get(name, 0.02)
        wrong = (found - exact).abs()
        assert float(wrong.max()) <= most * float(exact.abs().max()), name
        assert float(wrong.mean()) <= 0.2 * float(exact.std()), name


@pytest.mark.parametrize("name", ["hardtanh", "leaky_relu", "relu", "relu6", "sigmoid", "tanh"])
def test_results_of_activation_functions_keep_their_signs(name):
    """Codes have a sign bit unless a function has no negative results, whatever its arguments."""
    torch.manual_seed(0)
    function = getattr(functional, name)
    values = torch.randn(8, 4, 32, 32, requires_grad=True)
    kernel = torch.randn(4, 4, 3, 3, requires_grad=True)

    def forward(values, kernel):
        return functional.conv2d(function(values * 2.0), kernel).square().sum()

    saver = compress_activations(nn.Identity(), 0.05, "bits", SMALL)
    with saver:
        out = torch.compile(forward, backend="aot_eager", fullgraph=True)(values, kernel)
    for found, plain in zip(
        torch.autograd.grad(out, [values, kernel]),
        torch.autograd.grad(forward(values, kernel), [values, kernel]),
        strict=True,
    ):
        assert float((found - plain).norm() / plain.norm()) < 0.1


@pytest.mark.long
def test_other_batch_sizes():
    """Graphs of any batch size pack the short last batch, too."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 5, 3), nn.AdaptiveAvgPool2d(1)]
    model = nn.Sequential(*layers, nn.Flatten())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    saver = compress_activations(compiled, 0.05, "int8", SMALL)
    for size in (8, 5):
        _, _, plain = step(model, None, size)
        _, held, gradients = step(compiled, saver, size)
        assert error(gradients, plain) < 0.05
        assert held < saver.report().raw_bytes / 3


def test_zstd_is_for_eager_parts():
    """One warning says that compiled parts pack int8; eager parts are compressed as ever."""
    model = make()
    model.block = torch.compile(model.block, backend="aot_eager", fullgraph=True)
    saver = compress_activations(model, codec="zstd", options=SMALL)
    with pytest.warns(UserWarning, match="torch.compile: compiled code packs codes as int8"):
        step(model, saver)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="torch.compile")
        _, _, gradients = step(model, saver)
    _, _, plain = step(model, None)
    assert 0 < error(gradients, plain) < 0.03
    rows = saver.report().rows
    assert {row.compiled for row in rows} == {True, False}
    assert any(row.kind == "lossy" and not row.compiled for row in rows)
    assert "torch.compile" in str(saver.report())
    assert saver.ledger.live_bytes == 0


class Broken(nn.Module):
    """A graph breaks where an LSTM, a function that is not compiled, and a selection run."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.memory = nn.LSTM(16, 16)

    def between(self, features):
        return functional.gelu(self.layer(features * 2.0)) * 3.0

    def forward(self, values):
        features, _ = self.memory(self.layer(values))
        features = self.between(features)
        return functional.gelu(self.layer(features)[values > 0])


def test_what_runs_between_graphs_is_packed_eagerly():
    """Compiled code that breaks its graph does not compile the packing of tensors."""
    torch.manual_seed(0)
    model = Broken()
    model.between = torch.compiler.disable(model.between)
    compiled = torch.compile(model, backend="aot_eager")
    values = torch.randn(20, 8, 16)
    saver = compress_activations(compiled, options=SMALL)
    found = []
    for block in (contextlib.nullcontext(), saver, saver):
        with block:
            loss = compiled(values).square().mean()
        found.append(torch.autograd.grad(loss, model.layer.weight)[0])
    assert 0 < float((found[2] - found[0]).norm() / found[0].norm()) < 0.03
    eager = [row for row in saver.report().rows if not row.compiled]
    packed = {(row.function, row.kind) for row in eager if row.stored_bytes < row.raw_bytes}
    assert ("mul", "lossy") in packed  # what the layer reads between the graphs
    assert any(kind == "lossless" for _, kind in packed)  # the selection's mask or places
    assert saver.ledger.live_bytes == 0
