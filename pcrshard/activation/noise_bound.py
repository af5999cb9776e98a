"""How large the error may be: relative to a tensor, absolute, or by the noise of the gradient.

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
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

# Eq. 6's coefficient, as the paper has measured it (section 5.2).
PAPER_COEFFICIENT = 0.32
# The sample of deviation: so many runs of so many neighbours.
_ROW = 64
_ROWS = 512


@dataclasses.dataclass(frozen=True)
class RelativeStd:
    """A share of the tensor's standard deviation.

    Attributes:
        share: Such as 0.05.
    """

    share: float = 0.05

    def __post_init__(self) -> None:
        """Refuses what is no share."""
        _check_positive(self.share, "a share of the standard deviation")


@dataclasses.dataclass(frozen=True)
class Absolute:
    """The same bound for every tensor.

    Attributes:
        error_bound: Largest absolute error of an element.
    """

    error_bound: float

    def __post_init__(self) -> None:
        """Refuses what is no bound."""
        _check_positive(self.error_bound, "an error bound")


@dataclasses.dataclass(frozen=True)
class GradientNoise:
    """The adaptive bound of the paper's section 4: noise in proportion to the momentum.

    Attributes:
        share: Sigma of a layer's gradient error over the mean of its |momentum|.
        every: Steps between profiles (the paper's W); the first are at 0, 1, 2, 4, 8, ...
        mode: ``exact`` is the formula above; ``paper`` is Eq. 9 as it is printed, for comparison.
        fallback: Share of the standard deviation where nothing else is known: tensors that are no
            input of a convolution, no momentum yet, another graph than the profile's.
        least: Smallest bound, as a share of the standard deviation.
        most: Largest bound, as such a share.
    """

    share: float = 0.01
    every: int = 1000
    mode: Literal["exact", "paper"] = "exact"
    fallback: float = 0.05
    least: float = 1e-4
    most: float = 0.25

    def __post_init__(self) -> None:
        """Refuses settings that mean nothing."""
        _check_positive(self.share, "a share of the momentum")
        _check_positive(self.fallback, "a share of the standard deviation")
        if self.every < 1:
            raise ValueError(f"expected a profile every 1 or more steps, got {self.every}")
        if self.mode not in ("exact", "paper"):
            raise ValueError(f"expected mode 'exact' or 'paper', got {self.mode!r}")
        if not 0 < self.least <= self.most:
            raise ValueError(f"expected 0 < least <= most, got {self.least} and {self.most}")

    def is_due(self, step: int) -> bool:
        """Whether a step is to be profiled.

        >>> [step for step in range(50) if GradientNoise(every=20).is_due(step)]
        [0, 1, 2, 4, 8, 16, 20, 40]
        """
        early = step < self.every and step & (step - 1) == 0
        return early or step % self.every == 0


Bound = RelativeStd | Absolute | GradientNoise


def _check_positive(value: float, what: str) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"expected {what} above 0, got {value!r}")


@dataclasses.dataclass
class Profile:
    """What a step tells about a convolution.

    Attributes:
        nonzero_share: R, of its input.
        valid_share: V, see :func:`valid_share`.
        num_outputs: K.
        batch_size: N.
        energy: Sum of the squared gradients of its output.
        mean_absolute: Mean of their absolute values.
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


def noise_per_bound_in_paper(profile: Profile) -> float:
    """The same by Eq. 6 and 7 as they are printed: a * L * sqrt(N R)."""
    count = profile.batch_size * profile.nonzero_share
    return PAPER_COEFFICIENT * profile.mean_absolute * math.sqrt(count)


def valid_share(
    inputs: Sequence[int],
    outputs: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
) -> float:
    """V: the share of (tap, output) pairs of a convolution that see an input, not the padding.

    Each argument has one number a dimension; ``padding`` is that before the first element.

    >>> valid_share([8], [8], [1], [1], [1], [0])
    1.0
    >>> valid_share([2, 2], [2, 2], [3, 3], [1, 1], [1, 1], [1, 1]) == (4 / 6) ** 2
    True
    """
    share = 1.0
    for size, out, taps, step, spread, before in zip(
        inputs, outputs, kernel, stride, dilation, padding, strict=True
    ):
        inside = sum(
            0 <= position * step + tap * spread - before < size
            for tap in range(taps)
            for position in range(out)
        )
        share *= inside / (taps * out)
    return share


def deviation(flat: Tensor) -> float:
    """The standard deviation of the finite elements of (n,) floats.

    From 512 runs of 64 neighbours at an odd distance, which no channel size of a power of two
    shares: a hundredth of the reads of a large tensor, within a
    per cent of the deviation. From all elements where the sample is
    constant. NaN if there is no finite element. Waits for the device once.
    """
    sample = flat
    if flat.numel() > 2 * _ROW * _ROWS:
        rows = flat[: flat.numel() // _ROW * _ROW].view(-1, _ROW)
        sample = rows[:: (rows.shape[0] // _ROWS) | 1].reshape(-1)
    value = _of(sample)
    if value == 0 and sample is not flat:
        value = _of(flat)
    if math.isfinite(value):
        return value
    finite = flat[flat.isfinite()]
    return _of(finite) if finite.numel() else math.nan


def _of(values: Tensor) -> float:
    if values.numel() == 0:
        return math.nan
    exact = values if values.element_size() >= 4 else values.float()
    return float(exact.std(correction=0))
