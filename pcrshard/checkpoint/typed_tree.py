"""Nested states as plain values and a list of tensors, and back with every type as it was.

A state is made of dict, OrderedDict, list, tuple, int, float, str, bytes, bool, None, tensors,
numpy arrays and numpy scalars. Nothing else: a checkpoint that is loaded must not execute
anything, and a value that cannot come back as it was must not be stored.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..errors import UnsupportedState
from .file_frame import require
from .tensors import NUMPY_TYPES, array_tensor, check_storable, snapshot

MAX_DEPTH = 100
_PLAIN = (type(None), bool, float, str, bytes)
_KEYS = (*_PLAIN, int)
_MAX_INTEGER_BYTES = 1 << 16
# First item of each list in a packed tree.
_DICT = "d"
_ORDERED = "o"
_LIST = "l"
_TUPLE = "t"
_INTEGER = "i"
_TENSOR = "x"
_ARRAY = "a"
_SCALAR = "s"
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")
_MOMENTS = ("exp_avg", "momentum_buffer", "exp_inf", "acc_delta", "grad_avg", "sum")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One tensor of a state.

    Attributes:
        path: Its keys, joined by dots; distinct in a state.
        tensor: A contiguous copy on the CPU.
        role: ``"weight"``, ``"optimizer"`` or ``"second-moment"``: which bound applies;
            ``"exact"`` for none.
    """

    path: str
    tensor: torch.Tensor
    role: str


@dataclasses.dataclass
class Flattened:
    """A state taken apart.

    Attributes:
        tree: Plain values; a tensor is the number of its leaf.
        leaves: The tensors; one that is in the state twice is here once.
    """

    tree: Any = None
    leaves: list[Leaf] = dataclasses.field(default_factory=list)


def flatten(state: Any) -> Flattened:
    """Take a state apart, and copy its tensors: what training may change later is safe then.

    Raises:
        UnsupportedState: A value is of another type; its path is named.
    """
    flattener = _Flattener()
    tree = flattener.pack(state, (), in_optimizer=False)
    return Flattened(tree, _copied(flattener.leaves))


def _copied(leaves: list[Leaf]) -> list[Leaf]:
    copies = snapshot([leaf.tensor for leaf in leaves])
    pairs = zip(leaves, copies, strict=True)
    return [dataclasses.replace(leaf, tensor=copy) for leaf, copy in pairs]


class _Flattener:
    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self._known: dict[Any, int] = {}
        self._paths: collections.Counter[str] = collections.Counter()

    def pack(
        self,
        value: Any,
        path: tuple[str, ...],
        *,
        in_optimizer: bool,
    ) -> Any:
        """A value as plain values."""
        kind = type(value)
        if len(path) > MAX_DEPTH:
            raise UnsupportedState(f"expected at most {MAX_DEPTH} levels", key=_joined(path))
        if kind in _PLAIN:
            return value
        if kind is int:
            return _pack_integer(value, path)
        if kind in (dict, collections.OrderedDict):
            return self._pack_dict(value, path, in_optimizer)
        if kind in (list, tuple, torch.Size):
            return self._pack_sequence(value, path, in_optimizer)
        return self._pack_values(value, path, in_optimizer)

    def _pack_values(
        self,
        value: Any,
        path: tuple[str, ...],
        in_optimizer: bool,
    ) -> list[Any]:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return [_TENSOR, self._leaf(value, path, in_optimizer)]
        if kind is np.ndarray:
            return [_ARRAY, self._array(value, path)]
        if isinstance(value, np.generic) and value.dtype.name in NUMPY_TYPES:
            return [_SCALAR, value.dtype.name, value.tobytes()]
        raise UnsupportedState(
            f"cannot store a {kind.__module__}.{kind.__name__}", key=_joined(path)
        )

    def _pack_dict(
        self,
        value: Any,
        path: tuple[str, ...],
        in_optimizer: bool,
    ) -> list[Any]:
        # The state of a torch.optim.Optimizer is known by its two keys.
        inside = in_optimizer or {"state", "param_groups"} <= value.keys()
        items = []
        for key, item in value.items():
            if type(key) not in _KEYS:
                where = _joined((*path, str(key)))
                raise UnsupportedState(f"cannot store a key of {type(key).__name__}", key=where)
            packed_key = _pack_integer(key, path) if type(key) is int else key
            items.append([packed_key, self.pack(item, (*path, str(key)), in_optimizer=inside)])
        if type(value) is dict:
            return [_DICT, items]
        # torch keeps the versions of modules in this attribute of a state_dict.
        extra = getattr(value, "_metadata", None)
        return [_ORDERED, items, self.pack(extra, (*path, "_metadata"), in_optimizer=False)]

    def _pack_sequence(
        self,
        value: Any,
        path: tuple[str, ...],
        in_optimizer: bool,
    ) -> list[Any]:
        tag = _LIST if type(value) is list else _TUPLE
        items = enumerate(value)
        return [
            tag, [self.pack(item, (*path, str(i)), in_optimizer=in_optimizer) for i, item in items]
        ]  # fmt: skip

    def _leaf(
        self,
        tensor: torch.Tensor,
        path: tuple[str, ...],
        in_optimizer: bool,
    ) -> int:
        joined = _joined(path)
        check_storable(tensor, joined)
        key = (
            tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.dtype,
            tensor.shape, tensor.stride(), tensor.device,
        )  # fmt: skip
        # Tensors without elements have no memory of their own that would tell them apart.
        if tensor.numel() and key in self._known:
            return self._known[key]
        self._known[key] = self._add(joined, tensor, role_of(path, in_optimizer))
        return self._known[key]

    def _array(
        self,
        array: Any,
        path: tuple[str, ...],
    ) -> int:
        joined = _joined(path)
        return self._add(joined, array_tensor(array, joined), "exact")

    def _add(
        self,
        path: str,
        tensor: torch.Tensor,
        role: str,
    ) -> int:
        leaf = Leaf(self._distinct(path), tensor, role)
        self.leaves.append(leaf)
        return len(self.leaves) - 1

    def _distinct(self, path: str) -> str:
        """The path, numbered where two tensors have the same."""
        self._paths[path] += 1
        count = self._paths[path]
        return path if count == 1 else f"{path}#{count}"


