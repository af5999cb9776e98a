"""Every way in which a training loop may surprise a saver of activations."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pcrshard import compress_activations
from pcrshard.activation import Absolute, ActivationOptions, GradientNoise, RelativeStd
from pcrshard.errorbound import PointwiseRelative

torch.set_num_threads(1)
CODECS = ("zstd", "bits", "int8")
WEIGHT = nn.Parameter(torch.ones(4, 3, 3, 3))
INDEX = torch.zeros(4, 8, 16, 16, dtype=torch.int64)


def saver_of(model, bound=0.05, codec="zstd", **options):
    return compress_activations(model, bound, codec, ActivationOptions(**options))


def network(*, inplace=False):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace),
        nn.Conv2d(8, 16, 3, padding=1, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(inplace),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


def batch(size=8):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(size, 3, 32, 32, generator=generator)
    return images, torch.randint(0, 5, (size,), generator=generator)


def loss_of(model, size=8):
    images, labels = batch(size)
    return functional.cross_entropy(model(images), labels)


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def run(model, saver, size=8):
    model.zero_grad()
    with saver:
        loss = loss_of(model, size)
    loss.backward()
    return float(loss.detach())


def errors(first, second):
    """Relative errors of the gradients of weights.

    A bias before batch normalization has none: any error would be infinitely large.
    """
    return [
        float((a - b).norm() / a.norm()) for a, b in zip(first, second, strict=True) if a.dim() > 1
    ]


def expected(model):
    model = copy.deepcopy(model)
    loss_of(model).backward()
    return gradients(model)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_gradients_are_close_and_memory_is_freed(codec, rounding):
    """The loss is the same, the gradients nearly so, and nothing is alive afterwards."""
    model = network()
    plain = expected(model)
    loss = float(loss_of(copy.deepcopy(model)).detach())
    saver = saver_of(model, 0.02, codec, min_bytes=1024, rounding=rounding)
    assert run(model, saver) == loss
    assert max(errors(plain, gradients(model))) < 0.05
    assert saver.ledger.live_bytes == 0
    assert saver.ledger.peak_bytes > 0
    assert saver.report().ratio > 2


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_masks_of_relu_are_exact(inplace, memory):
    """Where a ReLU's output was zero the gradient is zero, and only there; in any layout."""
    torch.manual_seed(0)
    values = torch.randn(4, 8, 16, 16).contiguous(memory_format=memory).requires_grad_()
    saver = saver_of(nn.Identity(), Absolute(10.0), min_bytes=0)
    with saver:
        out = functional.relu(values * 1.0, inplace=inplace)
    assert [row.kind for row in saver.report().rows] == ["lossy"]
    out.sum().backward()
    assert torch.equal(values.grad, (values > 0).float())


def test_a_change_in_place_of_an_exact_tensor_raises_as_without_us():
    """Autograd's own check, which pack hooks switch off."""
    values = torch.randn(3, requires_grad=True)
    saver = compress_activations(nn.Identity())
    with saver:
        middle = values * 1.0
        out = middle.pow(2)
    middle.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*version 0 instead"):
        out.sum().backward()
    weight = nn.Parameter(torch.randn(3))
    with saver:
        out = values * weight
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_views_and_transposes_are_not_mistaken_for_each_other():
    """One storage, other shapes, strides and offsets: no shared copies (ms-swift issue 10157)."""
    values = torch.randn(16, 16, 16, requires_grad=True)
    saver = saver_of(nn.Identity(), Absolute(0.02), min_bytes=0)
    with saver:
        base = values * 1.0
        parts = [
            base,
            base.transpose(0, 2),
            base[:8],
            base[8:],
            base[:, ::2],
            base[..., 1::2],
            base.flatten(0, 1)[None],
        ]
        outs = [part.pow(2) for part in parts]
    for part, out in zip(parts, outs, strict=True):
        assert torch.allclose(out.grad_fn._saved_self, part, atol=0.021)
        assert out.grad_fn._saved_self.stride() == torch.empty_like(part).stride()
    assert saver.ledger.live_bytes > 0
    sum(out.sum() for out in outs).backward()
    assert saver.ledger.live_bytes == 0


