"""What must never be changed: parameters, buffers, copies of weights, inputs without gradient."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

# Steps from a saved tensor to the parameter that it is a view or a copy of. Autocast's copies of
# the weights come by ToCopyBackward, a linear layer's transposed weight by TBackward.
_VIEWS = {
    "AliasBackward", "AsStridedBackward", "CloneBackward", "ExpandBackward", "PermuteBackward",
    "ReshapeAliasBackward", "SelectBackward", "SliceBackward", "SqueezeBackward", "TBackward",
    "ToCopyBackward", "TransposeBackward", "UnsafeViewBackward", "UnsqueezeBackward",
    "ViewBackward",
}  # fmt: skip
# Results whose own backward divides by them or compares their small differences.
_SENSITIVE = {
    "ExpBackward", "LogSoftmaxBackward", "ReciprocalBackward", "RsqrtBackward", "SoftmaxBackward",
    "SqrtBackward",
}  # fmt: skip


def storage_id(tensor: Tensor) -> int:
    """A name of the tensor's storage, unique while a weak reference to it is held."""
    return int(tensor.untyped_storage()._cdata)


def parameter_storages(model: nn.Module) -> set[int]:
    """The storages of a model's parameters and buffers."""
    storages = set()
    for tensor in (*model.parameters(), *model.buffers()):
        if is_lazy(tensor):
            continue  # of a lazy module; it has no memory yet
        local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        if local.layout == torch.strided and local.device.type != "meta":
            storages.add(storage_id(local))
    return storages


def _kind(node: Any) -> str:
    name: str = node.name()
    return name.rstrip("0123456789")


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a leaf of the graph, or a view or a cast of one."""
    node = tensor.grad_fn
    if node is None:
        return tensor.requires_grad
    while node is not None and _kind(node) in _VIEWS:
        node = node.next_functions[0][0]
    return node is not None and _kind(node).endswith("AccumulateGrad")


def is_sensitive(tensor: Tensor) -> bool:
    """Whether it is the result of an operation whose backward needs it exactly."""
    return tensor.grad_fn is not None and _kind(tensor.grad_fn) in _SENSITIVE


def is_compiled(model: nn.Module) -> bool:
    """Whether a module of the model was given to ``torch.compile``."""
    for module in model.modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            return True
    return False


def inside_compiled_call() -> bool:
    """Whether the caller was called by code that ``torch.compile`` made."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if "_functorch" in file and "aot" in file:
            return True
        frame = frame.f_back
    return False
