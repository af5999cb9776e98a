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

import dataclasses
import math

from ..errorbound import check_fraction


@dataclasses.dataclass(frozen=True)
class GradientNoise:
    """The adaptive bound of section 4 of the paper: noise proportional to the momentum.

    Tensors that no profiled convolution reads, and all tensors in steps without momentum, get 5 %
    of their standard deviation.

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

    def noise_per_bound(self, profile: Profile, rounding: str) -> float:
        """Return the gradient noise per unit of error bound; see :func:`noise_per_bound`."""
        return noise_per_bound(profile, rounding)


@dataclasses.dataclass
class Profile:
    """The measurements of one convolution in a profiled step.

    Attributes:
        nonzero_share: R, the fraction of nonzero inputs.
        valid_share: V, the fraction of kernel taps inside the input.
        num_outputs: K, the number of output channels.
        batch_size: N, the batch size.
        energy: Sum of the squared output gradients.
        mean_absolute: Mean absolute output gradient, the paper's average loss.
        ordinals: Positions of the inputs in the order of saved tensors.
    """

    nonzero_share: float
    valid_share: float
    num_outputs: int
    batch_size: int
    energy: float = 0.0
    mean_absolute: float = 0.0
    ordinals: list[int] = dataclasses.field(default_factory=list)


def noise_per_bound(profile: Profile, rounding: str = "nearest") -> float:
    """Return sigma of the weight gradient's error for an error bound of 1.

    Stochastic rounding has half the variance within the same bound.
    """
    variance = profile.nonzero_share * profile.valid_share * profile.energy / 3
    if rounding == "stochastic":
        variance /= 2
    return math.sqrt(variance / profile.num_outputs)
