"""Convert nested states to flat tokens and a list of tensors, and back, preserving types.

A state may contain only dict, OrderedDict, Counter, list, tuple, int, float, str, bytes, bool,
None, tensors, numpy arrays, and numpy scalars: loading a checkpoint must not execute anything, and
a value that cannot be restored exactly must not be stored. Section 2.3 of
docs/checkpoints-format.md describes the tokens.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

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
    dict: "d", collections.OrderedDict: "o", collections.Counter: "c",
    list: "l", tuple: "t", torch.Size: "t",
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
        tag: Its token.
        tensor: The tensor.
        role: The field of :class:`Precision` that bounds its error; ``None`` if it is exact.
        path: Its path, which is unique once the state's tree is complete.
        uses: The paths of all tensors that share its memory.
    """

    tag: str
    tensor: torch.Tensor
    role: str | None
    path: str
    uses: list[str] = dataclasses.field(default_factory=list)

    @property
    def layout(self) -> tuple[Any, ...]:
        """The place of the elements in the tensor's storage."""
        return self.tensor.storage_offset(), self.tensor.shape, self.tensor.stride()

    @property
    def extent(self) -> int:
        """The span in memory from the first to the last element, inclusive, in elements."""
        if self.tensor.numel() == 0:
            return 0
        pairs = zip(self.tensor.shape, self.tensor.stride(), strict=True)
        return 1 + sum((size - 1) * stride for size, stride in pairs)

    def contains(self, other: Leaf) -> bool:
        """Return whether a tensor of the same storage is this one, or a part of its memory."""
        start = other.tensor.storage_offset() - self.tensor.storage_offset()
        is_part = 0 <= start <= self.tensor.numel() - other.extent
        return self.layout == other.layout or (is_part and self.tensor.is_contiguous())


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
    packed = list(pack(state))
    found = [token for token in packed if type(token) is Leaf]
    base_of = _tie(found)
    leaves = [leaf for leaf in found if base_of[leaf] is leaf]
    numbers = {leaf: number for number, leaf in enumerate(leaves)}
    tokens: list[Any] = []
    for token in packed:
        if type(token) is not Leaf:
            tokens.append(token)
            continue
        base = base_of[token]
        if token.layout == base.layout:
            tokens += (token.tag, numbers[base])
        else:
            offset, shape, strides = token.layout
            start = offset - base.tensor.storage_offset()
            tokens += ("v", numbers[base], start, len(shape), *shape, *strides)
    tree = make_tree(tokens)
    names = TreeReader(tree).names
    for leaf in found:
        base_of[leaf].uses.append(leaf.path)
    copies = snapshot([leaf.tensor for leaf in leaves])
    for leaf, copy in zip(leaves, copies, strict=True):
        leaf.path, leaf.tensor = names[numbers[leaf]], copy
    return tree, leaves


def make_tree(packed: Iterable[Any]) -> Tree:
    """Return a tree of tokens, and of bytes in the places of their numbers."""
    tree = Tree([], [])
    for token in packed:
        if type(token) is bytes:
            tree.tokens.append(len(tree.blobs))
            tree.blobs.append(token)
        else:
            tree.tokens.append(token)
    return tree


def pack(value: Any, path: tuple[str, ...] = (), roles: Roles = None) -> Iterator[Any]:
    """Yield the tokens of a value, with a :class:`Leaf` or bytes in the places of their numbers.

    Args:
        value: The value.
        path: Keys that lead to the value.
        roles: The roles of an optimizer's tensors by name, none for an unknown optimizer; None
            outside optimizers.
    """
    kind = type(value)
    where = ".".join(path)
    if kind in _CONTAINERS:
        yield from _pack_items(value, path, roles)
    elif kind is str:
        if value.encode(errors="ignore").decode() != value:
            raise UnsupportedState("cannot store a surrogate", key=where)
        yield from ("s", value)
    elif kind is bytes:
        yield from ("b", value)
    elif kind is int and not -(1 << 63) <= value < 1 << 64:  # as numpy's generators have them
        size = value.bit_length() // 8 + 1
        yield from ("i", value.to_bytes(size, "little", signed=True))
    elif kind in _KEYS:
        yield value
    elif isinstance(value, torch.Tensor):
        check_storable(value, where)
        # A lazily conjugated or negated view does not have its source's values.
        yield Leaf("x", value.resolve_conj().resolve_neg(), _role(path, roles), where)
    elif kind is np.ndarray:
        yield Leaf("a", array_tensor(value, where), None, where)
    elif isinstance(value, np.generic) and value.dtype.name in NUMPY_TYPES:
        yield from ("g", value.dtype.name, value.tobytes())
    else:
        advice = "; save its state_dict()" if hasattr(value, "state_dict") else ""
        name = f"{kind.__module__}.{kind.__name__}"
        raise UnsupportedState(f"cannot store a {name}{advice}", key=where)