def test_memory_that_is_used_again_is_another_tensor():
    """The allocator gives a freed address to the next tensor (trl issue 6241)."""
    saver = saver_of(nn.Identity(), Absolute(0.02), min_bytes=0)
    values = torch.randn(64, 32, 32, requires_grad=True)
    with saver:
        # Each factor's product is freed at once.
        outs = [(values * (factor / 10)).pow(2).sum() for factor in range(1, 20)]
    for factor, out in enumerate(outs, 1):
        (gradient,) = torch.autograd.grad(out, values)
        assert torch.allclose(
            gradient, 2 * (factor / 10) ** 2 * values, rtol=0, atol=factor / 10 * 0.041
        )
    assert len(saver.report().rows) == 19


def test_autocast_leaves_copies_of_weights_alone():
    """bfloat16 copies of weights are no parameter's storage, and exact all the same."""
    model = network()
    model.append(nn.Linear(5, 5))
    saver = saver_of(model, min_bytes=0, min_dims=1)
    with torch.autocast("cpu", torch.bfloat16):
        plain = expected(model)
        run(model, saver)
    rows = saver.report().rows
    weights = [weight for weight in model.parameters() if weight.dim() > 1]
    shapes = {tuple(each.shape) for weight in weights for each in (weight, weight.mT)}
    assert not shapes & {row.shape for row in rows}
    assert (torch.bfloat16, "lossy") in {(row.dtype, row.kind) for row in rows}
    assert max(errors(plain, gradients(model))) < 0.1


