"""The choices of ``compress_activations`` beyond the bound and the codec."""

from __future__ import annotations

import dataclasses

from .quantizer import Rounding


@dataclasses.dataclass(frozen=True)
class ActivationOptions:
    """Which saved tensors may be changed, and how.

    Attributes:
        min_bytes: Smaller tensors are exact.
        min_dims: Floats of fewer dimensions are exact: logits, features of linear layers. Tokens
            count as three-dimensional.
        inputs: Whether floats without gradient may be changed, too. The paper does so with images;
            memory is saved only where nothing else holds them.
        rounding: ``nearest``, or ``stochastic``, which is unbiased, and slower on a CPU.
        seed: Seed of stochastic rounding, which leaves the global generators alone.
        offload: Whether compressed tensors wait in host memory; for accelerators.

    Raises:
        ValueError: The rounding is unknown.
    """

    min_bytes: int = 16_384
    min_dims: int = 3
    inputs: bool = False
    rounding: Rounding = "nearest"
    seed: int = 0
    offload: bool = False

    def __post_init__(self) -> None:
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"expected rounding nearest or stochastic, got {self.rounding!r}")
