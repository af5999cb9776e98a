"""What operations do with the tensors that they save for backward.

A tensor may be inexact only if each operation that saved it is known to tolerate that: the gradient
is linear in the tensor, or smooth at the scale of its deviation, or depends on its sign only. What
backward divides by, takes powers or logarithms of, compares, or what an unknown operation saves,
stays exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_PRODUCTS = {
    "addmm": ("mat1", "mat2"),
    "addmv": ("mat", "vec"),
    "addcmul": ("tensor1", "tensor2"),
    "addr": ("vec1", "vec2"),
    "baddbmm": ("batch1", "batch2"),
    "addbmm": ("batch1", "batch2"),
    "bmm": ("self", "mat2"),
    "mm": ("self", "mat2"),
    "mv": ("self", "vec"),
    "dot": ("self", "tensor"),
    "groupedmm": ("self", "mat2"),
    "linear": ("input", "weight"),
    "mkldnnlinear": ("input", "weight"),
    "mul": ("self", "other"),
    "div": ("self",),
    "convolution": ("input", "weight"),
    "convolutionoverrideable": ("input", "weight"),
    "pow": ("self",),  # squares only
    "linalgvectornorm": ("self",),  # of order 2 only
    "var": ("self",),
    "std": ("self",),
    "mkldnnrnnlayer": ("input",),
    "cudnnrnn": ("input",),
    "gridsampler2d": ("input",),
    "gridsampler3d": ("input",),
}
_ROW_NORMS = ("nativelayernorm", "fusedrmsnorm")
_CHANNEL_NORMS = ("nativebatchnorm", "cudnnbatchnorm", "miopenbatchnorm", "nativegroupnorm")
_NORMALIZATIONS = dict.fromkeys((*_ROW_NORMS, *_CHANNEL_NORMS), ("input",))
# For hardtanh, clamp and others that compare their argument with a limit, only their results, in
# place, are tolerated: there the limits are extremes, which are exact.
_ACTIVATIONS = {
    "relu": ("result",),
    "leakyrelu": ("self", "result"),
    "rrelu": (),
    "hardtanh": ("result",),
    "gelu": ("self",),
    "silu": ("self",),
    "mish": ("self",),
    "glu": ("self",),
    "elu": ("self", "selforresult", "result"),
    "celu": ("self",),
    "softplus": ("self",),
    "prelukernel": ("self",),
    "abs": ("self",),
}
# Their backward passes read only the shape, and indices.
_POOLS = {
    **{f"{kind}avgpool{dims}d": ("self",) for kind in ("", "adaptive") for dims in (1, 2, 3)},
    **{f"maxpool{dims}dwithindices": ("self", "result1") for dims in (2, 3)},
    **{f"adaptivemaxpool{dims}d": ("self", "result1") for dims in (2, 3)},
}
_ATTENTION = {
    f"scaleddotproduct{name}": ("query", "key", "value", "output", "result")
    for name in (
        "efficientattention", "flashattention", "flashattentionforcpu", "cudnnattention",
        "fusedattentionoverrideable",
    )
}  # fmt: skip
# Attributes of a node in which tolerated tensors are, by the canonical name of the operation.
TOLERANT = _PRODUCTS | _NORMALIZATIONS | _ACTIVATIONS | _POOLS | _ATTENTION
# Results close to their limits have gradients close to 0, which what follows may divide by as much:
# log(1 - sigmoid(x)). They may be inexact if they are factors or arguments of tolerant operations.
GATES = {"sigmoid", "tanh"}
# Operations that compare their argument with limits.
LIMITED = dict.fromkeys(
    ("hardtanh", "hardsigmoid", "threshold", "clamp", "clampmin", "clampmax"), ("self",)
)
# Functions in Python that do as much.
TOLERANT_FUNCTIONS = {
    "CheckpointFunction",
    "_NoopSaveInputs",
    "torch.utils.checkpoint",
    "SyncBatchNorm",
}


# A threshold is at most that many standard deviations away from the mean.
_FARTHEST = 4.0


class Norm(NamedTuple):
    """The statistics of a normalization, in shapes that broadcast to its input.

    With ``d = (x - mean) * rstd - threshold``, its result is ``d * gain + offset``.

    Attributes:
        mean: Mean of a channel, row, or group.
        rstd: Reciprocal of its standard deviation.
        threshold: Where a ReLU after it begins, so that the sign of d is the ReLU's mask.
        gain, offset: ``None`` if not known.
    """

    mean: Tensor
    rstd: Tensor
    threshold: Tensor | None = None
    gain: Tensor | None = None
    offset: Tensor | None = None

    def center(self) -> Tensor:
        """Return the x at which d is 0, as float32."""
        mean = self.mean.float()
        return mean if self.threshold is None else mean + self.threshold / self.rstd.float()


def tolerates(operation: str, node: Any, attribute: str) -> bool:
    """Return whether a node's backward tolerates an inexact attribute listed in ``TOLERANT``."""
    if operation == "pow":
        exponent = getattr(node, "_saved_exponent", None)
        return attribute == "self" and not isinstance(exponent, Tensor) and exponent == 2
    if operation == "linalgvectornorm":
        return attribute == "self" and bool(node._saved_ord == 2)
    return attribute in TOLERANT.get(operation, ())


