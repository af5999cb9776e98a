"""The bounds of the next steps from what a profiled step has told."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .noise_bound import GradientNoise, Profile, noise_per_bound, noise_per_bound_in_paper
from .stored import Row
from .trace import convolutions


@dataclasses.dataclass(frozen=True)
class Site:
    """A bound for the tensor that is saved at a position, as long as it looks the same."""

    error_bound: float
    shape: tuple[int, ...]
    dtype: torch.dtype


class AdaptiveBounds:
    """Error bounds by position in the order of saved tensors.

    Args:
        settings: What noise is allowed.
        rounding: Of the quantiser.
    """

    def __init__(self, settings: GradientNoise, rounding: str) -> None:
        self.settings = settings
        self._rounding = rounding
        self._sites: dict[int, Site] = {}

    def bound(self, ordinal: int, row: Row, deviation: float) -> float:
        """The bound of a tensor whose elements have this standard deviation.

        The batch may have another size than the profiled one: the last of an epoch is short. Its
        bound is kept; a tensor of another kind gets the fallback.
        """
        settings = self.settings
        site = self._sites.get(ordinal)
        if site is None or not _alike(site, row):
            return settings.fallback * deviation
        return min(max(site.error_bound, settings.least * deviation), settings.most * deviation)

    def update(
        self,
        profiles: dict[str, Profile],
        rows: list[Row],
        momentum: Callable[[str], float | None],
        scale: float = 1.0,
    ) -> None:
        """Sets the bounds anew; an input that several convolutions share gets the smallest.

        Args:
            profiles: Of a step, by convolution.
            rows: The tensors that it saved, by position.
            momentum: The mean absolute momentum of a convolution's weight, ``None`` if unknown.
            scale: What output gradients are to be divided by: the gradient scaler's factor, and
                the root of the number of accumulated backward passes multiplied in its place.
        """
        self._sites.clear()
        for name, profile in profiles.items():
            mean = momentum(name)
            error_bound = None if mean is None else self._error_bound(profile, mean, scale)
            if error_bound is None:
                continue
            for ordinal in profile.ordinals:
                row = rows[ordinal]
                known = self._sites.get(ordinal)
                least = error_bound if known is None else min(error_bound, known.error_bound)
                self._sites[ordinal] = Site(least, row.shape, row.dtype)

    def _error_bound(self, profile: Profile, mean: float, scale: float) -> float | None:
        if self.settings.mode == "paper":
            noise = noise_per_bound_in_paper(profile)
        else:
            noise = noise_per_bound(profile, self._rounding)
        sigma = self.settings.share * mean * scale
        if not (noise > 0 and sigma > 0 and math.isfinite(sigma / noise)):
            return None
        return sigma / noise


def _alike(site: Site, row: Row) -> bool:
    return site.dtype == row.dtype and site.shape[1:] == row.shape[1:]


def mean_momentum(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> Callable[[str], float | None]:
    """How to find the mean |momentum| of a convolution's weight, or of its gradient if it has none.

    SGD's buffer is taken as it is, an undamped sum; Adam's is its first moment.
    """
    modules = convolutions(model)

    def mean(name: str) -> float | None:
        weight = modules[name].weight
        assert isinstance(weight, Tensor)
        state = {} if optimizer is None else optimizer.state.get(weight, {})
        for key in ("momentum_buffer", "exp_avg"):
            if isinstance(state.get(key), Tensor):
                return _mean_absolute(state[key])
        return None if weight.grad is None else _mean_absolute(weight.grad)

    return mean


def _mean_absolute(tensor: Tensor) -> float:
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor: this rank's part
    return float(local.detach().abs().float().mean()) if local.numel() else 0.0
