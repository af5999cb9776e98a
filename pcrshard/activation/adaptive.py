"""Error bounds for the next steps, computed from one profiled step."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .noise_bound import GradientNoise, Profile
from .stored import Row
from .trace import convolutions

# Fractions of the standard deviation: the fallback, and the range of all bounds.
FALLBACK = 0.05
_LEAST = 1e-4
_MOST = 0.25


class AdaptiveBounds:
    """Error bounds by position in the order in which tensors are saved.

    Args:
        settings: The allowed noise.
        rounding: The quantizer's rounding mode.
    """

    def __init__(self, settings: GradientNoise, rounding: str) -> None:
        self._settings = settings
        self._rounding = rounding
        # By position: the bound and the tensor's row in the profiled step.
        self._bounds: dict[int, tuple[float, Row]] = {}

    def bound(self, ordinal: int, row: Row) -> float:
        """Return the bound for a saved tensor.

        The bound also applies if the batch size differs from the profiled one, as in the last batch
        of an epoch. A tensor of another kind gets the fallback.
        """
        error_bound, profiled = self._bounds.get(ordinal, (0.0, None))
        if profiled is None or (profiled.dtype, profiled.shape[1:]) != (row.dtype, row.shape[1:]):
            return FALLBACK * row.deviation
        return min(max(error_bound, _LEAST * row.deviation), _MOST * row.deviation)

    def update(
        self,
        profiles: dict[str, Profile],
        rows: list[Row],
        momentum: Callable[[str], float | None],
        scale: float = 1.0,
    ) -> None:
        """Recompute the bounds; an input shared by several convolutions gets the smallest.

        Args:
            profiles: Profiles of one step, by convolution.
            rows: The tensors saved in that step, by position.
            momentum: The mean absolute momentum of a convolution's weight, ``None`` if unknown.
            scale: The gradient scaler's factor over the root of the number of accumulated backward
                passes.
        """
        self._bounds.clear()
        for name, profile in profiles.items():
            noise = self._settings.noise_per_bound(profile, self._rounding)
            sigma = self._settings.fraction * scale * (momentum(name) or 0.0)
            if not (noise > 0 and sigma > 0 and math.isfinite(sigma / noise)):
                continue
            for ordinal in profile.ordinals:
                known, _ = self._bounds.get(ordinal, (math.inf, None))
                self._bounds[ordinal] = (min(sigma / noise, known), rows[ordinal])


def mean_momentum(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> Callable[[str], float | None]:
    """Return a function from a convolution's name to the mean |momentum| of its weight.

    For SGD, momentum is the momentum buffer, an undamped sum; for Adam, the first moment; without
    momentum, the gradient.
    """
    modules = convolutions(model)

    def mean(name: str) -> float | None:
        weight = modules[name].weight
        assert isinstance(weight, Tensor)
        state = {} if optimizer is None else optimizer.state.get(weight, {})
        found = [state.get("momentum_buffer"), state.get("exp_avg"), weight.grad]
        known = next((tensor for tensor in found if isinstance(tensor, Tensor)), None)
        if known is None:
            return None
        local = getattr(known, "_local_tensor", known)  # of a DTensor: this rank's part
        return float(local.detach().abs().float().mean()) if local.numel() else 0.0

    return mean
