"""One tensor: exact or quantized in memory, to bytes, and back."""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import Any

import numpy as np

from ..checksum import crc32c
from ..errorbound import (
    FLOAT_TYPES,
    Absolute,
    Bound,
    Lattice,
    PointwiseRelative,
    RelativeStd,
    Words,
    decode_index,
    decode_integers,
    decode_planes,
    decode_words,
    encode_index,
    encode_integers,
    encode_planes,
    encode_words,
    find_changes,
    lattice_from,
    quantize,
    restore,
)
from ..errorbound import Quantized as LatticeCodes
from ..errors import BrokenChain
from .frame import MAX_RATIO, require
from .tensors import TensorSpec, spec_from
from .typed_tree import FIRST_MOMENT, SECOND_MOMENT, WEIGHT, Leaf

INTRA = "intra"  # on its own
DELTA = "delta"  # difference of codes, or exclusive or of words, to the reference
SPARSE = "sparse"  # exclusive or of the words that differ
SAME = "same"  # equal to the reference
CODERS = (INTRA, DELTA, SPARSE, SAME)
# A tensor keeps its lattice while the lattice's bound is this close to the one it would get now.
_COARSEST = 1.1
_FINEST = 0.5
# Coders are compared on this many words from the middle of a tensor.
_SAMPLE = 1 << 15
# Above this fraction of changed words the sparse form is not tried: it is larger.
_SPARSE_FRACTION = 0.1
_SMALLEST_LOSSY = 256
_MAX_PATH = 4096
_NONE = np.empty(0, np.int64)


@dataclasses.dataclass(frozen=True)
class Exact:
    """A tensor kept bit for bit.

    Attributes:
        spec: Type and shape.
        values: (N,) its words.
    """

    spec: TensorSpec
    values: Words
    lattice = None

    def restore(self) -> Words:
        """Return the tensor's words (N,)."""
        return self.values

    def middle(self) -> Exact:
        """Return a sample of the tensor."""
        return Exact(*_middle(self.spec, self.values))


@dataclasses.dataclass(frozen=True)
class Quantised:
    """A tensor kept within an error bound.

    Attributes:
        spec: Type and shape.
        lattice: The quantization grid.
        values: (N,) int32 codes on it; 0 where a value is escaped.
        escape_index, escape_words: (E,) places and words of values that are kept bit for bit.
    """

    spec: TensorSpec
    lattice: Lattice
    values: Any
    escape_index: Any
    escape_words: Any

    def restore(self) -> Words:
        """Return the tensor's words (N,)."""
        codes = LatticeCodes(self.values, self.escape_index, self.escape_words)
        return restore(codes, FLOAT_TYPES[self.spec.dtype], self.lattice)

    def middle(self) -> Quantised:
        """Return a sample of the tensor, without its escapes."""
        spec, values = _middle(self.spec, self.values)
        return Quantised(spec, self.lattice, values, _NONE, np.empty(0, spec.word))


Tensor = Exact | Quantised


def _middle(spec: TensorSpec, values: Any) -> tuple[TensorSpec, Any]:
    start = max(len(values) - _SAMPLE, 0) // 2
    part = values[start : start + _SAMPLE]
    return TensorSpec(spec.dtype, (len(part),)), part


@dataclasses.dataclass(frozen=True)
class Precision:
    """The error that is allowed, by what a tensor is; ``None`` keeps it bit for bit.

    Attributes:
        weights: For tensors outside of optimizers, of two or more dimensions and at least 256
            floating-point values.
        first_moment: For such ``exp_avg`` and ``momentum_buffer`` of torch's Adam, AdamW and SGD.
        second_moment: For their ``exp_avg_sq`` and ``max_exp_avg_sq``.
        exact: Patterns of paths (``"*.embedding.*"``) of tensors that are kept bit for bit.
    """

    weights: Bound | None = None
    first_moment: Bound | None = None
    second_moment: Bound | None = None
    exact: tuple[str, ...] = ()

    def bound_of(self, leaf: Leaf) -> Bound | None:
        """Return the bound of a tensor, ``None`` if it is kept bit for bit."""
        tensor = leaf.tensor
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.dim() < 2 or tensor.numel() < _SMALLEST_LOSSY or dtype not in FLOAT_TYPES:
            return None
        if any(fnmatch.fnmatchcase(leaf.path, pattern) for pattern in self.exact):
            return None
        by_role = {
            WEIGHT: self.weights,
            FIRST_MOMENT: self.first_moment,
            SECOND_MOMENT: self.second_moment,
        }
        return by_role.get(leaf.role)


def describe(precision: Precision) -> str:
    """Say in words what a store keeps how exactly.

    >>> describe(Precision(weights=RelativeStd(0.005)))
    'weights within 0.5 % of their std, everything else bit for bit'
    """
    bounds: dict[str, Bound | None] = {
        "weights": precision.weights,
        "first moments": precision.first_moment,
        "second moments": precision.second_moment,
    }
    parts = [f"{name} within {_in_words(bound)}" for name, bound in bounds.items() if bound]
    if precision.exact:
        parts.append(f"{' '.join(precision.exact)} bit for bit")
    return ", ".join([*parts, f"everything{' else' if parts else ''} bit for bit"])


