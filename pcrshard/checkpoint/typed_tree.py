"""Convert nested states to flat tokens and a list of tensors, and back, preserving types.

A state may contain only dict, OrderedDict, Counter, list, tuple, torch.Size, int, float, str,
bytes, BytesIO, bool, None, tensors, numpy arrays, and numpy scalars: loading a checkpoint must not
execute anything, and a value that cannot be restored exactly must not be stored. Section 2.3 of
docs/checkpoints-format.md describes the tokens.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from ..errorbound import Words
from ..errors import CorruptCheckpoint, UnsupportedState
from ..memory import BufferPool
from .frame import Record, encode, require
from .tensors import NUMPY_TYPES, array_tensor, check_storable, snapshot, words_of

Token = bool | int | float | str | None
MAX_DEPTH = 100
_PLAIN = (type(None), bool, float)
_KEYS = (*_PLAIN, int, str, bytes)
# Maximum size of the paths of tensors, relative to the tree: a long key can be part of many.
_MAX_GROWTH = 64
_CONTAINERS: dict[Any, str] = {
    dict: "d", collections.OrderedDict: "o", collections.Counter: "c",
    list: "l", tuple: "t", torch.Size: "z",
}  # fmt: skip
_BYTES: dict[Any, str] = {bytes: "b", io.BytesIO: "f"}
_SEQUENCES: dict[str, Callable[[Any], Any]] = {"l": list, "t": tuple, "z": torch.Size}


@dataclasses.dataclass(eq=False)
class Leaf:
    """One tensor of a state.

    Attributes:
        tag: Its token.
        tensor: The tensor.
        path: Its path, which is unique once the state's tree is complete.
        uses: The paths of all tensors that share its memory.
        base: The leaf that stores its elements: itself, or one whose memory contains it.
        number: Its index among the leaves that are stored.
        role: The field of :class:`Precision` that bounds its error; ``None`` if it is exact.
    """

    tag: str
    tensor: torch.Tensor
    path: str
    uses: list[str] = dataclasses.field(default_factory=list)
    base: Leaf = dataclasses.field(init=False)
    number: int = 0
    role: str | None = None

    @property
    def layout(self) -> tuple[Any, ...]:
        """The place of the elements in the tensor's storage."""
        return self.tensor.storage_offset(), self.tensor.shape, self.tensor.stride()

    @property
    def span(self) -> tuple[int, int]:
        """The half-open range from the first to the last element in the storage, in elements."""
        start, shape, strides = self.layout
        if self.tensor.numel() == 0:
            return start, start
        pairs = zip(shape, strides, strict=True)
        return start, start + 1 + sum((size - 1) * stride for size, stride in pairs)

    def words(self) -> Words:
        """Return its words (N,) on the CPU, which it may share."""
        return words_of(self.tensor.detach().cpu().contiguous())

    def tokens(self) -> tuple[Any, ...]:
        """Return the tokens that refer to its elements in its base."""
        if self.layout == self.base.layout:
            return self.tag, self.base.number
        offset, shape, strides = self.layout
        start = offset - self.base.tensor.storage_offset()
        return "v", self.base.number, start, len(shape), *shape, *strides


class Tree(Record, frozen=True, array_like=True):
    """A state without its tensors.

    Attributes:
        tokens: The structure; each tensor is the index of its leaf or a view of a leaf.
        blobs: Byte strings that tokens refer to by index.
    """

    tokens: list[Token]
    blobs: list[bytes]


def flatten(state: Any, buffers: BufferPool | None) -> tuple[Tree, list[Leaf]]:
    """Separate a state into structure and tensors.

    Args:
        state: The state.
        buffers: Memory for copies of the tensors, contiguous and on the CPU, so that training may
            continue; ``None`` for the tensors themselves.

    Returns:
        The structure, and the tensors; shared memory is stored once.

    Raises:
        UnsupportedState: A value has an unsupported type; the message names its path.
    """
    packed = list(tokens_of(state))
    leaves = _tie([token for token in packed if type(token) is Leaf])
    tree = make_tree(packed)
    names = TreeReader(tree).names
    tensors = [leaf.tensor for leaf in leaves]
    copies = tensors if buffers is None else snapshot(tensors, buffers)
    for leaf, copy in zip(leaves, copies, strict=True):
        leaf.path, leaf.tensor = names[leaf.number], copy
        del leaf.base  # itself: the copy's memory would wait for garbage collection
    return tree, leaves


