"""Bounds, and the formula that predicts the noise of a gradient."""

import math

import pytest
import torch
from torch.nn import functional

from pcrshard.activation.noise_bound import (
    Absolute,
    GradientNoise,
    Profile,
    RelativeStd,
    deviation,
    noise_per_bound,
    noise_per_bound_in_paper,
    valid_share,
)


def test_the_formula_predicts_the_noise_of_a_convolution():
    """Uniform errors where inputs are not zero: the gradient's error has this sigma."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 6, 12, 12, generator=generator).relu()
    weight = torch.zeros(8, 6, 3, 3)
    grads = torch.randn(4, 8, 12, 12, generator=generator)
    errors = (torch.rand(values.shape, generator=generator) * 2 - 1) * 0.1 * (values != 0)
    noise = torch.nn.grad.conv2d_weight(errors, weight.shape, grads, padding=1)
    shape = {"kernel": [3, 3], "stride": [1, 1], "dilation": [1, 1], "padding": [1, 1]}
    profile = Profile(
        float((values != 0).float().mean()),
        valid_share([12, 12], [12, 12], **shape),
        num_outputs=8,
        batch_size=4,
        energy=float(grads.square().sum()),
        mean_absolute=float(grads.abs().mean()),
    )
    assert 0.1 * noise_per_bound(profile) == pytest.approx(float(noise.std()), rel=0.1)
    half = noise_per_bound(profile, "stochastic") ** 2 / noise_per_bound(profile) ** 2
    assert half == pytest.approx(0.5)
    share = profile.nonzero_share
    paper = 0.32 * profile.mean_absolute * math.sqrt(4 * share)
    assert noise_per_bound_in_paper(profile) == pytest.approx(paper)


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "dilation", "padding"),
    [(7, 3, 1, 1, 1), (8, 3, 2, 1, 1), (9, 5, 1, 2, 4), (6, 1, 1, 1, 0), (7, 7, 2, 1, 3)],
)
def test_the_valid_share_counts_pairs(size, kernel, stride, dilation, padding):
    """Against a convolution of ones: how many inputs each output sees."""
    ones = torch.ones(1, 1, size)
    seen = functional.conv1d(
        ones, torch.ones(1, 1, kernel), stride=stride, dilation=dilation, padding=padding
    )
    expected = float(seen.sum()) / (kernel * seen.numel())
    share = valid_share([size], [seen.numel()], [kernel], [stride], [dilation], [padding])
    assert share == pytest.approx(expected)


def test_profiles_are_due_early_and_then_rarely():
    """At 0, 1, 2, 4, ... and then every W steps."""
    due = [step for step in range(2001) if GradientNoise(every=1000).is_due(step)]
    assert due == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000]


def test_settings_are_checked():
    """Each with its message."""
    for make in (RelativeStd, Absolute, GradientNoise):
        with pytest.raises(ValueError, match="above 0"):
            make(-1.0)
    with pytest.raises(ValueError, match="1 or more steps"):
        GradientNoise(every=0)
    with pytest.raises(ValueError, match="'exact' or 'paper'"):
        GradientNoise(mode="literal")
    with pytest.raises(ValueError, match="least <= most"):
        GradientNoise(least=0.3, most=0.2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_sample_is_enough_for_the_deviation(dtype):
    """Within two per cent, for channels of different scale, and NaN set aside."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.linspace(0.1, 2, 64)[:, None, None]
    values = (torch.randn(8, 64, 64, 64, generator=generator) * scale).to(dtype).flatten()
    exact = float(values.double().std())
    assert deviation(values) == pytest.approx(exact, rel=0.02)
    values[7] = math.nan
    values[::1000] = math.inf
    assert deviation(values) == pytest.approx(exact, rel=0.02)


def test_the_deviation_of_odd_tensors():
    """Constant in the sample only, constant, empty, all NaN."""
    values = torch.zeros(1_000_000)
    assert deviation(values) == 0
    values[::3001] = 1
    assert deviation(values) > 0
    assert math.isnan(deviation(torch.empty(0)))
    assert math.isnan(deviation(torch.full((5,), math.nan)))
