"""Nested states as plain values and a list of tensors, and back with every type as it was.

A state consists of dict, OrderedDict, list, tuple, int, float, str, bytes, bool, None, tensors,
numpy arrays and numpy scalars. Nothing else: loading a checkpoint must not execute anything, and a
value that cannot come back as it was must not be stored.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ..errors import UnsupportedState
from .frame import require
from .tensors import NUMPY_TYPES, array_tensor, check_storable, snapshot, spec_of

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
_VIEW = "v"
_ARRAY = "a"
_SCALAR = "s"
WEIGHT = "weight"
FIRST_MOMENT = "first-moment"
SECOND_MOMENT = "second-moment"
EXACT = "exact"
_ROLES = {
    "exp_avg": FIRST_MOMENT,
    "momentum_buffer": FIRST_MOMENT,
    "exp_avg_sq": SECOND_MOMENT,
    "max_exp_avg_sq": SECOND_MOMENT,
}
# Param-group keys of torch's Adam and AdamW, and of SGD; a group with any other key belongs to an
# optimizer whose state may mean something else (Schedule-Free has `exp_avg_sq` and `z`).
_REQUIRED_KEYS = ({"betas", "eps", "amsgrad"}, {"momentum", "dampening", "nesterov"})
_COMMON_KEYS = {
    "params", "param_names", "lr", "weight_decay", "maximize", "foreach", "capturable",
    "differentiable", "fused", "decoupled_weight_decay", "name", "lr_scale",
    # Added by learning-rate schedulers.
    "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One tensor of a state.

    Attributes:
        path: Its keys, joined by dots; distinct in a state.
        tensor: A contiguous copy on the CPU.
        role: ``"weight"``, ``"first-moment"`` or ``"second-moment"``, which selects the error
            bound, or ``"exact"``.
    """

    path: str
    tensor: torch.Tensor
    role: str


@dataclasses.dataclass
class Flattened:
    """A state taken apart.

    Attributes:
        tree: Plain values; a tensor is the number of its leaf, or a view of a leaf.
        leaves: The tensors; memory that the state refers to several times is stored once.
    """

    tree: Any
    leaves: list[Leaf]


def flatten(state: Any) -> Flattened:
    """Take a state apart, and copy its tensors so that training may go on.

    Raises:
        UnsupportedState: A value has another type; its path is named.
    """
    flattener = _Flattener()
    tree = flattener.pack(state, (), None)
    leaves = flattener.leaves()
    copies = snapshot([leaf.tensor for leaf in leaves])
    pairs = zip(leaves, copies, strict=True)
    return Flattened(tree, [dataclasses.replace(leaf, tensor=copy) for leaf, copy in pairs])


