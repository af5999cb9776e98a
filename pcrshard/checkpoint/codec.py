"""Encode and decode one tensor, exact or quantized."""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import itertools
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..checksum import crc32c
from ..errorbound import (
    FLOAT_TYPES,
    Bound,
    Lattice,
    PointwiseRelative,
    RelativeStd,
    Words,
    decode_integers,
    decode_planes,
    dequantize,
    encode_integers,
    encode_planes,
    lattice_from,
    quantize,
)
from ..errors import BrokenChain
from ..memory import borrow_array
from .frame import MAX_TEXT, Checksum, Count, Digest, Record
from .patch import apply_patch, encode_patch
from .tensors import TensorSpec, spec_of
from .typed_tree import Leaf

# Reuse a tensor's lattice while its bound is within this factor of a newly computed one.
_COARSEST = 1.1
_FINEST = 0.5
# Number of words from the middle of a tensor on which encodings are compared.
_SAMPLE = 1 << 13
# A patch below this fraction of the words' size is smaller than byte planes would be.
_FEW = 1 / 16
_SMALLEST_LOSSY = 256
# The roles of tensors, which are fields of a precision, and their names.
ROLES = {
    "weights": "weights",
    "first_moment": "first moments",
    "second_moment": "second moments",
}
# Number of tensors of a role that are listed by name.
_NAMED = 4
# Upper bound on the expansion of a payload byte: zstd and pcodec reach 32 Ki and, on codes of
# float64, 158 Ki.
_MAX_RATIO = 1 << 18


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in its stored form: words bit for bit, or codes within an error bound.

    Attributes:
        spec: Type and shape.
        lattice: The quantization grid; ``None`` for exact words.
        values: (N,) words; with a lattice, (N,) integer codes, 0 where a value is escaped.
        patch: With a lattice, the patch that turns the words of the codes into those of escaped
            values.
        digest: SHA-256 of the restored tensor's bytes.
    """

    spec: TensorSpec
    lattice: Lattice | None
    values: Any
    patch: bytes
    digest: bytes

    def narrowed(self) -> Tensor:
        """Return the tensor with its codes in the narrowest type, as a reference."""
        if self.lattice is None or not len(self.values):
            return self
        # One more, because the magnitude of the lowest integer has no place in its own type.
        lowest = -1 - max(-int(self.values.min()), int(self.values.max()))
        return dataclasses.replace(self, values=self.values.astype(np.min_scalar_type(lowest)))

    def to_words(self) -> Words:
        """Return the tensor's words (N,)."""
        words: Words = self.values
        if self.lattice is not None:
            words = dequantize(self.values, FLOAT_TYPES[self.spec.dtype], self.lattice)
            apply_patch(words, self.patch)
        return words