def role_of(path: tuple[str, ...], in_optimizer: bool) -> str:
    """Which bound applies to a tensor, by where it is and what its last key is.

    >>> role_of(("opt", "state", "0", "exp_avg_sq"), True)
    'second-moment'
    """
    last = path[-1].rpartition(".")[2] if path else ""
    if last in SECOND_MOMENTS:
        return "second-moment"
    return "optimizer" if in_optimizer or last in _MOMENTS else "weight"


def unflatten(tree: Any, leaf: Callable[[int], torch.Tensor]) -> Any:
    """Put a state together.

    Args:
        tree: Plain values of :func:`flatten`, possibly hostile.
        leaf: Gives the tensor of a number.

    Raises:
        CorruptCheckpoint: It is no tree.
    """
    return _unpack(tree, leaf, 0)


def _unpack(
    node: Any,
    leaf: Callable[[int], torch.Tensor],
    depth: int,
) -> Any:
    require(depth <= MAX_DEPTH + 1, f"the tree has more than {MAX_DEPTH} levels")
    if type(node) in _KEYS:
        return node
    require(
        isinstance(node, list) and len(node) >= 2,
        f"expected a node of a tree, got {type(node).__name__}",
    )
    tag = node[0]
    unpack = _UNPACK.get(tag) if isinstance(tag, str) else None
    if unpack is not None:
        return unpack(node, leaf, depth + 1)
    require(tag in (_TENSOR, _ARRAY) and type(node[1]) is int, "unknown kind of node")
    tensor = leaf(node[1])
    return tensor if tag == _TENSOR else tensor.numpy()


def _unpack_dict(
    node: Any,
    leaf: Callable[[int], torch.Tensor],
    depth: int,
) -> Any:
    require(isinstance(node[1], list), "expected the items of a dict")
    found: dict[Any, Any] = {} if node[0] == _DICT else collections.OrderedDict()
    for item in node[1]:
        require(isinstance(item, list) and len(item) == 2, "expected a key and a value")
        key = _unpack(item[0], leaf, depth)
        require(type(key) in _KEYS, f"expected a key, got {type(key).__name__}")
        found[key] = _unpack(item[1], leaf, depth)
    if node[0] == _ORDERED and len(node) == 3 and node[2] is not None:
        found._metadata = _unpack(node[2], leaf, depth)  # type: ignore[attr-defined]
    return found


def _unpack_sequence(
    node: Any,
    leaf: Callable[[int], torch.Tensor],
    depth: int,
) -> Any:
    require(isinstance(node[1], list), "expected the items of a list")
    items = [_unpack(item, leaf, depth) for item in node[1]]
    return items if node[0] == _LIST else tuple(items)


def _unpack_integer(node: Any, *_: Any) -> int:
    require(isinstance(node[1], bytes), "expected the bytes of an integer")
    require(len(node[1]) <= _MAX_INTEGER_BYTES, "an integer is too large")
    return int.from_bytes(node[1], "little", signed=True)


def _unpack_scalar(node: Any, *_: Any) -> Any:
    known = len(node) == 3 and isinstance(node[1], str) and node[1] in NUMPY_TYPES
    require(known and isinstance(node[2], bytes), "expected a numpy scalar")
    require(len(node[2]) == NUMPY_TYPES[node[1]], "expected the bytes of a numpy scalar")
    return np.frombuffer(node[2], node[1])[0]


_UNPACK: dict[str, Callable[[Any, Callable[[int], torch.Tensor], int], Any]] = {
    _DICT: _unpack_dict,
    _ORDERED: _unpack_dict,
    _LIST: _unpack_sequence,
    _TUPLE: _unpack_sequence,
    _INTEGER: _unpack_integer,
    _SCALAR: _unpack_scalar,
}


def _pack_integer(value: int, path: tuple[str, ...]) -> Any:
    """Integers of more than 64 bits, as numpy's generators have them, as bytes."""
    if -(1 << 63) <= value < 1 << 64:
        return value
    size = value.bit_length() // 8 + 1
    if size > _MAX_INTEGER_BYTES:
        raise UnsupportedState(f"an integer of {size} bytes is too large", key=_joined(path))
    return [_INTEGER, value.to_bytes(size, "little", signed=True)]


def _joined(path: tuple[str, ...]) -> str:
    return ".".join(path)