class _Flattener:
    """Collects the tensors of a state.

    ``known`` is None outside of optimizers, and inside says whether the optimizer is known.
    """

    def __init__(self) -> None:
        # Each tensor with its node, whose leaf is filled in once all tensors are known.
        self._found: list[tuple[Leaf, list[Any]]] = []
        self._paths: collections.Counter[str] = collections.Counter()

    def pack(self, value: Any, path: tuple[str, ...], known: bool | None) -> Any:
        """Turn a value into plain values."""
        kind = type(value)
        where = ".".join(path)
        if len(path) > MAX_DEPTH:
            raise UnsupportedState(f"expected at most {MAX_DEPTH} levels", key=where)
        if kind is str:
            _check_text(value, where)
        if kind in _PLAIN:
            return value
        if kind is int:
            return _pack_integer(value, where)
        if kind in (dict, collections.OrderedDict):
            return self._pack_dict(value, path, known)
        if kind in (list, tuple, torch.Size):
            items = [self.pack(item, (*path, str(i)), known) for i, item in enumerate(value)]
            return [_LIST if kind is list else _TUPLE, items]
        return self._pack_values(value, path, known)

    def _pack_values(self, value: Any, path: tuple[str, ...], known: bool | None) -> list[Any]:
        kind = type(value)
        where = ".".join(path)
        if isinstance(value, torch.Tensor):
            check_storable(value, where)
            return self._add(_TENSOR, value, path, _role(path, known))
        if kind is np.ndarray:
            return self._add(_ARRAY, array_tensor(value, where), path, EXACT)
        if isinstance(value, np.generic) and value.dtype.name in NUMPY_TYPES:
            return [_SCALAR, value.dtype.name, value.tobytes()]
        raise UnsupportedState(f"cannot store a {kind.__module__}.{kind.__name__}", key=where)

    def _pack_dict(self, value: Any, path: tuple[str, ...], known: bool | None) -> list[Any]:
        # The state of a torch.optim.Optimizer is recognized by its two keys.
        if {"state", "param_groups"} <= value.keys():
            known = _is_known_optimizer(value["param_groups"])
        items = []
        for key, item in value.items():
            if type(key) not in _KEYS:
                where = ".".join((*path, str(key)))
                raise UnsupportedState(f"cannot store a key of {type(key).__name__}", key=where)
            _check_text(str(key), ".".join(path))
            packed = _pack_integer(key, str(key)) if type(key) is int else key
            items.append([packed, self.pack(item, (*path, str(key)), known)])
        if type(value) is dict:
            return [_DICT, items]
        # torch keeps the versions of modules in this attribute of a state_dict.
        extra = getattr(value, "_metadata", None)
        return [_ORDERED, items, self.pack(extra, (*path, "_metadata"), None)]

    def _add(self, tag: str, tensor: torch.Tensor, path: tuple[str, ...], role: str) -> list[Any]:
        node = [tag, -1]
        joined = ".".join(path)
        self._paths[joined] += 1
        count = self._paths[joined]
        name = joined if count == 1 else f"{joined}#{count}"
        self._found.append((Leaf(name, tensor, role), node))
        return node

    def leaves(self) -> list[Leaf]:
        """The distinct tensors; nodes of tensors that share memory refer to one of them."""
        sharing = collections.defaultdict(list)
        for i, (leaf, _) in enumerate(self._found):
            tensor = leaf.tensor
            key = (tensor.untyped_storage().data_ptr(), tensor.device) if tensor.numel() else i
            sharing[key].append(i)
        base_of = {i: i for i in range(len(self._found))}
        for group in sharing.values():
            # Larger tensors first, then contiguous ones, then in the order of the state.
            group.sort(key=lambda i: (-_extent(self._found[i][0].tensor), self._is_loose(i), i))
            for place, i in enumerate(group):
                inside = (b for b in group[:place] if base_of[b] == b and self._covers(b, i))
                base_of[i] = next(inside, i)
        numbers = {i: n for n, i in enumerate(b for b in base_of if base_of[b] == b)}
        for i, base in base_of.items():
            self._refer(i, base, numbers[base])
        # What an exact tensor shares must stay exact.
        exact = {base_of[i] for i, (leaf, _) in enumerate(self._found) if leaf.role == EXACT}
        leaves = {i: self._found[i][0] for i in numbers}
        return [
            dataclasses.replace(leaf, role=EXACT) if i in exact else leaf
            for i, leaf in leaves.items()
        ]

    def _is_loose(self, i: int) -> bool:
        return not self._found[i][0].tensor.is_contiguous()

    def _covers(self, base: int, i: int) -> bool:
        """Whether one tensor's memory contains another's."""
        big, small = self._found[base][0].tensor, self._found[i][0].tensor
        start = small.storage_offset() - big.storage_offset()
        inside = big.is_contiguous() and 0 <= start <= big.numel() - _extent(small)
        lazy = any(tensor.is_conj() or tensor.is_neg() for tensor in (big, small))
        return _same_view(big, small) or (inside and big.dtype == small.dtype and not lazy)

    def _refer(self, i: int, base: int, number: int) -> None:
        leaf, node = self._found[i]
        big, small = self._found[base][0].tensor, leaf.tensor
        node[1] = number
        if not _same_view(big, small):
            node[0] = _VIEW
            offset = small.storage_offset() - big.storage_offset()
            node += [offset, list(small.shape), list(small.stride())]


def _same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    def view(tensor: torch.Tensor) -> tuple[Any, ...]:
        lazy = (tensor.is_conj(), tensor.is_neg())
        place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        return (tensor.dtype, *place, *lazy)

    return view(a) == view(b)


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one in memory, inclusive."""
    if tensor.numel() == 0:
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs)


def _is_known_optimizer(groups: Any) -> bool:
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return False
    return bool(groups) and all(
        any(required <= group.keys() <= required | _COMMON_KEYS for required in _REQUIRED_KEYS)
        for group in groups
    )


def _role(path: tuple[str, ...], known: bool | None) -> str:
    if known is None:
        return WEIGHT
    last = path[-1].rpartition(".")[2]
    return _ROLES.get(last, EXACT) if known and "state" in path else EXACT


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedState(f"cannot store a surrogate: {error.reason}", key=where) from None


def _pack_integer(value: int, where: str) -> Any:
    """Pack integers of more than 64 bits, as numpy's generators have them, as bytes."""
    if -(1 << 63) <= value < 1 << 64:
        return value
    size = value.bit_length() // 8 + 1
    if size > _MAX_INTEGER_BYTES:
        raise UnsupportedState(f"an integer of {size} bytes is too large", key=where)
    return [_INTEGER, value.to_bytes(size, "little", signed=True)]