@dataclasses.dataclass(frozen=True)
class Precision:
    """Error bounds by tensor role; ``None`` stores tensors of that role bit for bit.

    Only recognized tensors (see docs/checkpoints.md) that have two or more dimensions and at least
    256 floating-point values are lossy.

    Attributes:
        weights: Bound for parameters in the state of a module.
        first_moment: Bound for ``exp_avg`` and ``momentum_buffer`` of torch's Adam, AdamW, and SGD.
        second_moment: Bound for their ``exp_avg_sq`` and ``max_exp_avg_sq``.
        lossy: Path patterns (``"generator.*"``) of more tensors to store as weights.
        exact: Path patterns (``"*.embedding.*"``) of tensors to store bit for bit, under any of
            the paths of tied tensors; they take precedence.

    Raises:
        TypeError: A bound has another type, or ``lossy`` or ``exact`` is a single string.
    """

    weights: Bound | None = None
    first_moment: Bound | None = None
    second_moment: Bound | None = None
    lossy: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("lossy", "exact"):
            patterns = getattr(self, name)
            if isinstance(patterns, str):
                raise TypeError(f"expected a tuple of patterns as {name}, got {patterns!r}")
        for name in ROLES:
            bound = getattr(self, name)
            if not isinstance(bound, Bound | None):
                raise TypeError(f"expected a bound such as RelativeStd as {name}, got {bound!r}")

    @property
    def is_lossy(self) -> bool:
        """Whether there is a bound."""
        return any(getattr(self, role) for role in ROLES)

    def role_of(self, leaf: Leaf) -> str | None:
        """Return the role whose bound applies to a tensor, or ``None`` if it is stored exactly."""
        tensor = leaf.tensor
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.dim() < 2 or tensor.numel() < _SMALLEST_LOSSY or dtype not in FLOAT_TYPES:
            return None
        if _matches(leaf, self.exact):
            return None
        role = leaf.role or ("weights" if _matches(leaf, self.lossy) else "")
        return role if role and getattr(self, role) else None

    def bound_of(self, leaf: Leaf) -> Bound | None:
        """Return the bound for a tensor, or ``None`` if it is stored bit for bit."""
        role = self.role_of(leaf)
        bound: Bound | None = getattr(self, role) if role else None
        return bound

    def __str__(self) -> str:
        """Describe the precision in words.

        >>> str(Precision(weights=RelativeStd(0.005)))
        'weights within 0.5 % of their std, everything else bit for bit'
        """
        bounds = {name: getattr(self, role) for role, name in ROLES.items()}
        parts = [f"{name} within {_in_words(bound)}" for name, bound in bounds.items() if bound]
        if self.lossy:
            parts.append(f"{' '.join(self.lossy)} like weights")
        if self.exact:
            parts.append(f"{' '.join(self.exact)} bit for bit")
        text = ", ".join([*parts, f"everything{' else' if parts else ''} bit for bit"])
        return textwrap.shorten(text, MAX_TEXT)  # as a manifest holds it

    def lossy_part(self, leaves: Sequence[Leaf]) -> str:
        """List the lossy tensors of a state, with their fraction of its bytes."""
        total = sum(leaf.tensor.nbytes for leaf in leaves) or 1
        parts = []
        for role, name in ROLES.items():
            found = [leaf for leaf in leaves if self.role_of(leaf) == role]
            if found:
                share = sum(leaf.tensor.nbytes for leaf in found) / total
                named = [leaf.path for leaf in found[:_NAMED]]
                if len(found) > _NAMED:
                    named.append(f"... {len(found)} tensors")
                parts.append(f"{name}, {share:.1%} of the bytes ({', '.join(named)})")
        return "; ".join(parts) or "no tensor"


def _matches(leaf: Leaf, patterns: Iterable[str]) -> bool:
    pairs = itertools.product(leaf.uses, patterns)
    return any(fnmatch.fnmatchcase(path, pattern) for path, pattern in pairs)


def _in_words(bound: Bound) -> str:
    if isinstance(bound, RelativeStd):
        return f"{100 * bound.fraction:g} % of their std"
    if isinstance(bound, PointwiseRelative):
        return f"{100 * bound.rel_error_bound:g} % of each value"
    return f"{bound.error_bound:g}"


def store_leaf(leaf: Leaf, bound: Bound | None, before: Tensor | None) -> Tensor:
    """Return a tensor of a state in its stored form.

    It is exact without a bound, or if most of its values would be escaped.

    Args:
        leaf: The tensor.
        bound: Its error bound.
        before: The same tensor in the previous version, whose grid is used if it still fits.
    """
    words, spec = leaf.words(), spec_of(leaf.tensor)
    lattice = None if bound is None else bound.lattice(words, FLOAT_TYPES[spec.dtype])
    if lattice is not None:
        known = before.lattice if before is not None and before.spec == spec else None
        if known is not None and known.kind == lattice.kind:
            close = _FINEST <= known.error_bound / lattice.error_bound <= _COARSEST
            lattice = known if close else lattice
        restored = borrow_array(words.nbytes).view(words.dtype)
        codes = quantize(words, FLOAT_TYPES[spec.dtype], lattice, restored)
        patch: bytes | None = b""
        if len(codes.escape_index):
            bare = restored.copy()
            bare[codes.escape_index] = 0  # code 0 stands for the value 0
            patch, _ = encode_patch(restored, bare)
        if patch is not None:
            return Tensor(spec, lattice, codes.codes, patch, digest_of(restored))
    return Tensor(spec, None, words, b"", digest_of(words))


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
        is_equal = self.is_delta and self.main_bytes == 0
        if self.spec.num_bytes > _MAX_RATIO * self.main_bytes and not is_equal:
            raise ValueError(f"{self.main_bytes} bytes cannot hold the tensor")
        if self.grid is not None and self.spec.dtype not in FLOAT_TYPES:
            raise ValueError("expected a lattice of a floating-point type")

    @property
    def grid(self) -> Lattice | None:
        """The quantization grid."""
        return None if self.lattice is None else lattice_from(*self.lattice)

    @property
    def num_bytes(self) -> int:
        """Size of the payload in bytes."""
        return self.main_bytes + self.patch_bytes