def make_tree(packed: Iterable[Any]) -> Tree:
    """Return the tree of what :func:`tokens_of` yields."""
    tree = Tree([], [])
    for token in packed:
        if type(token) is Leaf:
            tree.tokens.extend(token.tokens())
        elif type(token) is list:
            tree.tokens.extend(token)
        elif type(token) is bytes:
            tree.tokens.append(len(tree.blobs))
            tree.blobs.append(token)
        else:
            tree.tokens.append(token)
    return tree


def tokens_of(value: Any, path: tuple[str, ...] = ()) -> Iterator[Any]:
    """Yield the tokens of a value.

    There is a :class:`Leaf` for a tensor, bytes instead of their number, and a list for the tokens
    of many numbers.

    Args:
        value: The value.
        path: Keys that lead to the value.
    """
    if _is_token(value):
        yield value
        return
    kind = type(value)
    where = ".".join(path)
    if kind in _CONTAINERS:
        yield from _pack_items(value, path)
    elif kind is str:
        if value.encode(errors="ignore").decode() != value:
            raise UnsupportedState("cannot store a surrogate", key=where)
        yield from ("s", value)
    elif kind in _BYTES:
        yield from (_BYTES[kind], value if kind is bytes else value.getvalue())
    elif kind is int:  # of more than 64 bits, as numpy's generators have them
        size = value.bit_length() // 8 + 1
        yield from ("i", value.to_bytes(size, "little", signed=True))
    elif isinstance(value, torch.Tensor):
        check_storable(value, where)
        # A lazily conjugated or negated view does not have its source's values.
        yield Leaf("x", value.resolve_conj().resolve_neg(), where)
    elif kind is np.ndarray:
        yield Leaf("a", array_tensor(value, where), where)
    elif isinstance(value, np.generic) and value.dtype.name in NUMPY_TYPES:
        yield from ("g", value.dtype.name, value.tobytes())
    else:
        advice = "; save its state_dict()" if hasattr(value, "state_dict") else ""
        name = f"{kind.__module__}.{kind.__name__}"
        raise UnsupportedState(f"cannot store a {name}{advice}", key=where)


def _is_token(value: Any) -> bool:
    """Return whether a value stands for itself among the tokens."""
    kind = type(value)
    return kind in _PLAIN or (kind is int and -(1 << 63) <= value < 1 << 64)


def _pack_items(value: Any, path: tuple[str, ...]) -> Iterator[Any]:
    tag = _CONTAINERS[type(value)]
    is_dict = isinstance(value, dict)
    if len(path) > MAX_DEPTH:
        raise UnsupportedState(f"expected at most {MAX_DEPTH} levels", key=".".join(path))
    yield from (tag, len(value))
    if not is_dict and all(map(_is_token, value)):  # often a long list of numbers
        yield list(value)
        return
    for key, item in value.items() if is_dict else enumerate(value):
        if type(key) not in _KEYS:
            message = f"cannot store a key of {type(key).__name__}"
            raise UnsupportedState(message, key=".".join((*path, str(key))))
        if is_dict:
            yield from tokens_of(key, path)
        yield from tokens_of(item, (*path, str(key)))
    if tag == "o":
        # torch keeps the versions of modules in this attribute of a state_dict.
        yield from tokens_of(getattr(value, "_metadata", None), (*path, "_metadata"))


def leaves_of(state: Any) -> Iterator[Leaf]:
    """Yield the tensors and arrays of a state, which are not copied."""
    return (token for token in tokens_of(state) if type(token) is Leaf)


def _tie(leaves: list[Leaf]) -> list[Leaf]:
    """Find the base of each leaf, and return the bases, numbered in their order."""
    by_layout: dict[Any, Leaf] = {}
    # The contiguous base that reaches farthest into each storage.
    widest: dict[Any, Leaf] = {}

    def order(leaf: Leaf) -> tuple[int, int, bool]:
        start, stop = leaf.span
        return start, -stop, not leaf.tensor.is_contiguous()

    for leaf in sorted(leaves, key=order):  # tensors that contain others first
        tensor = leaf.tensor
        # Empty tensors have no memory that could identify them.
        storage = tensor.untyped_storage().data_ptr() if tensor.numel() else leaf
        place = (storage, tensor.device, tensor.dtype)
        if place in widest and leaf.span[1] <= widest[place].span[1]:
            leaf.base = widest[place]
        else:
            leaf.base = by_layout.setdefault((place, leaf.layout), leaf)
        leaf.base.uses.append(leaf.path)
        if leaf.base is leaf and tensor.is_contiguous():
            widest[place] = leaf
    stored = [leaf for leaf in leaves if leaf.base is leaf]
    for number, leaf in enumerate(stored):
        leaf.number = number
    return stored


