"""The paper's adaptive error bound, derived from the noise that it causes in gradients.

A convolution's weight gradient is a sum of products of inputs and output gradients L. If the input
error is uniform within the bound and zero for zero inputs, the gradient's error is normal with

    sigma = eb * sqrt(R * V * sum(L^2) / (3 K))

where R is the fraction of nonzero inputs, K the number of output channels, and V the fraction of
(kernel tap, output position) pairs that lie inside the input. This is Eq. 6 and 7 of Jin et
al. (PPoPP 2021) with its average loss taken as the root mean square over samples of the L2 norm of
L, and a = 1 / sqrt(3). Read literally, with the mean of |L|, Eq. 9 gives bounds that are 13 to 355
times too large.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errorbound import check_fraction
from .report import Layer, Row

# The largest adaptive bound, as a fraction of a tensor's standard deviation.
LARGEST_FRACTION = 0.25
CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GradientNoise:
    """The adaptive bound of section 4 of the paper: noise proportional to the momentum.

    A bound is at most a quarter of the tensor's standard deviation. Tensors that no profiled
    convolution reads, and all tensors in steps without momentum, get 5 % of theirs.

    Attributes:
        fraction: Sigma of a layer's gradient error relative to the mean absolute momentum.
        every: Steps between profiles (the paper's W); the first profiles are at 0, 1, 2, 4, 8, ...
    """

    fraction: float = 0.01
    every: int = 1000

    def __post_init__(self) -> None:
        check_fraction("fraction", self.fraction)
        if self.every < 1:
            raise ValueError(f"expected a profile every 1 or more steps, got {self.every}")

    def is_due(self, step: int) -> bool:
        """Return whether to profile a step.

        >>> [step for step in range(50) if GradientNoise(every=20).is_due(step)]
        [0, 1, 2, 4, 8, 16, 20, 40]
        """
        early = step < self.every and step & (step - 1) == 0
        return early or step % self.every == 0

    @staticmethod
    def noise_per_bound(profile: Profile) -> float:
        """Return sigma of the weight gradient's error for an error bound of 1."""
        share = profile.nonzero_fraction * profile.valid_fraction
        return math.sqrt(profile.variance * share * profile.energy / profile.num_outputs)

    def bounds(
        self,
        profiles: Mapping[str, Profile],
        rows: Iterable[Row],
        momentum: Mapping[str, float],
    ) -> dict[object, float]:
        """Return error bounds by the identities of tensors.

        An input shared by several convolutions gets the smallest bound.

        Args:
            profiles: Profiles of one step, by convolution.
            rows: The tensors saved in that step.
            momentum: The mean absolute momentum of the weights, by convolution.
        """
        found: dict[object, float] = {}
        for row in rows:
            for name in profiles.keys() & row.read_by:
                noise = self.noise_per_bound(profiles[name])
                sigma = self.fraction * momentum.get(name, 0.0)
                if noise > 0 and 0 < sigma / noise < math.inf:
                    found[row.identity] = min(sigma / noise, found.get(row.identity, math.inf))
        return found


@dataclasses.dataclass
class Profile:
    """The measurements of one convolution in a profiled step.

    Attributes:
        nonzero_fraction: R, the fraction of nonzero inputs.
        valid_fraction: V, the fraction of kernel taps inside the input.
        num_outputs: K, the number of output channels.
        batch_size: N, the batch size.
        variance: Variance of an input's error for an error bound of 1.
        energy: Sum of the squared output gradients, complete after the backward pass.
        mean_absolute: Mean absolute output gradient, the paper's average loss.
    """

    nonzero_fraction: float
    valid_fraction: float
    num_outputs: int
    batch_size: int
    variance: float
    energy: float = 0.0
    mean_absolute: float = 0.0

    @torch.no_grad()
    def add_gradient(self, gradient: Tensor) -> None:
        """Add the gradient of the convolution's output."""
        exact = gradient.detach().float()
        self.energy += float(exact.square().sum())
        self.mean_absolute = float(exact.abs().mean())


def layers(profiles: Mapping[str, Profile], rows: Iterable[Row]) -> tuple[Layer, ...]:
    """Return the predicted noise of the convolutions that received a gradient."""
    found = []
    for name, profile in profiles.items():
        bounds = [row.error_bound for row in rows if name in row.read_by]
        if profile.energy > 0 and bounds:
            noise = GradientNoise.noise_per_bound(profile)
            found.append(Layer(name, max(bounds), max(bounds) * noise))
    return tuple(found)


def convolutions(model: nn.Module) -> dict[str, Any]:
    """Return the convolutions of a model by name."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, CONVOLUTIONS)
    }


@contextlib.contextmanager
def profile_convolutions(
    model: nn.Module, profiles: dict[str, Profile], variance: float
) -> Iterator[None]:
    """Profile the convolutions of a forward pass, and of its backward pass.

    Args:
        model: The model.
        profiles: Receives the profiles, by name.
        variance: See :class:`Profile`.
    """

    @torch.no_grad()
    def profile(name: str, module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not output.requires_grad:
            return
        values = inputs[0]
        nonzero_fraction = int(values.count_nonzero()) / max(values.numel(), 1)
        valid_fraction = _valid_fraction(module, values, output)
        # A convolution may run more than once.
        sizes = module.out_channels, values.shape[0]
        found = profiles.setdefault(
            name, Profile(nonzero_fraction, valid_fraction, *sizes, variance)
        )
        # torch does not annotate register_hook.
        output.register_hook(found.add_gradient)  # type: ignore[no-untyped-call]

    with contextlib.ExitStack() as handles:
        for name, module in convolutions(model).items():
            hook = functools.partial(profile, name)
            handles.enter_context(module.register_forward_hook(hook))
        yield


def _valid_fraction(module: Any, values: Tensor, output: Tensor) -> float:
    """Return V, the fraction of (kernel tap, output) pairs that read an input, not padding.

    For a transposed convolution, V is the fraction of outputs that a tap reaches.
    """
    if module.padding_mode != "zeros":
        return 1.0
    dims = len(module.kernel_size)
    convolve = getattr(nn.functional, f"conv{dims}d")
    # Convolved ones count the pairs; autocast does not round float64.
    large = output if module.transposed else values
    ones = torch.ones(1, 1, *large.shape[-dims:], dtype=torch.float64)
    taps = torch.ones(1, 1, *module.kernel_size, dtype=torch.float64)
    pairs = convolve(ones, taps, None, module.stride, module.padding, module.dilation)
    return float(pairs.sum()) / (taps.numel() * output.shape[-dims:].numel())


def mean_momentum(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, scale: float
) -> dict[str, float]:
    """Return ``scale`` times the mean |momentum| of each convolution's weight.

    For SGD, momentum is the momentum buffer, an undamped sum; for Adam, the first moment; without
    momentum, the gradient.
    """
    means = {}
    for name, module in convolutions(model).items():
        state = {} if optimizer is None else optimizer.state.get(module.weight, {})
        known = state.get("momentum_buffer")
        if known is None:  # as SGD without momentum stores it
            known = state.get("exp_avg", module.weight.grad)
        if known is not None:
            local = getattr(known, "_local_tensor", known)  # of a DTensor: this rank's part
            means[name] = scale * float(local.detach().abs().float().mean())
    return means
