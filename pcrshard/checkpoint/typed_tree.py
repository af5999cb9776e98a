"""Convert nested states to flat tokens and a list of tensors, and back, preserving types.

A state may contain only dict, OrderedDict, list, tuple, int, float, str, bytes, bool, None,
tensors, numpy arrays, and numpy scalars: loading a checkpoint must not execute anything, and a
value that cannot be restored exactly must not be stored. Section 2.3 of docs/checkpoints-format.md
describes the tokens.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from ..errors import CorruptCheckpoint, UnsupportedState
from .frame import Record, require
from .tensors import NUMPY_TYPES, array_tensor, check_storable, snapshot

Token = bool | int | float | str | None
Roles = dict[str, str] | None
T = TypeVar("T")
MAX_DEPTH = 100
_KEYS = (type(None), bool, int, float, str, bytes)
_CONTAINERS: dict[Any, str] = {
    dict: "d", collections.OrderedDict: "o", list: "l", tuple: "t", torch.Size: "t"
}  # fmt: skip
WEIGHT = "weights"
_ROLES = {
    "exp_avg": "first_moment",
    "momentum_buffer": "first_moment",
    "exp_avg_sq": "second_moment",
    "max_exp_avg_sq": "second_moment",
}
# Param-group keys of torch's Adam, AdamW, and SGD. A group with any other key belongs to another
# optimizer, whose state may have another meaning (Schedule-Free has `exp_avg_sq` and `z`).
_REQUIRED_KEYS = ({"betas", "eps", "amsgrad"}, {"momentum", "dampening", "nesterov"})
_COMMON_KEYS = {
    "params", "param_names", "lr", "weight_decay", "maximize", "foreach", "capturable",
    "differentiable", "fused", "decoupled_weight_decay", "name", "lr_scale",
    # Keys added by learning-rate schedulers.
    "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum",
}  # fmt: skip


@dataclasses.dataclass(eq=False)
class Leaf:
    """One tensor of a state.

    Attributes:
        path: Keys joined by dots, unique within a state.
        tensor: The tensor.
        role: The field of :class:`Precision` that bounds its error; ``None`` if it is exact.
        tokens: Its tokens, complete once the tensors that share memory are known.
    """

    path: str
    tensor: torch.Tensor
    role: str | None
    tokens: list[Any]

    @property
    def layout(self) -> tuple[Any, ...]:
        """The place of the elements in the tensor's storage."""
        return self.tensor.storage_offset(), self.tensor.shape, self.tensor.stride()


class Tree(Record, frozen=True, array_like=True):
    """A state without its tensors.

    Attributes:
        tokens: The structure; each tensor is the index of its leaf or a view of a leaf.
        blobs: Byte strings that tokens refer to by index.
    """

    tokens: list[Token]
    blobs: list[bytes]


def flatten(state: Any) -> tuple[Tree, list[Leaf]]:
    """Separate a state into structure and tensors, which are copied so that training may continue.

    Returns:
        The structure, and the tensors as contiguous copies on the CPU; shared memory is stored
        once.

    Raises:
        UnsupportedState: A value has an unsupported type; the message names its path.
    """
    packer = _Packer()
    packer.pack(state, (), None)
    leaves = _tie(packer.leaves)
    for leaf, copy in zip(leaves, snapshot([leaf.tensor for leaf in leaves]), strict=True):
        leaf.tensor = copy
    tokens = [t for item in packer.tokens for t in (item if type(item) is list else [item])]
    return Tree(tokens, packer.blobs), leaves


