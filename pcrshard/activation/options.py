"""Options of ``compress_activations`` besides the bound and the codec."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class ActivationOptions:
    """Options that select which saved tensors to compress, and how.

    Attributes:
        min_bytes: Tensors smaller than this are kept exactly.
        min_dims: Floats of fewer dimensions, such as logits and features of linear layers, are kept
            exactly. Tokens count as three-dimensional.
        inputs: Whether to compress floats without gradient as well. The paper does so with images;
            this saves memory only if nothing else references them.
        derive: Whether to keep nothing of results that can be computed from other saved tensors:
            of ReLU after BatchNorm, normalizations of rows, GELU and SiLU. The bound of such a
            result is that of its source times the slope of the operation.
        recompute: Whether to keep nothing of the results of 1x1 convolutions with more outputs than
            inputs that a normalization saves, and to compute them again in the backward pass. Their
            error is that of the convolution's input, with no bound for an element.
        rounding: ``nearest``, or ``stochastic``, which is unbiased and slower on a CPU. It leaves
            the global random generators alone.

    Raises:
        ValueError: The rounding is unknown.
    """

    min_bytes: int = 16_384
    min_dims: int = 3
    inputs: bool = False
    derive: bool = True
    recompute: bool = False
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"expected rounding nearest or stochastic, got {self.rounding!r}")