def _pack_items(value: Any, path: tuple[str, ...], roles: Roles) -> Iterator[Any]:
    tag = _CONTAINERS[type(value)]
    is_dict = isinstance(value, dict)
    if len(path) > MAX_DEPTH:
        raise UnsupportedState(f"expected at most {MAX_DEPTH} levels", key=".".join(path))
    # The state of a torch.optim.Optimizer is recognized by its two keys.
    if is_dict and {"state", "param_groups"} <= value.keys():
        roles = _roles(value["param_groups"])
    yield from (tag, len(value))
    for key, item in value.items() if is_dict else enumerate(value):
        where = (*path, str(key))
        if type(key) not in _KEYS:
            message = f"cannot store a key of {type(key).__name__}"
            raise UnsupportedState(message, key=".".join(where))
        if is_dict:
            yield from pack(key, path, roles)
        yield from pack(item, where, roles)
    if tag == "o":
        # torch keeps the versions of modules in this attribute of a state_dict.
        yield from pack(getattr(value, "_metadata", None), (*path, "_metadata"))


def leaves_of(state: Any) -> Iterator[Leaf]:
    """Yield the tensors and arrays of a state, which are not copied."""
    return (token for token in pack(state) if type(token) is Leaf)


def _tie(leaves: list[Leaf]) -> dict[Leaf, Leaf]:
    """Return the leaf that stores each leaf's elements: itself, or one whose memory contains it."""
    # The largest tensors first, because they may contain others; then the contiguous ones.
    order = sorted(leaves, key=lambda leaf: (-leaf.extent, not leaf.tensor.is_contiguous()))
    bases: dict[Any, list[Leaf]] = collections.defaultdict(list)
    base_of = {}
    for leaf in order:
        tensor = leaf.tensor
        storage = (tensor.untyped_storage().data_ptr(), tensor.device, tensor.dtype)
        # Empty tensors have no memory that could identify them.
        sharing = bases[storage if tensor.numel() else leaf]
        base_of[leaf] = next((base for base in sharing if base.contains(leaf)), leaf)
        if base_of[leaf] is leaf:
            sharing.append(leaf)
        elif leaf.role is None:  # memory shared with an exact tensor must stay exact
            base_of[leaf].role = None
    return base_of


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


class TreeReader:
    """A state's structure, read from untrusted tokens.

    Errors other than :class:`CorruptCheckpoint` (TypeError, IndexError ...) are the caller's to
    map: see :func:`damage_named`.

    Attributes:
        parts: The paths of all parts.
        uses: The path of each tensor, array, or view, and the index of its leaf.
        names: The unique path of each leaf by index: of its first use that is no view.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.uses: list[tuple[str, int]] = []
        self.names: dict[int, str] = {}
        taken: set[str] = set()

        def note(path: str, number: int, tag: str, *_: Any) -> None:
            self.uses.append((path, number))
            if tag != "v" and number not in self.names:
                # Keys that contain dots can produce the same path twice.
                numbered = (f"{path}#{count}" for count in itertools.count(2))
                names = itertools.chain([path], numbered)
                self.names[number] = next(name for name in names if name not in taken)
                taken.add(self.names[number])

        self.parts = self.build(note).keys()

    def build(self, tensor: Callable[..., Any]) -> dict[str, Any]:
        """Build the state; return its parts by path, the whole of it under ``""``.

        Args:
            tensor: Returns a tensor, given its path, the index of its leaf, its tag, and for a view
                its sizes, strides and offset.
        """
        self._tensor = tensor
        self._tokens: list[Any] = self._tree.tokens[::-1]
        self._parts: dict[str, Any] = {}
        state = self._read(())
        require(not self._tokens, "expected the tree to end where its tokens end")
        return self._parts | {"": state}

    def _take(self, kind: type[T]) -> T:
        token = self._tokens.pop()
        require(type(token) is kind, "expected a token of another type")
        return token  # type: ignore[no-any-return]

    def _take_bytes(self) -> bytes:
        number = self._take(int)
        require(number >= 0, "expected the number of some bytes")
        return self._tree.blobs[number]

    def _read(self, path: tuple[str, ...]) -> Any:
        require(len(path) <= MAX_DEPTH + 1, "the tree has too many levels")
        value: Any = self._tokens.pop()
        match value:
            case "d" | "o" | "c" | "l" | "t":
                value = self._read_items(value, path)
            case "s":
                value = self._take(str)
            case "b":
                value = self._take_bytes()
            case "i":
                value = int.from_bytes(self._take_bytes(), "little", signed=True)
            case "g":
                dtype = NUMPY_TYPES[self._take(str)]
                (value,) = np.frombuffer(self._take_bytes(), dtype)
            case "x" | "a":
                value = self._tensor(".".join(path), self._take(int), value)
            case "v":
                number, offset, dim = (self._take(int) for _ in range(3))
                sizes, strides = ([self._take(int) for _ in range(dim)] for _ in range(2))
                value = self._tensor(".".join(path), number, value, sizes, strides, offset)
            case str():
                raise CorruptCheckpoint(f"expected the kind of a node, got {value!r}")
        return value

    def _read_items(self, kind: str, path: tuple[str, ...]) -> Any:
        made = {"o": collections.OrderedDict, "c": collections.Counter}.get(kind, dict)
        found: dict[Any, Any] = made()
        for number in range(self._take(int)):
            key = number if kind in ("l", "t") else self._read(path)
            require(type(key) in _KEYS, "expected a key of a plain type")
            where = (*path, str(key))
            found[key] = self._read(where)
            self._parts.setdefault(".".join(where), found[key])
        if kind == "o":
            metadata = self._read((*path, "_metadata"))
            if metadata is not None:
                found._metadata = metadata  # type: ignore[attr-defined]
        match kind:
            case "l":
                return list(found.values())
            case "t":
                return tuple(found.values())
        return found