class _Packer:
    """A collector of the tokens and tensors of a state.

    Attributes:
        tokens: The tokens so far; each tensor has a nested list, which :func:`_tie` completes.
        blobs: The byte strings so far.
        leaves: The tensors so far.
    """

    def __init__(self) -> None:
        self.tokens: list[Any] = []
        self.blobs: list[bytes] = []
        self.leaves: list[Leaf] = []

    def pack(self, value: Any, path: tuple[str, ...], roles: Roles) -> None:
        """Append the tokens of a value.

        Args:
            value: The value.
            path: Keys that lead to the value.
            roles: The roles of an optimizer's tensors by name, none for an unknown optimizer; None
                outside optimizers.
        """
        kind = type(value)
        where = ".".join(path)
        if kind in _CONTAINERS:
            self._pack_items(value, path, roles)
        elif kind is str:
            if value.encode(errors="ignore").decode() != value:
                raise UnsupportedState("cannot store a surrogate", key=where)
            self.tokens += ("s", value)
        elif kind is bytes:
            self._add_bytes(value, "b")
        elif kind is int and not -(1 << 63) <= value < 1 << 64:  # as numpy's generators have them
            size = value.bit_length() // 8 + 1
            self._add_bytes(value.to_bytes(size, "little", signed=True), "i")
        elif kind in _KEYS:
            self.tokens.append(value)
        elif isinstance(value, torch.Tensor):
            check_storable(value, where)
            # A lazily conjugated or negated view does not have its source's values.
            self._add_tensor("x", where, value.resolve_conj().resolve_neg(), _role(path, roles))
        elif kind is np.ndarray:
            self._add_tensor("a", where, array_tensor(value, where), None)
        elif isinstance(value, np.generic) and value.dtype.name in NUMPY_TYPES:
            self._add_bytes(value.tobytes(), "g", value.dtype.name)
        else:
            raise UnsupportedState(f"cannot store a {kind.__module__}.{kind.__name__}", key=where)

    def _pack_items(self, value: Any, path: tuple[str, ...], roles: Roles) -> None:
        tag = _CONTAINERS[type(value)]
        is_dict = isinstance(value, dict)
        if len(path) > MAX_DEPTH:
            raise UnsupportedState(f"expected at most {MAX_DEPTH} levels", key=".".join(path))
        # The state of a torch.optim.Optimizer is recognized by its two keys.
        if is_dict and {"state", "param_groups"} <= value.keys():
            roles = _roles(value["param_groups"])
        self.tokens += (tag, len(value))
        for key, item in value.items() if is_dict else enumerate(value):
            where = (*path, str(key))
            if type(key) not in _KEYS:
                message = f"cannot store a key of {type(key).__name__}"
                raise UnsupportedState(message, key=".".join(where))
            if is_dict:
                self.pack(key, path, roles)
            self.pack(item, where, roles)
        if tag == "o":
            # torch keeps the versions of modules in this attribute of a state_dict.
            self.pack(getattr(value, "_metadata", None), (*path, "_metadata"), None)

    def _add_bytes(self, data: bytes, *tokens: str) -> None:
        self.tokens += (*tokens, len(self.blobs))
        self.blobs.append(data)

    def _add_tensor(self, tag: str, where: str, tensor: torch.Tensor, role: str | None) -> None:
        leaf = Leaf(where, tensor, role, [tag])
        self.tokens.append(leaf.tokens)
        self.leaves.append(leaf)


def _tie(leaves: list[Leaf]) -> list[Leaf]:
    """Return the distinct tensors and complete the tokens of each tensor.

    A tensor whose memory is contained in another tensor's is stored as a view of it.
    """
    # The largest tensors first, because they may contain others; then the contiguous ones.
    order = sorted(
        leaves, key=lambda leaf: (-_extent(leaf.tensor), not leaf.tensor.is_contiguous())
    )
    bases: dict[Any, list[Leaf]] = collections.defaultdict(list)
    base_of = {}
    for leaf in order:
        tensor = leaf.tensor
        storage = (tensor.untyped_storage().data_ptr(), tensor.device, tensor.dtype)
        # Empty tensors have no memory that could identify them.
        sharing = bases[storage if tensor.numel() else leaf]
        base_of[leaf] = next((base for base in sharing if _contains(base, leaf)), leaf)
        if base_of[leaf] is leaf:
            sharing.append(leaf)
    distinct = [leaf for leaf in leaves if base_of[leaf] is leaf]
    numbers = {leaf: number for number, leaf in enumerate(distinct)}
    for leaf, base in base_of.items():
        leaf.tokens.append(numbers[base])
        if leaf.layout != base.layout:
            offset, shape, strides = leaf.layout
            start = offset - base.tensor.storage_offset()
            leaf.tokens[0] = "v"
            leaf.tokens += [start, len(shape), *shape, *strides]
        if leaf.role is None:  # memory shared with an exact tensor must stay exact
            base.role = None
    names = _Names()
    for leaf in distinct:
        leaf.path = names.distinct(leaf.path)
    return distinct


class _Names(collections.Counter[str]):
    """A generator of unique paths: keys that contain dots can produce the same path twice."""

    def distinct(self, path: str) -> str:
        self[path] += 1
        return path if self[path] == 1 else f"{path}#{self[path]}"


def _contains(base: Leaf, leaf: Leaf) -> bool:
    """Return whether a tensor is another one, or a part of a contiguous one."""
    big, small = base.tensor, leaf.tensor
    start = small.storage_offset() - big.storage_offset()
    is_part = big.is_contiguous() and 0 <= start <= big.numel() - _extent(small)
    return is_part or base.layout == leaf.layout


def _extent(tensor: torch.Tensor) -> int:
    """Return the span in memory from the first to the last element, inclusive, in elements."""
    if tensor.numel() == 0:
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs)


def _roles(groups: Any) -> Roles:
    """Return the roles of the tensors of an optimizer with these param groups."""
    is_known = isinstance(groups, list) and all(
        isinstance(group, dict)
        and any(required <= group.keys() <= required | _COMMON_KEYS for required in _REQUIRED_KEYS)
        for group in groups
    )
    return _ROLES if is_known and groups else {}