def norm_of(operation: str, node: Any, attribute: str, shape: Sequence[int]) -> Norm | None:
    """Return the statistics by which a node normalizes a saved tensor; ``None`` if it does not.

    A product with a reciprocal root is an RMSNorm that is written out.
    """
    if operation == "mul":
        return _rms_norm_of(node.next_functions[attribute == "self"][0], shape)
    if attribute != "input":
        return None
    if operation in _ROW_NORMS:
        return _row_norm_of(operation, node, shape)
    return _channel_norm_of(operation, node, shape) if operation in _CHANNEL_NORMS else None


def _rms_norm_of(factor: Any, shape: Sequence[int]) -> Norm | None:
    if factor is None or not factor.name().startswith("Rsqrt"):
        return None
    rstd = factor._saved_result.detach()
    if rstd.dim() != len(shape) or rstd.shape[-1] != 1 or rstd.shape[:-1] != shape[:-1]:
        return None
    one = rstd.new_ones((1,) * len(shape))
    return Norm(torch.zeros_like(rstd), rstd, None, one, 0 * one)


def _row_norm_of(operation: str, node: Any, shape: Sequence[int]) -> Norm:
    aligned = (1,) * (len(shape) - len(node._saved_normalized_shape))
    lines = (x if x is None else x.view(*aligned, *x.shape) for x in _lines(operation, node))
    if operation == "nativelayernorm":
        return Norm(node._saved_result1.detach(), node._saved_result2.detach(), None, *lines)
    rstd = node._saved_result1.detach()
    return Norm(torch.zeros_like(rstd), rstd, None, *lines)


def _channel_norm_of(operation: str, node: Any, shape: Sequence[int]) -> Norm | None:
    mean, rstd = node._saved_result1, node._saved_result2
    if mean is None or mean.numel() == 0:  # BatchNorm by running statistics
        return None
    places = (1,) * (len(shape) - 2)
    gain, offset = (x if x is None else x.view(1, -1, *places) for x in _lines(operation, node))
    if operation == "nativegroupnorm":
        each = shape[1] // mean.shape[1]
        mean, rstd = (
            x.detach().repeat_interleave(each, 1).view(*shape[:2], *places) for x in (mean, rstd)
        )
        return Norm(mean, rstd, None, gain, offset)
    mean, rstd = (x.detach().view(1, -1, *places) for x in (mean, rstd))
    if gain is None or offset is None:
        return Norm(mean, rstd)
    threshold = (-offset / gain).nan_to_num(0).clamp(-_FARTHEST, _FARTHEST)
    is_exact = (threshold.abs() < _FARTHEST) & (gain != 0)
    rest = torch.where(is_exact, torch.zeros_like(offset), threshold * gain + offset)
    return Norm(mean, rstd, threshold, gain, rest)


def _lines(operation: str, node: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return copies of a normalization's weight and bias, in float32; ``None`` if not known."""
    weight = node._saved_weight
    if operation == "fusedrmsnorm":
        return None if weight is None else weight.detach().float().clone(), None
    if weight is None:
        return None, None
    if operation == "nativelayernorm":
        bias = node._saved_bias
    else:
        bias = getattr(node.next_functions[2][0], "variable", None)
    if bias is None:  # frozen, or computed
        return None, None
    return weight.detach().float().clone(), bias.detach().float().clone()


def sides_of(operation: str, node: Any, tensor: Tensor) -> tuple[Tensor, float, float] | None:
    """Return where a tensor lies within the limits that backward compares it with.

    Returns:
        A boolean for each element, and a value that stands for those inside and one for those
        outside; ``None`` for other operations.
    """
    if operation in ("hardtanh", "hardsigmoid"):
        is_tanh = operation == "hardtanh"
        low, high = (node._saved_min_val, node._saved_max_val) if is_tanh else (-3.0, 3.0)
        return (tensor > low) & (tensor < high), (low + high) / 2, low
    if operation == "threshold":
        limit = node._saved_threshold
        return tensor > limit, limit + abs(limit) + 1, limit
    if operation not in ("clamp", "clampmin", "clampmax"):
        return None
    least, most = (getattr(node, f"_saved_{name}", None) for name in ("min", "max"))
    if isinstance(least, Tensor) or isinstance(most, Tensor):
        return None
    low, high = (-math.inf if least is None else least), (math.inf if most is None else most)
    inside = (tensor >= low) & (tensor <= high)
    if low > -math.inf:
        return inside, low, low - abs(low) - 1
    return inside, high, high + abs(high) + 1