def walk(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the path and node of every value below a node of a packed tree, itself included.

    Raises:
        CorruptCheckpoint: The tree is malformed.
    """
    require(len(path) <= MAX_DEPTH + 1, f"the tree has more than {MAX_DEPTH} levels")
    yield ".".join(path), tree
    if type(tree) is not list or len(tree) < 2 or type(tree[1]) is not list:
        return
    for i, item in enumerate(tree[1]):
        key: Any = i
        if tree[0] in (_DICT, _ORDERED):
            require(type(item) is list and len(item) == 2, "expected a key and a value")
            key, item = item  # noqa: PLW2901  # the value takes the item's place
            key = _unpack_integer(key) if type(key) is list else key
        yield from walk(item, (*path, str(key)))


def leaves_of(tree: Any) -> set[int]:
    """Return the numbers of all leaves that a node of a packed tree refers to."""
    return {node[1] for _, node in walk(tree) if type(node) is list and len(node) > 1
            and node[0] in (_TENSOR, _VIEW, _ARRAY) and type(node[1]) is int}  # fmt: skip


def unflatten(tree: Any, leaf: Callable[[int], torch.Tensor], map_location: Any = None) -> Any:
    """Put a state together.

    Args:
        tree: Plain values of :func:`flatten`, possibly hostile.
        leaf: Returns the tensor of a number, on the CPU.
        map_location: The torch device of tensors; numpy arrays stay where they are.

    Raises:
        CorruptCheckpoint: It is not a tree.
    """
    return _Unflattener(leaf, map_location).unpack(tree, 0)


class _Unflattener:
    def __init__(self, leaf: Callable[[int], torch.Tensor], map_location: Any) -> None:
        self._leaf = leaf
        self._location = map_location
        self._moved: dict[int, torch.Tensor] = {}

    def unpack(self, node: Any, depth: int) -> Any:
        """Turn a node into a value."""
        require(depth <= MAX_DEPTH + 1, f"the tree has more than {MAX_DEPTH} levels")
        if type(node) in _KEYS:
            return node
        require(type(node) is list and len(node) >= 2, "expected a node of a tree")
        tag, content = node[0], node[1]
        if tag in (_DICT, _ORDERED):
            return self._unpack_dict(node, depth + 1)
        if tag in (_LIST, _TUPLE):
            require(type(content) is list, "expected the items of a list")
            items = [self.unpack(item, depth + 1) for item in content]
            return items if tag == _LIST else tuple(items)
        if tag == _INTEGER:
            return _unpack_integer(node)
        if tag == _SCALAR:
            return _unpack_scalar(node)
        return self._unpack_tensor(node)

    def _unpack_tensor(self, node: Any) -> Any:
        tag, content = node[0], node[1]
        require(tag in (_TENSOR, _VIEW, _ARRAY) and type(content) is int, "unknown kind of node")
        if tag == _ARRAY:
            tensor = self._leaf(content)
            require(spec_of(tensor).dtype in NUMPY_TYPES, "numpy has no such type")
            return tensor.numpy()
        if content not in self._moved:
            base = self._leaf(content)
            self._moved[content] = base if self._location is None else base.to(self._location)
        whole = self._moved[content]
        return whole if tag == _TENSOR else _view(node, whole)

    def _unpack_dict(self, node: Any, depth: int) -> Any:
        require(type(node[1]) is list, "expected the items of a dict")
        found: dict[Any, Any] = {} if node[0] == _DICT else collections.OrderedDict()
        for item in node[1]:
            require(type(item) is list and len(item) == 2, "expected a key and a value")
            key = self.unpack(item[0], depth)
            require(type(key) in _KEYS, f"expected a key, got {type(key).__name__}")
            found[key] = self.unpack(item[1], depth)
        if node[0] == _ORDERED and len(node) == 3 and node[2] is not None:
            found._metadata = self.unpack(node[2], depth)  # type: ignore[attr-defined]
        return found


def _view(node: list[Any], base: torch.Tensor) -> torch.Tensor:
    """Return the view of a leaf that a node describes."""
    require(len(node) == 5, "expected a view of a tensor")
    _, _, offset, shape, strides = node
    lists = type(shape) is list and type(strides) is list and len(shape) == len(strides) <= 64
    require(lists and type(offset) is int and offset >= 0, "expected a view of a tensor")
    counts = all(type(n) is int and 0 <= n < 1 << 48 for n in (*shape, *strides))
    require(counts, "expected a view of a tensor")
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    require(0 not in shape and last < base.numel(), "a view leaves its tensor")
    # A stride of 0 may repeat elements: what it makes is no larger than its tensor's memory.
    return base.as_strided(shape, strides, offset + base.storage_offset())


def _unpack_integer(node: Any) -> int:
    require(
        node[0] == _INTEGER and len(node) == 2 and isinstance(node[1], bytes),
        "expected the bytes of an integer",
    )
    require(len(node[1]) <= _MAX_INTEGER_BYTES, "an integer is too large")
    return int.from_bytes(node[1], "little", signed=True)


def _unpack_scalar(node: Any) -> Any:
    known = len(node) == 3 and isinstance(node[1], str) and node[1] in NUMPY_TYPES
    require(known and isinstance(node[2], bytes), "expected a numpy scalar")
    require(len(node[2]) == NUMPY_TYPES[node[1]], "expected the bytes of a numpy scalar")
    return np.frombuffer(node[2], node[1])[0]