def _in_words(bound: Bound) -> str:
    if isinstance(bound, RelativeStd):
        return f"{100 * bound.fraction:g} % of their std"
    if isinstance(bound, PointwiseRelative):
        return f"{100 * bound.rel_error_bound:g} % of each value"
    assert isinstance(bound, Absolute)
    return f"{bound.error_bound:g}"


def quantised(
    words: Words,
    spec: TensorSpec,
    bound: Bound,
    before: Tensor | None,
    restored: Words | None = None,
) -> Tensor:
    """Quantize words (N,) on the grid of the version before if that still fits the bound.

    A tensor without a deviation has no grid, and stays exact. What the tensor restores to is
    written to ``restored`` (N,).
    """
    float_type = FLOAT_TYPES[spec.dtype]
    lattice = bound.lattice(words, float_type)
    if lattice is None:
        if restored is not None:
            restored[:] = words
        return Exact(spec, words.copy())
    known = before.lattice if before is not None and before.spec == spec else None
    if known is not None and known.kind == lattice.kind:
        close = _FINEST <= known.error_bound / lattice.error_bound <= _COARSEST
        lattice = known if close else lattice
    found = quantize(words, float_type, lattice, restored)
    return Quantised(spec, lattice, found.codes, found.escape_index, found.escape_words)


@dataclasses.dataclass(frozen=True)
class Entry:
    """What a version file says of a tensor.

    Attributes:
        path: Its keys in the state, joined by dots.
        spec: Type and shape.
        lattice: The quantization grid; ``None`` for exact words.
        coder: One of :data:`CODERS`.
        count: Number of escapes, or of changes for ``sparse``.
        sizes: Bytes of the three parts of the payload: main, places, words.
        payload_crc: CRC-32C of the payload.
        content_crc: CRC-32C of the restored tensor's bytes.
        start: Where the payload starts, in bytes after the header.
    """

    path: str
    spec: TensorSpec
    lattice: Lattice | None
    coder: str
    count: int
    sizes: tuple[int, int, int]
    payload_crc: int
    content_crc: int
    start: int = 0

    @property
    def stop(self) -> int:
        """Where the payload ends."""
        return self.start + sum(self.sizes)

    def pack(self) -> dict[str, Any]:
        """Return plain values for the header."""
        lattice = None if self.lattice is None else [self.lattice.kind, self.lattice.numbers()]
        return {
            "path": self.path,
            "dtype": self.spec.dtype,
            "shape": list(self.spec.shape),
            "lattice": lattice,
            "coder": self.coder,
            "count": self.count,
            "sizes": list(self.sizes),
            "payload_crc": self.payload_crc,
            "content_crc": self.content_crc,
        }


_ENTRY_KEYS = {
    "path", "dtype", "shape", "lattice", "coder", "count", "sizes", "payload_crc", "content_crc",
}  # fmt: skip


def parse_entry(raw: Any, start: int) -> Entry:
    """Check an entry of a header, which may be hostile.

    Raises:
        CorruptCheckpoint: A rule of the format is broken.
    """
    require(isinstance(raw, dict) and raw.keys() == _ENTRY_KEYS, "expected a tensor's entry")
    path, sizes, count = raw["path"], raw["sizes"], raw["count"]
    require(isinstance(path, str) and len(path) <= _MAX_PATH, "expected a tensor's path")
    spec = spec_from(raw["dtype"], raw["shape"])
    lattice = None
    if raw["lattice"] is not None:
        pair = raw["lattice"]
        require(isinstance(pair, list) and len(pair) == 2, "expected a lattice")
        require(spec.dtype in FLOAT_TYPES, "expected a lattice of a floating-point type")
        lattice = lattice_from(*pair)
    coder = raw["coder"]
    known = coder in CODERS and not (coder == SPARSE and lattice is not None)
    require(known, f"expected a coder of {CODERS}, got {coder!r}")
    require(isinstance(sizes, list) and len(sizes) == 3, "expected three sizes")
    require(all(map(is_count, (*sizes, count))), "expected sizes and a count")
    checksums = (raw["payload_crc"], raw["content_crc"])
    require(all(is_count(crc) and crc < 1 << 32 for crc in checksums), "expected two checksums")
    _check_ratio(spec, coder, count, sizes)
    main, index, words = sizes
    return Entry(path, spec, lattice, coder, count, (main, index, words), *checksums, start)


def _check_ratio(spec: TensorSpec, coder: str, count: int, sizes: list[int]) -> None:
    """Refuse an entry that promises more than its bytes can hold, before memory is taken."""
    main, index, words = sizes
    if coder in (SAME, SPARSE):
        require(main == 0, f"expected no main part, got {main} bytes")
    else:
        require(spec.num_bytes <= MAX_RATIO * main, f"{main} bytes cannot hold the tensor")
    require(count <= spec.num_words, f"expected fewer escapes than values, got {count}")
    require(8 * count <= MAX_RATIO * min(index, words), f"too few bytes for {count} values")


