"""Which operations the nodes of autograd's graph stand for."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

# Of a leaf.
LEAF = "torch::autograd::accumulategrad"
# Operations whose results have no values of their own.
VIEWS = {
    "alias", "asstrided", "clone", "convertelementtype", "detach", "expand", "permute", "reshape",
    "reshapealias", "select", "slice", "split", "splitwithsizes", "squeeze", "t", "tocopy",
    "transpose", "unbind", "unsafeview", "unsqueeze", "view",
}  # fmt: skip
# Those of them that keep the order of elements.
_SAME_ORDER = {"alias", "detach", "reshapealias", "tocopy", "unsafeview", "view"}


def canonical(name: str) -> str:
    """Return the name that eager and compiled code share for an operation.

    >>> canonical("ToCopy") == canonical("_to_copy")
    True
    """
    return name.replace("_", "").lower()


def operation(node: Any) -> str:
    """Return the canonical operation of a graph node, such as ``relu``; ``""`` without a node."""
    return "" if node is None else _named(node.name())


@functools.cache
def _named(name: str) -> str:
    return canonical(name.rstrip("0123456789").removesuffix("Backward"))


def producer(tensor: Tensor) -> Any:
    """Return the graph node that computed a tensor's values: views and casts have no own values.

    Autocast casts weights; a linear layer transposes its weight. It is ``None`` without a graph.
    """
    return _behind(tensor.grad_fn, VIEWS)


def source_of(tensor: Tensor) -> Any:
    """Return the node that computed the elements in the order that they have in memory."""
    node = tensor.grad_fn
    if operation(node) in _SAME_ORDER and not tensor.is_contiguous():
        return None
    return _behind(node, _SAME_ORDER)


def _behind(node: Any, views: set[str]) -> Any:
    while operation(node) in views:
        node = node.next_functions[0][0]
    return node


def storage_of(tensor: Tensor) -> StorageWeakRef:
    """Return a weak reference to a tensor's storage, which is equal for the same storage only."""
    # torch does not annotate it.
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
