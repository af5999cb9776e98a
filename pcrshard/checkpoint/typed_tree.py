"""Convert nested states to flat tokens and a list of tensors, and back, preserving types.

A state may contain only dict, OrderedDict, list, tuple, int, float, str, bytes, bool, None,
tensors, numpy arrays, and numpy scalars: loading a checkpoint must not execute anything, and a
value that cannot be restored exactly must not be stored.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
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
# A string token gives the kind of the tokens after it; see section 2.3 of the format.
_DICT, _ORDERED, _LIST, _TUPLE = "d", "o", "l", "t"
_TEXT, _BYTES, _INTEGER, _SCALAR = "s", "b", "i", "g"
_TENSOR, _ARRAY, _VIEW = "x", "a", "v"
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


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One tensor of a state.

    Attributes:
        path: Keys joined by dots, unique within a state.
        tensor: The tensor.
        role: The field of :class:`Precision` that bounds its error; ``None`` if it is exact.
    """

    path: str
    tensor: torch.Tensor
    role: str | None


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
    leaves = _tie(packer.found)
    copies = snapshot([leaf.tensor for leaf in leaves])
    tokens = [t for item in packer.tokens for t in (item if type(item) is list else [item])]
    copied = [dataclasses.replace(leaf, tensor=t) for leaf, t in zip(leaves, copies, strict=True)]
    return Tree(tokens, packer.blobs), copied


class _Packer:
    """A collector of the tokens and tensors of a state.

    Attributes:
        tokens: The tokens so far; each tensor has a nested list, which :func:`_tie` completes.
        blobs: The byte strings so far.
        found: The tensors, each with its list of tokens.
    """

    def __init__(self) -> None:
        self.tokens: list[Any] = []
        self.blobs: list[bytes] = []
        self.found: list[tuple[Leaf, list[Any]]] = []

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
        add = self.tokens.extend
        if len(path) > MAX_DEPTH:
            raise UnsupportedState(f"expected at most {MAX_DEPTH} levels", key=where)
        if kind is str:
            _check_text(value, where)
            add((_TEXT, value))
        elif kind is int and not -(1 << 63) <= value < 1 << 64:  # as numpy's generators have them
            size = value.bit_length() // 8 + 1
            add((_INTEGER, self._blob(value.to_bytes(size, "little", signed=True))))
        elif kind is bytes:
            add((_BYTES, self._blob(value)))
        elif kind in _KEYS:
            add((value,))
        elif kind in (dict, collections.OrderedDict):
            self._pack_dict(value, path, roles)
        elif kind in (list, tuple, torch.Size):
            add((_LIST if kind is list else _TUPLE, len(value)))
            for i, item in enumerate(value):
                self.pack(item, (*path, str(i)), roles)
        else:
            self._pack_array(value, where, _role(path, roles))

    def _pack_array(self, value: Any, where: str, role: str | None) -> None:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            check_storable(value, where)
            # A lazily conjugated or negated view does not have its source's values.
            self._add(_TENSOR, Leaf(where, value.resolve_conj().resolve_neg(), role))
        elif kind is np.ndarray:
            self._add(_ARRAY, Leaf(where, array_tensor(value, where), None))
        elif isinstance(value, np.generic) and value.dtype.name in NUMPY_TYPES:
            self.tokens += (_SCALAR, value.dtype.name, self._blob(value.tobytes()))
        else:
            raise UnsupportedState(f"cannot store a {kind.__module__}.{kind.__name__}", key=where)

    def _pack_dict(self, value: Any, path: tuple[str, ...], roles: Roles) -> None:
        # The state of a torch.optim.Optimizer is recognized by its two keys.
        if {"state", "param_groups"} <= value.keys():
            roles = _roles(value["param_groups"])
        ordered = type(value) is not dict
        self.tokens += (_ORDERED if ordered else _DICT, len(value))
        for key, item in value.items():
            if type(key) not in _KEYS:
                where = ".".join((*path, str(key)))
                raise UnsupportedState(f"cannot store a key of {type(key).__name__}", key=where)
            self.pack(key, path, roles)
            self.pack(item, (*path, str(key)), roles)
        if ordered:
            # torch keeps the versions of modules in this attribute of a state_dict.
            self.pack(getattr(value, "_metadata", None), (*path, "_metadata"), None)

    def _blob(self, data: bytes) -> int:
        self.blobs.append(data)
        return len(self.blobs) - 1

    def _add(self, tag: str, leaf: Leaf) -> None:
        node = [tag]
        self.tokens.append(node)
        self.found.append((leaf, node))


def _tie(found: list[tuple[Leaf, list[Any]]]) -> list[Leaf]:
    """Return the distinct tensors and complete the tokens of each tensor.

    A tensor whose memory is contained in another tensor's is stored as a view of it.
    """
    tensors = [leaf.tensor for leaf, _ in found]
    views = [(tensor.storage_offset(), tensor.shape, tensor.stride()) for tensor in tensors]
    # The largest tensors first, because they may contain others; then the contiguous ones.
    order = sorted(
        range(len(found)),
        key=lambda i: (-_extent(tensors[i]), not tensors[i].is_contiguous(), i),
    )
    bases: dict[Any, list[int]] = collections.defaultdict(list)
    base_of = {}
    for i in order:
        tensor = tensors[i]
        storage = (tensor.untyped_storage().data_ptr(), tensor.device, tensor.dtype)
        # Empty tensors have no memory that could identify them.
        sharing = bases[storage if tensor.numel() else i]
        same = (b for b in sharing if views[b] == views[i] or _contains(tensors[b], tensor))
        base_of[i] = next(same, i)
        if base_of[i] == i:
            sharing.append(i)
    numbers = {b: n for n, b in enumerate(sorted(set(base_of.values())))}
    for i, base in base_of.items():
        node = found[i][1]
        node.append(numbers[base])
        if views[i] != views[base]:
            offset, shape, strides = views[i]
            node[0] = _VIEW
            node += [offset - views[base][0], len(shape), *shape, *strides]
    # Memory shared with an exact tensor must stay exact.
    exact = {base_of[i] for i, (leaf, _) in enumerate(found) if leaf.role is None}
    names = _Names()
    return [
        Leaf(names.distinct(leaf.path), leaf.tensor, None if base in exact else leaf.role)
        for base, leaf in ((b, found[b][0]) for b in numbers)
    ]