def _role(path: tuple[str, ...], roles: Roles) -> str | None:
    if roles is None:
        return WEIGHT
    return roles.get(path[-1].rpartition(".")[2]) if "state" in path else None


class Use(NamedTuple):
    """A tensor in a state's structure.

    Attributes:
        number: The index of its leaf.
        is_array: Whether it is a numpy array.
        view: Sizes, strides, and offset of a view of the leaf.
    """

    number: int
    is_array: bool
    view: tuple[list[int], list[int], int] | None

    def of(self, leaf: torch.Tensor) -> Any:
        """Return the array, the tensor, or the view, given its leaf."""
        if self.is_array:
            return leaf.numpy()
        # torch rejects a view outside its tensor's memory.
        return leaf if self.view is None else leaf.as_strided(*self.view)


class TreeReader:
    """A state's structure, read from untrusted tokens.

    Errors other than :class:`CorruptCheckpoint` (TypeError, IndexError ...) are the caller's to
    map: see :func:`damage_named`.

    Attributes:
        root: The structure, with a :class:`Use` for each tensor.
        parts: The part at each path.
        names: The path of each leaf by index, excluding views.
    """

    def __init__(self, tree: Tree) -> None:
        self.parts: dict[str, Any] = {}
        self.names: dict[int, str] = {}
        self._paths = _Names()
        self._blobs = tree.blobs
        self._tokens: list[Any] = tree.tokens[::-1]
        self.root = self._read(())
        require(not self._tokens, "expected the tree to end where its tokens end")

    def _take(self, kind: type[T]) -> T:
        token = self._tokens.pop()
        require(type(token) is kind, f"expected {kind.__name__}, got {type(token).__name__}")
        return token  # type: ignore[no-any-return]

    def _read(self, path: tuple[str, ...]) -> Any:
        require(len(path) <= MAX_DEPTH + 1, f"the tree has more than {MAX_DEPTH} levels")
        value = self._read_value(path)
        self.parts.setdefault(".".join(path), value)
        return value

    def _read_value(self, path: tuple[str, ...]) -> Any:
        value: Any = self._tokens.pop()
        match value:
            case "d" | "o" | "l" | "t":
                value = self._read_items(value, path)
            case "s":
                value = self._take(str)
            case "i" | "b" | "g":
                value = self._read_bytes(value)
            case "x" | "a" | "v":
                value = self._read_use(value, path)
            case str():
                raise CorruptCheckpoint(f"expected the kind of a node, got {value!r}")
        return value

    def _read_items(self, kind: str, path: tuple[str, ...]) -> Any:
        found: dict[Any, Any] = collections.OrderedDict() if kind == "o" else {}
        for number in range(self._take(int)):
            key = self._read_value(path) if kind in ("d", "o") else number
            require(type(key) in _KEYS, f"expected a key, got {type(key).__name__}")
            found[key] = self._read((*path, str(key)))
        if kind == "o":
            metadata = self._read((*path, "_metadata"))
            if metadata is not None:
                found._metadata = metadata  # type: ignore[attr-defined]
        if kind in ("d", "o"):
            return found
        return list(found.values()) if kind == "l" else tuple(found.values())

    def _read_bytes(self, kind: str) -> Any:
        dtype = self._take(str) if kind == "g" else ""
        number = self._take(int)
        require(number >= 0, "expected the number of some bytes")
        data = self._blobs[number]
        if kind == "g":
            (scalar,) = np.frombuffer(data, NUMPY_TYPES[dtype])
            return scalar
        return data if kind == "b" else int.from_bytes(data, "little", signed=True)

    def _read_use(self, kind: str, path: tuple[str, ...]) -> Use:
        number = self._take(int)
        view = None
        if kind == "v":
            offset, dim = self._take(int), self._take(int)
            sizes, strides = ([self._take(int) for _ in range(dim)] for _ in range(2))
            view = sizes, strides, offset
        elif number not in self.names:
            self.names[number] = self._paths.distinct(".".join(path))
        return Use(number, kind == "a", view)


def fill(structure: Any, tensor: Callable[[Use], Any]) -> Any:
    """Return a copy of a structure with ``tensor(use)`` in the place of each :class:`Use`."""
    kind: Any = type(structure)
    if kind is Use:
        return tensor(structure)
    if kind in (list, tuple):
        return kind(fill(item, tensor) for item in structure)
    if kind in (dict, collections.OrderedDict):
        filled = kind((key, fill(item, tensor)) for key, item in structure.items())
        if hasattr(structure, "_metadata"):
            filled._metadata = fill(structure._metadata, tensor)
        return filled
    return structure
