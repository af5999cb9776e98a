"""One tensor: exact or quantized in memory, to bytes, and back."""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
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
    decode_integers,
    decode_planes,
    encode_integers,
    encode_planes,
    lattice_from,
    quantize,
    restore,
)
from ..errorbound import Quantized as LatticeCodes
from ..errors import BrokenChain
from .frame import Checksum, Count, Digest, Record
from .patch import apply_patch, encode_patch
from .tensors import TensorSpec, spec_of, words_of
from .typed_tree import FIRST_MOMENT, SECOND_MOMENT, WEIGHT, Leaf

# A tensor keeps its lattice while the lattice's bound is this close to the one it would get now.
_COARSEST = 1.1
_FINEST = 0.5
# Forms are compared on this many words from the middle of a tensor.
_SAMPLE = 1 << 13
# Below this fraction of changed words a patch is smaller than byte planes, whatever the changes.
_FEW = 1 / 16
_SMALLEST_LOSSY = 256
# One byte of payload never holds more: zstd and pcodec reach 32 and 75 Ki (measured on zeros).
_MAX_RATIO = 1 << 17
_NO_ESCAPES = np.empty(0, np.int64)


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
    patch = b""

    def restore(self) -> Words:
        """Return the tensor's words (N,)."""
        return self.values


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A tensor kept within an error bound.

    Attributes:
        spec: Type and shape.
        lattice: The quantization grid.
        values: (N,) int32 codes on it; 0 where a value is escaped.
        patch: What changes the words of the codes to those of escaped values.
    """

    spec: TensorSpec
    lattice: Lattice
    values: Any
    patch: bytes

    def restore(self) -> Words:
        """Return the tensor's words (N,)."""
        kind = FLOAT_TYPES[self.spec.dtype]
        codes = LatticeCodes(self.values, _NO_ESCAPES, np.empty(0, self.spec.word))
        words = restore(codes, kind, self.lattice)
        apply_patch(words, self.patch)
        return words


Tensor = Exact | Quantized


def middle(tensor: Tensor) -> Tensor:
    """Return a sample of a tensor: words from its middle, without escapes."""
    start = max(len(tensor.values) - _SAMPLE, 0) // 2
    values = tensor.values[start : start + _SAMPLE]
    spec = TensorSpec(tensor.spec.dtype, (len(values),))
    if tensor.lattice is None:
        return Exact(spec, values)
    return Quantized(spec, tensor.lattice, values, b"")


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

    def __str__(self) -> str:
        """Say in words what a store keeps how exactly.

        >>> str(Precision(weights=RelativeStd(0.005)))
        'weights within 0.5 % of their std, everything else bit for bit'
        """
        bounds = {
            "weights": self.weights,
            "first moments": self.first_moment,
            "second moments": self.second_moment,
        }
        parts = [f"{name} within {_in_words(bound)}" for name, bound in bounds.items() if bound]
        if self.exact:
            parts.append(f"{' '.join(self.exact)} bit for bit")
        return ", ".join([*parts, f"everything{' else' if parts else ''} bit for bit"])


def _in_words(bound: Bound) -> str:
    if isinstance(bound, RelativeStd):
        return f"{100 * bound.fraction:g} % of their std"
    if isinstance(bound, PointwiseRelative):
        return f"{100 * bound.rel_error_bound:g} % of each value"
    assert isinstance(bound, Absolute)
    return f"{bound.error_bound:g}"


def store_leaf(leaf: Leaf, bound: Bound | None, before: Tensor | None) -> tuple[Tensor, Words]:
    """Return a tensor as a version stores it, and the words (N,) that it restores to."""
    words = words_of(leaf.tensor)
    spec = spec_of(leaf.tensor)
    if bound is None:
        exact = Exact(spec, words.copy())  # without the memory of the whole state
        return exact, exact.values
    return quantized(words, spec, bound, before)


def quantized(
    words: Words, spec: TensorSpec, bound: Bound, before: Tensor | None
) -> tuple[Tensor, Words]:
    """Quantize words (N,) on the grid of the version before if that still fits the bound.

    A tensor without a standard deviation has no grid, and stays exact; so does one of which most
    values cannot be quantized.

    Returns:
        The tensor, and the words (N,) that it restores to.
    """
    float_type = FLOAT_TYPES[spec.dtype]
    lattice = bound.lattice(words, float_type)
    exact = Exact(spec, words.copy())
    if lattice is None:
        return exact, exact.values
    known = before.lattice if before is not None and before.spec == spec else None
    if known is not None and known.kind == lattice.kind:
        close = _FINEST <= known.error_bound / lattice.error_bound <= _COARSEST
        lattice = known if close else lattice
    restored = np.empty_like(words)
    found = quantize(words, float_type, lattice, restored)
    patch = b""
    if len(found.escape_index):
        bare = restored.copy()
        bare[found.escape_index] = 0  # code 0 stands for the value 0
        escapes = encode_patch(restored, bare)
        if escapes is None:
            return exact, exact.values
        patch = escapes[1]
    return Quantized(spec, lattice, found.codes, patch), restored