class _Names(collections.Counter[str]):
    """A generator of unique paths: keys that contain dots can produce the same path twice."""

    def distinct(self, path: str) -> str:
        self[path] += 1
        return path if self[path] == 1 else f"{path}#{self[path]}"


def _contains(big: torch.Tensor, small: torch.Tensor) -> bool:
    """Return whether the memory of a contiguous tensor contains that of another one."""
    start = small.storage_offset() - big.storage_offset()
    return big.is_contiguous() and 0 <= start <= big.numel() - _extent(small)


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


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedState(f"cannot store a surrogate: {error.reason}", key=where) from None


class TreeReader:
    """A builder of states from untrusted tokens.

    Errors other than :class:`CorruptCheckpoint` (TypeError, IndexError ...) are the caller's to
    map: see :func:`damage_named`.

    Args:
        tree: The structure, from :func:`flatten`.
        tensor: Returns the tensor of a leaf by index, the same one each time. If omitted, only the
            structure is read, and tensors are None.

    Attributes:
        parts: The range of tokens of each path.
        names: The path of each leaf by index, excluding views.
        arrays: The indices of the leaves that are numpy arrays.
        uses: The index of the leaf at each position of the tokens that refers to one.
    """

    def __init__(self, tree: Tree, tensor: Callable[[int], torch.Tensor] | None = None) -> None:
        self.parts: dict[str, tuple[int, int]] = {}
        self.names: dict[int, str] = {}
        self.arrays: set[int] = set()
        self.uses: dict[int, int] = {}
        self._tokens = tree.tokens
        self._blobs = tree.blobs
        self._tensor = tensor
        self._at = 0
        self._paths = _Names()

    def read(self, part: tuple[int, int] | None = None) -> Any:
        """Build the state, or the part encoded by a range of tokens."""
        self._at, stop = part or (0, len(self._tokens))
        value = self._read(())
        require(self._at == stop, "expected the tree to end where its tokens end")
        return value

    def _take(self, kind: type[T]) -> T:
        token: Any = self._tokens[self._at]
        require(type(token) is kind, f"expected {kind.__name__}, got {type(token).__name__}")
        self._at += 1
        return token  # type: ignore[no-any-return]

    def _take_blob(self) -> bytes:
        number = self._take(int)
        require(number >= 0, "expected the number of some bytes")
        return self._blobs[number]

    def _read(self, path: tuple[str, ...]) -> Any:
        require(len(path) <= MAX_DEPTH + 1, f"the tree has more than {MAX_DEPTH} levels")
        start = self._at
        value = self._read_value(path)
        self.parts.setdefault(".".join(path), (start, self._at))
        return value

    def _read_value(self, path: tuple[str, ...]) -> Any:
        token = self._tokens[self._at]
        self._at += 1
        value: Any = token
        match token:
            case "d" | "o":
                value = self._read_dict(token, path)
            case "l" | "t":
                items = [self._read((*path, str(i))) for i in range(self._take(int))]
                value = items if token == _LIST else tuple(items)
            case "s":
                value = self._take(str)
            case "i":
                value = int.from_bytes(self._take_blob(), "little", signed=True)
            case "b":
                value = self._take_blob()
            case "g":
                dtype = NUMPY_TYPES[self._take(str)]
                (value,) = np.frombuffer(self._take_blob(), dtype)
            case "x" | "a" | "v":
                value = self._read_tensor(token, path)
            case str():
                raise CorruptCheckpoint(f"expected the kind of a node, got {token!r}")
        return value

    def _read_dict(self, tag: str, path: tuple[str, ...]) -> Any:
        found: dict[Any, Any] = {} if tag == _DICT else collections.OrderedDict()
        for _ in range(self._take(int)):
            key = self._read_value(path)
            require(type(key) in _KEYS, f"expected a key, got {type(key).__name__}")
            found[key] = self._read((*path, str(key)))
        if tag == _ORDERED:
            metadata = self._read((*path, "_metadata"))
            if metadata is not None:
                found._metadata = metadata  # type: ignore[attr-defined]
        return found

    def _read_tensor(self, tag: str, path: tuple[str, ...]) -> Any:
        at = self._at
        number = self.uses[at] = self._take(int)
        view: list[Any] = []
        if tag == _VIEW:
            offset, dim = self._take(int), self._take(int)
            require(0 <= dim <= 64, "expected at most 64 dimensions")
            view = [[self._take(int) for _ in range(dim)] for _ in range(2)] + [offset]
        elif number not in self.names:
            self.names[number] = self._paths.distinct(".".join(path))
        if tag == _ARRAY:
            self.arrays.add(number)
        if self._tensor is None:
            return None
        base = self._tensor(number)
        if tag == _ARRAY:
            return base.numpy()
        # torch rejects a view outside its tensor's memory.
        return base.as_strided(*view) if view else base