class Float8(torch.autograd.Function):
    """Keeps its input for backward in eight bits, as training in float8 does."""

    @staticmethod
    def forward(context, values):
        context.save_for_backward(values.to(torch.float8_e4m3fn))
        return values * 2

    @staticmethod
    def backward(context, gradient):
        return gradient * context.saved_tensors[0].float()


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda values: functional.conv2d(values.detach(), WEIGHT), "exact"),
        (lambda values: (values * 1.0)[0, 0].pow(2), "exact"),
        (lambda values: (values * 1.0).flatten(1).pow(2), "exact"),
        (lambda values: (values * 1.0).log_softmax(1).pow(1), "exact"),
        (lambda values: (values * 1.0).log_softmax(1).transpose(0, 1).pow(1), "exact"),
        (lambda values: (values * 0.0 - 1).relu(), "lossless"),
        (lambda values: (values * 0.0 + 3).pow(2), "lossless"),
        (lambda values: (values[:0] * 1.0).pow(2), "exact"),
        (lambda values: (values[:, :1] * 1.0).expand(8, 9, 32, 32).pow(2), "exact"),
        (lambda values: (values * 1.0j).pow(2).abs(), "exact"),
        (Float8.apply, "exact"),
        (lambda values: torch.sparse.mm(torch.eye(32).to_sparse(), values[0, 0]), "exact"),
    ],
    ids=["input", "small", "features", "softmax", "turned", "dead", "constant", "empty", "expanded",
         "complex", "float8", "sparse"],
)  # fmt: skip
def test_other_tensors_are_exact(make, kind):
    """What no error bound fits is kept as it is; tensors of one value in a few bytes."""
    values = torch.randn(8, 3, 32, 32, requires_grad=True)
    saver = saver_of(nn.Identity())
    with saver:
        out = make(values)
    rows = saver.report().rows
    assert {row.kind for row in rows} <= {kind}
    assert kind == "exact" or rows[0].stored_bytes < 100
    found, plain = (
        torch.autograd.grad(each.sum(), [values, WEIGHT], allow_unused=True)
        for each in (out, make(values))
    )
    assert all(a is b or torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_inputs_may_be_lossy_if_asked():
    """As in the paper, whose figures include the images."""
    saver = saver_of(nn.Identity(), inputs=True, min_bytes=0, min_dims=0)
    with saver:
        outs = [functional.conv2d(torch.randn(8, 3, 32, 32), WEIGHT)]
        outs.append((WEIGHT.sum() * 1.0).view(1, 1).pow(2))
    assert [row.kind for row in saver.report().rows] == ["lossy", "exact"]


def test_the_codec_none_only_counts():
    """Bytes are reported, gradients the same bit for bit."""
    model = network()
    plain = expected(model)
    saver = saver_of(model, codec="none")
    run(model, saver)
    assert max(errors(plain, gradients(model))) == 0
    assert saver.report().ratio == 1.0


def test_retain_graph_and_double_backward():
    """Unpacked as often as asked; gradients of gradients work."""
    model = network()
    saver = saver_of(model, 0.02, min_bytes=1024)
    with saver:
        loss = loss_of(model)
    assert saver.ledger.live_bytes > 0
    weights = list(model.parameters())
    first, second = (torch.autograd.grad(loss, weights, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    graph = torch.autograd.grad(loss, weights, create_graph=True)
    sum(part.square().sum() for part in graph).backward()
    assert all(weight.grad is not None for weight in weights)
    del loss, graph
    gc.collect()
    assert saver.ledger.live_bytes == 0


@pytest.mark.parametrize("in_backward", [False, True])
def test_an_exception_frees_everything(in_backward):
    """The block ends, the hooks go, the counter returns to 0, and the next step works."""
    model = network()
    images, labels = batch()
    saver = saver_of(model, min_bytes=1024)

    def fail(gradient):
        raise KeyError

    def run_into_it():
        with saver:
            middle = model[:4](images)
            if not in_backward:
                fail(None)
            middle.register_hook(fail)
            loss = functional.cross_entropy(model[4:](middle), labels)
        loss.backward()

    with pytest.raises(KeyError):
        run_into_it()
    gc.collect()
    assert saver.ledger.live_bytes == 0
    run(model, saver)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_regions_save_their_input_compressed(reentrant):
    """torch.utils.checkpoint inside of the block: the input of the region is what is kept."""
    model = network()
    images, labels = batch()
    plain = expected(model)
    saver = saver_of(model, 0.02, min_bytes=1024)
    model.zero_grad()
    with saver:
        middle = model[:3](images)
        middle = checkpoint(model[3:9], middle, use_reentrant=reentrant)
        loss = functional.cross_entropy(model[9:](middle), labels)
    shapes = [row.shape for row in saver.report().rows if row.kind in ("lossy", "derived")]
    assert shapes.count((8, 8, 32, 32)) == 2
    assert (8, 16, 16, 16) not in shapes
    loss.backward()
    # The region is computed again from inexact inputs, so that masks change, too.
    assert max(errors(plain, gradients(model))) < 0.2
    assert saver.ledger.live_bytes == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_regions_follow_each_other(reentrant):
    """Each block in a region of its own, as people write it: the last operation of a region is not
    looked at when the next one saves its input, and each input is compressed.
    """
    model = network()
    images, labels = batch()
    plain = expected(model)
    saver = saver_of(model, 0.02, min_bytes=1024)
    model.zero_grad()
    with saver:
        middle = model[:3](images)
        for region in (model[3:6], lambda values: values + 0, model[6:9]):
            middle = checkpoint(region, middle, use_reentrant=reentrant)
        loss = functional.cross_entropy(model[9:](middle), labels)
    kinds = [row.kind for row in saver.report().rows if len(row.shape) == 4]
    assert kinds.count("lossy") + kinds.count("derived") >= 3
    loss.backward()
    assert max(errors(plain, gradients(model))) < 0.3
    assert saver.ledger.live_bytes == 0


def test_dynamic_graphs_and_short_batches():
    """Another graph each step, the last batch short: the fallback bound, never a crash."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    saver = saver_of(model, GradientNoise(every=3), min_bytes=1024)
    images, labels = batch()
    for step in range(6):
        size = 8 if step % 3 else 3
        optimizer.zero_grad()
        with saver:
            middle = model[:6](images[:size])
            if step % 2:
                middle = middle * torch.sigmoid(middle)
            loss = functional.cross_entropy(model[6:](middle), labels[:size])
        loss.backward()
        optimizer.step()
        saver.step(optimizer)
        assert loss.isfinite()


def test_all_tokens_of_attention_are_compressed():
    """Also where PyTorch's own attention copies them, transposed, to a matrix."""
    model = nn.TransformerEncoderLayer(64, 2, 128, 0.0, batch_first=True)
    saver = saver_of(model)
    with saver:
        out = model(torch.randn(8, 32, 64, requires_grad=True) * 1.0)
    out.sum().backward()
    large = [row for row in saver.report().rows if row.raw_bytes >= 16_384]
    assert {row.kind for row in large} == {"lossy", "derived"}


def test_one_block_at_a_time():
    """Nesting one saver in itself is refused; its outer block still ends well."""
    saver = compress_activations(nn.Identity())
    for _ in range(2):
        with saver, pytest.raises(RuntimeError, match="one with block at a time"):
            saver.__enter__()


def test_impossible_settings_are_refused_with_the_reason():
    """At once, with what was expected, instead of in the middle of a training."""
    model = nn.Identity()
    with pytest.raises(ValueError, match=r"0.05 allows 5 %"):
        compress_activations(model, 8)
    with pytest.raises(ValueError, match="codes have one byte"):
        compress_activations(model, 0.001)
    with pytest.raises(TypeError, match="got PointwiseRelative"):
        compress_activations(model, PointwiseRelative(0.1))
    with pytest.raises(ValueError, match="1 or more steps"):
        GradientNoise(every=0)
    with pytest.raises(ValueError, match="nearest or stochastic"):
        ActivationOptions(rounding="up")
    with pytest.raises(ValueError, match="'zstd' or 'bits' or 'int8' or 'none'"):
        compress_activations(model, codec="gzip")
    assert compress_activations(model, 0.1).bound == RelativeStd(0.1)


def test_a_forgotten_block_is_noticed():
    """Training without ``with saver:`` warns at the first step, once, and the report says it."""
    model = network()
    saver = compress_activations(model)
    model(batch()[0]).sum().backward()
    with pytest.warns(UserWarning, match="no forward pass ran inside"):
        saver.step()
    assert "no forward pass" in str(saver.report())
    saver.step()


def test_a_pass_that_compresses_nothing_is_noticed():
    """Megabytes that stay exact are no success: one warning says what would be compressed."""
    model = nn.Linear(1024, 1024)
    saver = compress_activations(model)
    with pytest.warns(UserWarning, match="none of the 1 saved tensors was compressed"), saver:
        model(torch.randn(1024, 1024)).sum().backward()


def test_the_report_says_what_was_gained():
    """Plain and compressed bytes, times, and the ten largest tensors by their modules' names."""
    model = network()
    saver = compress_activations(model)
    run(model, saver, 64)
    report = saver.report()
    text = str(report)
    assert f"saved for backward without compression: {report.raw_bytes / 1e6:.1f} MB" in text
    assert f"{report.ratio:.2f} times less" in text
    assert "1 64x8x32x32" in text
    assert "?" not in text
    assert len(text.splitlines()) <= 17
    assert all(row.label for row in report.rows)
    assert saver.ledger.peak_bytes < report.stored_bytes


def test_a_saver_inside_of_a_checkpointed_region():
    """The block runs again when the region is recomputed; nothing is counted twice or leaks."""
    model = network()
    images, labels = batch()
    plain = expected(model)
    saver = saver_of(model, 0.02, min_bytes=1024)
    model.zero_grad()

    def region(values):
        with saver:
            return model(values)

    out = checkpoint(region, images.requires_grad_(), use_reentrant=False)
    functional.cross_entropy(out, labels).backward()
    del out
    gc.collect()
    assert max(errors(plain, gradients(model))) < 0.05
    assert saver.ledger.live_bytes == 0