def largest_entry(spec: TensorSpec, *, is_lossy: bool) -> Entry:
    """Return an entry as large as one of a tensor may get, which is a delta."""
    lattice: tuple[str, list[int | float]] | None = ("linear", [1.0, 1.0]) if is_lossy else None
    most = (1 << 48) - 1
    return Entry(spec, lattice, True, most, most, (1 << 32) - 1, bytes(32))


def digest_of(words: Words) -> bytes:
    """Return the SHA-256 digest of words (N,)."""
    return hashlib.sha256(words.data).digest()


def encode_tensor(tensor: Tensor, reference: Tensor | None) -> tuple[Entry, list[bytes]]:
    """Encode a tensor in its smallest form, estimated from a sample if the tensor is large.

    Args:
        tensor: The tensor.
        reference: The same tensor in the parent version, or ``None``. Its values may change.

    Returns:
        The entry, and the two parts of the payload.
    """
    is_delta, main, patch = _encode(tensor, reference)
    lattice = tensor.lattice
    entry = Entry(
        spec=tensor.spec,
        lattice=None if lattice is None else (lattice.kind, lattice.numbers()),
        is_delta=is_delta,
        main_bytes=len(main),
        patch_bytes=len(patch),
        payload_crc=crc32c(patch, crc32c(main)),
        digest=tensor.digest,
    )
    return entry, [main, patch]


def _encode(tensor: Tensor, reference: Tensor | None) -> tuple[bool, bytes, bytes]:
    """Return whether the encoding is a delta, the main part, and the patch."""
    values = tensor.values
    if reference is None or (reference.spec, reference.lattice) != (tensor.spec, tensor.lattice):
        return False, _pack(values), tensor.patch
    # Different codes may restore to the same words.
    if tensor.digest == reference.digest and np.array_equal(values, reference.values):
        return True, b"", tensor.patch
    patch = None
    if tensor.lattice is None:
        patch, _ = encode_patch(values, reference.values.copy())
        if patch is not None and len(patch) <= _FEW * values.nbytes:
            return True, b"", patch
        difference = np.bitwise_xor(values, reference.values, out=reference.values)
    else:
        difference = np.subtract(values, reference.values, dtype=np.int32)
    start = max(len(values) - _SAMPLE, 0) // 2
    part = slice(start, start + _SAMPLE)
    is_delta = len(_pack(difference[part])) < len(_pack(values[part]))
    main = _pack(difference if is_delta else values)
    if patch is not None and len(patch) < len(main):
        return True, b"", patch
    return is_delta, main, tensor.patch


def _pack(values: Any) -> bytes:
    if values.dtype.kind == "i":
        return encode_integers(values.astype(np.int32, copy=False))
    return encode_planes(values)


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
    if entry.is_delta and not main:
        values = base
    elif lattice is not None:
        values = decode_integers(main, spec.num_words, np.int32)
        values = values if base is None else np.add(values, base, out=values)
    else:
        values = decode_planes(main, spec.num_words, spec.word)
        values = values if base is None else values ^ base
    if patch and lattice is None:
        values = values.copy()
        apply_patch(values, patch)
        patch = b""
    return Tensor(spec, lattice, values, patch, entry.digest)
