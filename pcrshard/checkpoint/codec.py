"""Encode and decode one tensor, exact or quantized."""

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

# Reuse a tensor's lattice while its bound is within this factor of a newly computed one.
_COARSEST = 1.1
_FINEST = 0.5
# Number of words from the middle of a tensor on which encodings are compared.
_SAMPLE = 1 << 13
# Below this fraction of changed words, a patch is always smaller than byte planes.
_FEW = 1 / 16
_SMALLEST_LOSSY = 256
# Upper bound on the expansion of a payload byte: zstd and pcodec reach 32 Ki and 75 Ki on zeros.
_MAX_RATIO = 1 << 17
_NO_ESCAPES = np.empty(0, np.int64)


@dataclasses.dataclass(frozen=True)
class Exact:
    """A tensor stored bit for bit.

    Attributes:
        spec: Type and shape.
        values: (N,) words.
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
    """A tensor stored within an error bound.

    Attributes:
        spec: Type and shape.
        lattice: The quantization grid.
        values: (N,) int32 codes on the grid; 0 where a value is escaped.
        patch: The patch that turns the words restored from codes into those of escaped values.
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
    """Return a sample of words from the middle of a tensor, without escapes."""
    start = max(len(tensor.values) - _SAMPLE, 0) // 2
    values = tensor.values[start : start + _SAMPLE]
    spec = TensorSpec(tensor.spec.dtype, (len(values),))
    if tensor.lattice is None:
        return Exact(spec, values)
    return Quantized(spec, tensor.lattice, values, b"")


@dataclasses.dataclass(frozen=True)
class Precision:
    """Error bounds by tensor role; ``None`` stores tensors of that role bit for bit.

    Attributes:
        weights: Bound for tensors outside optimizers that have two or more dimensions and at least
            256 floating-point values.
        first_moment: Bound for ``exp_avg`` and ``momentum_buffer`` of torch's Adam, AdamW, and SGD,
            with the same conditions on dimensions and size.
        second_moment: Bound for ``exp_avg_sq`` and ``max_exp_avg_sq``, likewise.
        exact: Path patterns (``"*.embedding.*"``) of tensors to store bit for bit.
    """

    weights: Bound | None = None
    first_moment: Bound | None = None
    second_moment: Bound | None = None
    exact: tuple[str, ...] = ()

    def bound_of(self, leaf: Leaf) -> Bound | None:
        """Return the bound for a tensor, or ``None`` if it is stored bit for bit."""
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
        """Describe the precision in words.

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
    """Return a tensor in its stored form, and the words (N,) that it restores to."""
    words = words_of(leaf.tensor)
    spec = spec_of(leaf.tensor)
    if bound is None:
        exact = Exact(spec, words.copy())  # without the memory of the whole state
        return exact, exact.values
    return quantized(words, spec, bound, before)


def quantized(
    words: Words, spec: TensorSpec, bound: Bound, before: Tensor | None
) -> tuple[Tensor, Words]:
    """Quantize words (N,), on the previous version's grid if it still fits the bound.

    A tensor stays exact if it has no standard deviation, and therefore no grid, or if most of its
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
    """The metadata of one tensor in a version file.

    Attributes:
        spec: Type and shape.
        lattice: Kind and parameters of the quantization grid; ``None`` for exact words.
        is_delta: Whether the main part is a difference from the parent's tensor. If the main part
            is empty, the two are equal.
        main_bytes: Size of the main part: the codes, or the words as byte planes.
        patch_bytes: Size of the patch that follows.
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
        # Checked before allocation: a payload cannot declare more than its bytes can hold.
        if self.spec.num_bytes > _MAX_RATIO * self.main_bytes and not self.is_empty_delta:
            raise ValueError(f"{self.main_bytes} bytes cannot hold the tensor")
        if self.lattice is not None and self.spec.dtype not in FLOAT_TYPES:
            raise ValueError("expected a lattice of a floating-point type")
        assert self.grid is None or self.lattice is not None

    @property
    def is_empty_delta(self) -> bool:
        """Whether the values equal the parent's."""
        return self.is_delta and self.main_bytes == 0

    @property
    def grid(self) -> Lattice | None:
        """The quantization grid."""
        return None if self.lattice is None else lattice_from(*self.lattice)

    @property
    def num_bytes(self) -> int:
        """Size of the payload in bytes."""
        return self.main_bytes + self.patch_bytes


def digest_of(words: Words) -> bytes:
    """Return the SHA-256 digest of words (N,)."""
    return hashlib.sha256(words.data).digest()


def encode_tensor(
    tensor: Tensor, reference: Tensor | None, digest: bytes = bytes(32)
) -> tuple[Entry, list[bytes]]:
    """Encode a tensor in its smallest form, estimated from a sample if the tensor is large.

    Args:
        tensor: The tensor.
        reference: The same tensor in the parent version, or ``None``.
        digest: SHA-256 of the tensor's restored bytes, for the entry.

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
    """Return whether a tensor can be stored as a difference from the reference."""
    return (tensor.spec, tensor.lattice) == (reference.spec, reference.lattice)


def _encode(tensor: Tensor, reference: Tensor | None) -> tuple[bool, bytes, bytes]:
    """Return whether the encoding is a delta, the main part, and the patch."""
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
        entry: The tensor's metadata.
        payload: The main part followed by the patch.
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