class TreeReader:
    """A state's structure, read from untrusted tokens.

    Errors other than :class:`CorruptCheckpoint` (TypeError, IndexError ...) are the caller's to
    map: see :func:`damage_named`.

    Args:
        tree: The tokens.

    Attributes:
        uses: The path of each tensor, array, or view, and the index of its leaf.
        names: The unique path of each leaf by index: of its first use that is not a view.
        parts: The parts found under each path of the last :meth:`build`.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.uses: list[tuple[str, int]] = []
        self.names: dict[int, str] = {}
        # The highest number after each name.
        taken: dict[str, int] = {}
        left = _MAX_GROWTH * len(encode(tree))

        def note(path: str, number: int, tag: str, *_: Any) -> None:
            nonlocal left
            left -= len(path)
            require(left >= 0, "the paths of its tensors are too long")
            self.uses.append((path, number))
            if tag != "v" and number not in self.names:
                name = path
                while name in taken:
                    taken[path] += 1
                    name = f"{path}#{taken[path]}"
                taken[name] = 1
                self.names[number] = name

        self.build(note)

    def build(self, tensor: Callable[..., Any], paths: Iterable[str] = ()) -> Any:
        """Build and return the state.

        Args:
            tensor: Returns a tensor, given its path, the index of its leaf, its tag, and for a view
                its sizes, strides and offset.
            paths: Where to find parts; keys that contain dots, or of several types, can produce the
                same path twice.
        """
        self.parts: dict[str, list[Any]] = {path: [] for path in paths}
        self._tensor = tensor
        self._tokens: list[Any] = self._tree.tokens[::-1]
        # Each is used once: a large integer in many places would take memory each time.
        self._blob = dict(enumerate(self._tree.blobs)).pop
        state = self._read_part(())
        del self._tensor  # it may refer to this reader, and to tensors
        require(not self._tokens, "expected the tree to end where its tokens end")
        return state

    def _read_part(self, keys: tuple[str, ...]) -> Any:
        """Read a value with a path of its own, unlike a key."""
        value = self._read(keys)
        if self.parts and (path := ".".join(keys)) in self.parts:
            self.parts[path].append(value)
        return value

    def _read(self, keys: tuple[str, ...]) -> Any:
        require(len(keys) <= MAX_DEPTH + 1, "the tree has too many levels")
        take = self._tokens.pop
        value: Any = take()
        if type(value) is not str:
            return value
        match tag := value:
            case "l" | "t" | "z":
                value = _SEQUENCES[value](self._read_list(keys))
            case "d" | "o" | "c":
                value = self._read_dict(value, keys)
            case "s":
                value = take()
            case "b" | "f":
                value = self._blob(take())
                value = io.BytesIO(value) if tag == "f" else value
            case "i":
                value = int.from_bytes(self._blob(take()), "little", signed=True)
            case "g":
                dtype = NUMPY_TYPES[take()]
                (value,) = np.frombuffer(self._blob(take()), dtype)
            case "x" | "a":
                value = self._tensor(".".join(keys), take(), value)
            case "v":
                number, offset, dim = take(), take(), take()
                sizes, strides = ([take() for _ in range(dim)] for _ in range(2))
                value = self._tensor(".".join(keys), number, value, sizes, strides, offset)
            case _:
                raise CorruptCheckpoint(f"expected the kind of a node, got {value!r}")
        return value

    def _read_list(self, keys: tuple[str, ...]) -> list[Any]:
        count = self._tokens.pop()
        ahead = itertools.islice(reversed(self._tokens), count)
        if not self.parts and str not in map(type, ahead):  # often a long list of numbers
            return [self._tokens.pop() for _ in range(count)]
        return [self._read_part((*keys, str(number))) for number in range(count)]

    def _read_dict(self, kind: str, keys: tuple[str, ...]) -> Any:
        made = {"o": collections.OrderedDict, "c": collections.Counter}.get(kind, dict)
        found: dict[Any, Any] = made()
        for _ in range(self._tokens.pop()):
            key = self._read(keys)
            require(type(key) in _KEYS, "expected a key of a plain type")
            found[key] = self._read_part((*keys, str(key)))
        if kind == "o":
            metadata = self._read_part((*keys, "_metadata"))
            if metadata is not None:
                found._metadata = metadata  # type: ignore[attr-defined]
        return found
