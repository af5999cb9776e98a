"""One tensor: from its words to what is stored, to bytes, and back.

What is stored (:class:`Held`) depends on the bound and on the lattice of the version before, never
on the order of the chain; how it is written (:func:`encode`) depends on the reference. So every
order restores the same bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ..errorbound import (
    FLOAT_TYPES,
    Bound,
    Codes,
    Lattice,
    Quantised,
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
    quantise,
    restore,
)
from ..errors import BrokenChain, CorruptCheckpoint
from .tensors import TensorSpec

INTRA = "intra"  # on its own
DELTA = "delta"  # difference of codes, or exclusive or of words, to the reference
SPARSE = "sparse"  # exclusive or of the words that differ
SAME = "same"  # equal to the reference
CODERS = (INTRA, DELTA, SPARSE, SAME)
# A lattice is kept while its bound is that close to the one that the tensor asks for now.
_COARSEST = 1.1
_FINEST = 0.5
# Coders are compared on so many words from the middle of a tensor.
_SAMPLE = 1 << 15
# Above this share of changed words the sparse form is not tried: it is larger.
_SPARSE_SHARE = 0.1
_SMALLEST_LOSSY = 256


@dataclasses.dataclass(frozen=True)
class Held:
    """What a version holds of a tensor: codes on a lattice, or words.

    Attributes:
        spec: Type and shape.
        lattice: ``None`` for words.
        codes: (N,) int32, with a lattice.
        words: (N,) the words, without a lattice.
        escape_index, escape_words: Values beside the lattice, kept bit for bit.
    """

    spec: TensorSpec
    lattice: Lattice | None = None
    codes: Codes | None = None
    words: Words | None = None
    escape_index: Any = None
    escape_words: Any = None

    def restore(self) -> Words:
        """The tensor's words (N,)."""
        if self.lattice is None:
            assert self.words is not None
            return self.words
        assert self.codes is not None
        quantised = Quantised(self.codes, self.escape_index, self.escape_words)
        return restore(quantised, FLOAT_TYPES[self.spec.dtype], self.lattice)

    @property
    def values(self) -> Any:
        """The codes or words (N,), of which deltas are made."""
        return self.words if self.lattice is None else self.codes

    def fits(self, reference: Held | None) -> bool:
        """Whether a delta to the reference is possible."""
        if reference is None or reference.spec != self.spec:
            return False
        return reference.lattice == self.lattice


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A tensor as bytes.

    Attributes:
        coder: One of :data:`CODERS`.
        parts: The main part; index and words of escapes, or of changes for :data:`SPARSE`.
        count: Number of escapes, or of changes.
    """

    coder: str
    parts: tuple[bytes, bytes, bytes]
    count: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(len(part) for part in self.parts)


def hold(
    words: Words,
    spec: TensorSpec,
    bound: Bound | None,
    before: Held | None,
) -> Held:
    """What a version holds of a tensor.

    Args:
        words: (N,) all values.
        spec: Type and shape.
        bound: The error that is allowed; ``None`` for none.
        before: The tensor in the version before, whose lattice is kept if it still fits.

    Returns:
        Codes where a bound applies and they are smaller than the words; otherwise a copy of
        the words, which then do not keep the memory of the whole state.
    """
    on_lattice = _hold_codes(words, spec, bound, before)
    return Held(spec, words=words.copy()) if on_lattice is None else on_lattice


def _hold_codes(
    words: Words,
    spec: TensorSpec,
    bound: Bound | None,
    before: Held | None,
) -> Held | None:
    lossy = bound is not None and spec.dtype in FLOAT_TYPES
    if not lossy or len(spec.shape) < 2 or len(words) < _SMALLEST_LOSSY:
        return None
    assert bound is not None
    lattice = _lattice(words, spec, bound, before)
    if lattice is None:
        return None
    quantised = quantise(words, FLOAT_TYPES[spec.dtype], lattice)
    index = quantised.escape_index
    on_lattice = Held(
        spec,
        lattice,
        quantised.codes,
        escape_index=index,
        escape_words=quantised.escape_words,
    )
    exact_bytes = _sample_bytes(Held(spec, words=words), before)
    return on_lattice if _sample_bytes(on_lattice, before) < exact_bytes else None


def _lattice(
    words: Words,
    spec: TensorSpec,
    bound: Bound,
    before: Held | None,
) -> Lattice | None:
    wanted = bound.lattice(words, FLOAT_TYPES[spec.dtype])
    known = before.lattice if before is not None and before.spec == spec else None
    if wanted is None or known is None or known.kind != wanted.kind:
        return wanted
    share = known.error_bound / wanted.error_bound
    return known if _FINEST <= share <= _COARSEST else wanted


def _sample_bytes(held: Held, reference: Held | None) -> int:
    """Bytes of the middle of a tensor by its best coder."""
    part = _middle(held)
    fitting = reference if held.fits(reference) else None
    return encode(part, _middle(fitting) if fitting else None).num_bytes


def _middle(held: Held) -> Held:
    length = len(held.values)
    if length <= _SAMPLE:
        return held
    start = (length - _SAMPLE) // 2
    stop = start + _SAMPLE
    spec = TensorSpec(held.spec.dtype, (_SAMPLE,))
    if held.lattice is None:
        assert held.words is not None
        return Held(spec, words=held.words[start:stop])
    assert held.codes is not None
    index = held.escape_index
    inside = (index >= start) & (index < stop)
    escapes = (index[inside] - start, held.escape_words[inside])
    return Held(spec, held.lattice, held.codes[start:stop], None, *escapes)


def encode(held: Held, reference: Held | None) -> Encoded:
    """The smallest form of a tensor; coders of large tensors are compared on a sample.

    Args:
        held: The tensor.
        reference: The same tensor in the version that a delta may refer to, or ``None``.
    """
    fitting = reference if held.fits(reference) else None
    if fitting is None:
        return _encode_as(INTRA, held, None)
    if held.lattice is None:
        return _encode_words(held, fitting)
    if np.array_equal(held.values, fitting.values):
        return _encode_as(SAME, held, fitting)
    if len(held.values) <= _SAMPLE:
        return _smallest(held, fitting)
    best = _smallest(_middle(held), _middle(fitting))
    return _encode_as(best.coder, held, fitting)


def _encode_words(held: Held, reference: Held) -> Encoded:
    index, changes = find_changes(held.values, reference.values)
    if len(index) == 0:
        return _encode_as(SAME, held, reference)
    sparse = None
    if len(index) <= _SPARSE_SHARE * len(held.values):
        parts = (b"", encode_index(index), encode_words(changes))
        sparse = Encoded(SPARSE, parts, len(index))
        if len(index) * 16 < len(held.values):
            return sparse  # planes need more than this for the places alone
    best = _smallest(_middle(held), _middle(reference))
    dense = _encode_as(best.coder, held, reference)
    return sparse if sparse is not None and sparse.num_bytes < dense.num_bytes else dense


def _smallest(held: Held, reference: Held) -> Encoded:
    candidates = [_encode_as(coder, held, reference) for coder in (DELTA, INTRA)]
    return min(candidates, key=lambda encoded: encoded.num_bytes)


def _encode_as(
    coder: str,
    held: Held,
    reference: Held | None,
) -> Encoded:
    if held.lattice is None:
        main = b"" if coder == SAME else encode_planes(_difference(coder, held, reference))
        return Encoded(coder, (main, b"", b""))
    main = b"" if coder == SAME else encode_integers(_difference(coder, held, reference))
    count = len(held.escape_index)
    index = encode_index(held.escape_index)
    words = encode_words(held.escape_words)
    return Encoded(coder, (main, index, words), count)


def _difference(
    coder: str,
    held: Held,
    reference: Held | None,
) -> Any:
    if coder == INTRA:
        return held.values
    assert reference is not None
    if held.lattice is None:
        return held.values ^ reference.values
    return held.values - reference.values


@dataclasses.dataclass(frozen=True)
class Described:
    """What a file says of an encoded tensor, checked.

    Attributes:
        spec: Type and shape.
        lattice: ``None`` for words.
        coder: One of :data:`CODERS`.
        count: Number of escapes, or of changes.
        sizes: Bytes of the three parts.
    """

    spec: TensorSpec
    lattice: Lattice | None
    coder: str
    count: int
    sizes: tuple[int, int, int]


def decode(
    described: Described,
    payload: memoryview,
    reference: Held | None,
) -> Held:
    """What is stored of a tensor.

    Args:
        described: The file's description.
        payload: The three parts.
        reference: The tensor in the version that a delta refers to.

    Raises:
        BrokenChain: The reference is missing, or of another type, shape or lattice.
        CorruptCheckpoint: The payload is damaged.
    """
    first, second, _ = described.sizes
    main = payload[:first]
    index = payload[first : first + second]
    words = payload[first + second :]
    spec = described.spec
    if described.coder != INTRA:
        _check_reference(described, reference)
    if described.lattice is None:
        return Held(spec, words=_decode_words(described, main, index, words, reference))
    codes = _decode_codes(described, main, reference)
    escapes = decode_index(index, described.count, spec.num_words)
    bits = decode_words(words, described.count, spec.word)
    return Held(
        spec,
        described.lattice,
        codes,
        escape_index=escapes,
        escape_words=bits,
    )


def _check_reference(described: Described, reference: Held | None) -> None:
    if reference is None:
        raise BrokenChain("expected the tensor in the reference version, it is not there")
    if reference.spec != described.spec or reference.lattice != described.lattice:
        raise BrokenChain(
            f"expected a reference of {described.spec} on {described.lattice}, "
            f"got {reference.spec} on {reference.lattice}"
        )


def _decode_codes(
    described: Described,
    main: memoryview,
    reference: Held | None,
) -> Codes:
    count = described.spec.num_words
    if described.coder == SAME:
        assert reference is not None
        codes = reference.codes
    else:
        codes = decode_integers(main, count, np.int32)
        if described.coder == DELTA:
            assert reference is not None
            np.add(codes, reference.values, out=codes)
    assert codes is not None
    return codes


def _decode_words(
    described: Described,
    main: memoryview,
    index: memoryview,
    changes: memoryview,
    reference: Held | None,
) -> Words:
    spec = described.spec
    if described.coder == INTRA:
        return decode_planes(main, spec.num_words, spec.word)
    assert reference is not None
    if described.coder == SAME:
        return reference.restore()
    if described.coder == DELTA:
        return reference.restore() ^ decode_planes(main, spec.num_words, spec.word)
    places = decode_index(index, described.count, spec.num_words)
    words = reference.restore().copy()
    words[places] ^= decode_words(changes, described.count, spec.word)
    return words


def check_coder(coder: Any, lattice: Lattice | None) -> str:
    """The name of a coder that a file states.

    Raises:
        CorruptCheckpoint: There is none of this name, or not for this form.
    """
    if coder not in CODERS or (coder == SPARSE and lattice is not None):
        raise CorruptCheckpoint(f"expected a coder of {CODERS}, got {coder!r}")
    return str(coder)
