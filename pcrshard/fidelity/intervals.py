"""95 % confidence intervals of means, fractions, and paired differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

Interval = tuple[float, float]
# Quantiles 0.975 of Student's t distribution for 1, 2, ... degrees of freedom.
_T975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)
_NORMAL975 = 1.96


def confidence(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of some cosines and its 95 % confidence interval by Student's t.

    A single value has no interval. If a cosine is NaN because the model has diverged, the mean is 0
    and the bounds are -1 and 1.

    >>> confidence([0.9, 0.9, 0.9])
    (0.9, 0.9, 0.9)
    """
    if not all(map(math.isfinite, values)):
        return 0.0, -1.0, 1.0
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, mean, mean
    quantile = [*_T975, _NORMAL975][min(len(values) - 2, len(_T975))]
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def of_fraction(count: int, total: int) -> Interval:
    """Return Wilson's interval of a fraction.

    >>> [round(bound, 3) for bound in of_fraction(330, 600)]
    [0.51, 0.589]
    """
    square = _NORMAL975**2
    middle = (count + square / 2) / (total + square)
    spread = count * (total - count) / total + square / 4
    half = _NORMAL975 * math.sqrt(spread) / (total + square)
    return middle - half, middle + half


def of_change(gained: int, lost: int, total: int) -> Interval:
    """Return the interval of a change of accuracy on the same images (Agresti and Min, 2005).

    Args:
        gained: Images that only the second answer classifies correctly.
        lost: Images that only the first answer classifies correctly.
        total: All images.

    >>> [round(bound, 3) for bound in of_change(30, 36, 600)]
    [-0.037, 0.017]
    """
    number = total + 2
    change = (gained - lost) / number
    half = _NORMAL975 * math.sqrt((gained + lost + 1) / number - change**2) / math.sqrt(number)
    return change - half, change + half