class Entry(Record, frozen=True, array_like=True):
    """What a version file says of a tensor.

    Attributes:
        spec: Type and shape.
        lattice: Kind and numbers of the quantization grid; ``None`` for exact words.
        is_delta: Whether the main part is a difference to the parent's tensor; without a main part
            it is equal.
        main_bytes: Bytes of the codes, or of the words as byte planes.
        patch_bytes: Bytes of the patch that follows.
        payload_crc: CRC-32C of both parts.
        digest: SHA-256 of the restored tensor's bytes.
    """

    spec: TensorSpec
    lattice: tuple[str, list[int | float]] | None
    is_delta: bool
    main_bytes: Count
    patch_bytes: Count
    payload_crc: Checksum
    digest: Digest

    def __post_init__(self) -> None:
        # Before memory is taken: a payload may not promise more than its bytes can hold.
        if self.spec.num_bytes > _MAX_RATIO * self.main_bytes and not self.is_empty_delta:
            raise ValueError(f"{self.main_bytes} bytes cannot hold the tensor")
        if self.lattice is not None and self.spec.dtype not in FLOAT_TYPES:
            raise ValueError("expected a lattice of a floating-point type")
        assert self.grid is None or self.lattice is not None

    @property
    def is_empty_delta(self) -> bool:
        """Whether the values are the parent's."""
        return self.is_delta and self.main_bytes == 0

    @property
    def grid(self) -> Lattice | None:
        """The quantization grid."""
        return None if self.lattice is None else lattice_from(*self.lattice)

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload."""
        return self.main_bytes + self.patch_bytes


def digest_of(words: Words) -> bytes:
    """SHA-256 of words (N,)."""
    return hashlib.sha256(words.data).digest()


def encode_tensor(
    tensor: Tensor, reference: Tensor | None, digest: bytes = bytes(32)
) -> tuple[Entry, list[bytes]]:
    """Encode a tensor in its smallest form; large tensors compare forms on a sample.

    Args:
        tensor: The tensor.
        reference: The same tensor in the parent version, or ``None``.
        digest: SHA-256 of its restored bytes, for the entry.

    Returns:
        The entry, and the two parts of the payload.
    """
    if reference is not None and not fits(tensor, reference):
        reference = None
    is_delta, main, patch = _encode(tensor, reference)
    lattice = tensor.lattice
    entry = Entry(
        spec=tensor.spec,
        lattice=None if lattice is None else (lattice.kind, lattice.numbers()),
        is_delta=is_delta,
        main_bytes=len(main),
        patch_bytes=len(patch),
        payload_crc=crc32c(patch, crc32c(main)),
        digest=digest,
    )
    return entry, [main, patch]


def fits(tensor: Tensor, reference: Tensor) -> bool:
    """Whether a tensor can be stored as a difference to the reference."""
    return (tensor.spec, tensor.lattice) == (reference.spec, reference.lattice)


def _encode(tensor: Tensor, reference: Tensor | None) -> tuple[bool, bytes, bytes]:
    """Return whether it is a delta, the main part, and the patch."""
    if reference is None:
        return False, _pack(tensor, None), tensor.patch
    if np.array_equal(tensor.values, reference.values):
        return True, b"", tensor.patch
    smallest = b""
    if tensor.lattice is None:
        found = encode_patch(tensor.values, reference.values.copy())
        if found is not None:
            changed, smallest = found
            if changed < _FEW * len(tensor.values):
                return True, b"", smallest
    part, base = middle(tensor), middle(reference)
    is_delta = len(_pack(part, base)) < len(_pack(part, None))
    main = _pack(tensor, reference if is_delta else None)
    if smallest and len(smallest) < len(main):
        return True, b"", smallest
    return is_delta, main, tensor.patch


def _pack(tensor: Tensor, reference: Tensor | None) -> bytes:
    values = tensor.values
    if tensor.lattice is None:
        return encode_planes(values if reference is None else values ^ reference.values)
    return encode_integers(values if reference is None else values - reference.values)


def decode_tensor(entry: Entry, payload: memoryview, reference: Tensor | None) -> Tensor:
    """Decode a tensor.

    Args:
        entry: What the file says of it.
        payload: Both parts.
        reference: The tensor in the parent version, for a delta.

    Raises:
        BrokenChain: The reference is missing, or has another type, shape or grid.
        CorruptCheckpoint: The payload is damaged.
    """
    main, patch = payload[: entry.main_bytes], bytes(payload[entry.main_bytes :])
    spec, lattice = entry.spec, entry.grid
    base: Any = None
    if entry.is_delta:
        if reference is None or (reference.spec, reference.lattice) != (spec, lattice):
            raise BrokenChain("the parent has no such tensor of this type, shape and grid")
        base = reference.values
    if entry.is_empty_delta:
        values = base
    elif lattice is not None:
        values = decode_integers(main, spec.num_words, np.int32)
        values = values if base is None else np.add(values, base, out=values)
    else:
        values = decode_planes(main, spec.num_words, spec.word)
        values = values if base is None else values ^ base
    if lattice is not None:
        return Quantized(spec, lattice, values, patch)
    if patch:
        values = values.copy()
        apply_patch(values, patch)
    return Exact(spec, values)