def is_count(value: Any) -> bool:
    """Whether a value is an integer that a file may state as a size."""
    return type(value) is int and 0 <= value < 1 << 48


def fits(tensor: Tensor, reference: Tensor | None) -> bool:
    """Whether a tensor can be stored as a difference to the reference."""
    same_shape = reference is not None and reference.spec == tensor.spec
    return same_shape and reference.lattice == tensor.lattice  # type: ignore[union-attr]


def encode(
    path: str, tensor: Tensor, reference: Tensor | None, content_crc: int = 0
) -> tuple[Entry, list[bytes]]:
    """Encode a tensor in its smallest form; large tensors compare coders on a sample.

    Args:
        path: Its path, for the entry.
        tensor: The tensor.
        reference: The same tensor in the parent version, or ``None``.
        content_crc: CRC-32C of its restored bytes, for the entry.

    Returns:
        The entry, and the parts of the payload.
    """
    coder, parts, count = _encode(tensor, reference if fits(tensor, reference) else None)
    main, index, words = parts
    sizes = (len(main), len(index), len(words))
    checksum = crc32c(words, crc32c(index, crc32c(main)))
    entry = Entry(
        path, tensor.spec, tensor.lattice, coder, count, sizes, checksum, content_crc
    )  # fmt: skip
    return entry, parts


def _encode(tensor: Tensor, reference: Tensor | None) -> tuple[str, list[bytes], int]:
    if isinstance(tensor, Quantised):
        coder = _coder(tensor, reference)
        main = b"" if coder == SAME else encode_integers(_difference(coder, tensor, reference))
        escapes = [encode_index(tensor.escape_index), encode_words(tensor.escape_words)]
        return coder, [main, *escapes], len(tensor.escape_index)
    sparse = None
    if reference is not None:
        changed = int(np.count_nonzero(tensor.values != reference.values))
        if changed == 0:
            return SAME, [b"", b"", b""], 0
        if changed <= _SPARSE_FRACTION * len(tensor.values):
            index, changes = find_changes(tensor.values, reference.values)
            sparse = [b"", encode_index(index), encode_words(changes)]
            if 16 * changed < len(tensor.values):
                return SPARSE, sparse, changed  # planes need more for the places alone
    coder = _coder(tensor, reference)
    planes = encode_planes(_difference(coder, tensor, reference))
    if sparse is not None and sum(map(len, sparse)) < len(planes):
        return SPARSE, sparse, changed
    return coder, [planes, b"", b""], 0


def _coder(tensor: Tensor, reference: Tensor | None) -> str:
    if reference is None:
        return INTRA
    if np.array_equal(tensor.values, reference.values):
        return SAME
    part, base = tensor.middle(), reference.middle()
    pack = encode_integers if isinstance(tensor, Quantised) else encode_planes
    sizes = {coder: len(pack(_difference(coder, part, base))) for coder in (DELTA, INTRA)}
    return min(sizes, key=sizes.__getitem__)


def _difference(coder: str, tensor: Tensor, reference: Tensor | None) -> Any:
    if coder == INTRA:
        return tensor.values
    assert reference is not None
    if isinstance(tensor, Quantised):
        return tensor.values - reference.values
    return tensor.values ^ reference.values


def decode(entry: Entry, payload: memoryview, reference: Tensor | None) -> Tensor:
    """Decode a tensor.

    Args:
        entry: What the file says of it.
        payload: The three parts.
        reference: The tensor in the version that a delta refers to.

    Raises:
        BrokenChain: The reference is missing, or has another type, shape or grid.
        CorruptCheckpoint: The payload is damaged.
    """
    first, second, _ = entry.sizes
    main, index = payload[:first], payload[first : first + second]
    words = payload[first + second :]
    spec, coder = entry.spec, entry.coder
    base: Any = None
    if coder != INTRA:
        if reference is None or (reference.spec, reference.lattice) != (spec, entry.lattice):
            raise BrokenChain("the parent has no such tensor of this type, shape and grid")
        base = reference.values
    if entry.lattice is not None:
        values = base if coder == SAME else decode_integers(main, spec.num_words, np.int32)
        if coder == DELTA:
            np.add(values, base, out=values)
        places = decode_index(index, entry.count, spec.num_words)
        escapes = decode_words(words, entry.count, spec.word)
        return Quantised(spec, entry.lattice, values, places, escapes)
    if coder == SPARSE:
        values = base.copy()
        places = decode_index(index, entry.count, spec.num_words)
        values[places] ^= decode_words(words, entry.count, spec.word)
    elif coder == SAME:
        values = base
    else:
        values = decode_planes(main, spec.num_words, spec.word)
        values = values if coder == INTRA else values ^ base
    return Exact(spec, values)
