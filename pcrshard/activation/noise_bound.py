"""How large errors may be, by the noise of the gradient: the paper's adaptive bound.

A convolution's weight gradient is a sum of products of inputs and output gradients L. An error of
the inputs, uniform within the bound and absent where they are zero, makes it a normal deviate with

    sigma = eb * sqrt(R * V * sum(L^2) / (3 K))

where R is the share of inputs that are not zero, K the number of output channels, and V the share
of (kernel tap, output position) pairs that lie inside of the input. This is Eq. 6 and 7 of Jin et
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
    """The adaptive bound of the paper's section 4: noise in proportion to the momentum.

    Tensors that no profiled convolution reads, and steps without momentum, get 5 % of the standard
    deviation.

    Attributes:
        fraction: Sigma of a layer's gradient error over the mean absolute momentum.
        every: Steps between profiles (the paper's W); the first are at 0, 1, 2, 4, 8, ...
    """

    fraction: float = 0.01
    every: int = 1000

    def __post_init__(self) -> None:
        check_fraction("fraction", self.fraction)
        if self.every < 1:
            raise ValueError(f"expected a profile every 1 or more steps, got {self.every}")

    def is_due(self, step: int) -> bool:
        """Whether a step is to be profiled.

        >>> [step for step in range(50) if GradientNoise(every=20).is_due(step)]
        [0, 1, 2, 4, 8, 16, 20, 40]
        """
        early = step < self.every and step & (step - 1) == 0
        return early or step % self.every == 0

    def noise_per_bound(self, profile: Profile, rounding: str) -> float:
        """Sigma of the weight gradient's error for an error bound of 1; :func:`noise_per_bound`."""
        return noise_per_bound(profile, rounding)


@dataclasses.dataclass
class Profile:
    """The measurements of one convolution in a profiled step.

    Attributes:
        nonzero_share: R, of its input.
        valid_share: V.
        num_outputs: K.
        batch_size: N.
        energy: Sum of the squared gradients of its output.
        mean_absolute: Mean of their absolute values, the paper's average loss.
        ordinals: Positions of its inputs in the order of saved tensors.
    """

    nonzero_share: float
    valid_share: float
    num_outputs: int
    batch_size: int
    energy: float = 0.0
    mean_absolute: float = 0.0
    ordinals: list[int] = dataclasses.field(default_factory=list)


def noise_per_bound(profile: Profile, rounding: str = "nearest") -> float:
    """Sigma of the weight gradient's error for an error bound of 1.

    Stochastic rounding has half of the variance within the same bound.
    """
    variance = profile.nonzero_share * profile.valid_share * profile.energy / 3
    if rounding == "stochastic":
        variance /= 2
    return math.sqrt(variance / profile.num_outputs)
