"""What a version holds of a state, and its file."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any, NamedTuple

import numpy as np

from ..checksum import crc32c
from ..errorbound import Bound, Words
from .codec import Exact, Quantised, Tensor, encode, quantised
from .manifest import Manifest, StoreIO, VersionRecord, new_file_name
from .reader import Decoded
from .tensors import TensorSpec, spec_of, words_of
from .typed_tree import Leaf
from .version_file import write_version

_LONG_CHAIN = 10
# Above this fraction of changed words no exact form is compared: it is larger.
_MOST_CHANGED = 0.25


def is_keyframe_due(manifest: Manifest, keyframe_every: int) -> bool:
    """Whether the next version should not be a delta."""
    if not manifest.versions:
        return True
    *deltas, keyframe = manifest.chain(manifest.versions[-1].number)
    length = 1 + len(deltas)
    outweighed = sum(record.file_bytes for record in deltas) > keyframe.file_bytes
    return length >= keyframe_every or (length >= _LONG_CHAIN and outweighed)


def write_record(
    io: StoreIO,
    record: VersionRecord,
    tree: Any,
    tensors: dict[str, Tensor],
    checksums: dict[str, int],
    reference: Decoded | None,
) -> VersionRecord:
    """Write a version under a new name.

    Args:
        io: The store.
        record: What is known of it before it is written.
        tree: The state without its tensors.
        tensors: The tensors by path.
        checksums: CRC-32C of their restored bytes.
        reference: The parent; ``None`` for a keyframe.

    Returns:
        Its record.
    """
    name = new_file_name(record.number)
    header = {
        "number": record.number,
        "id": record.id,
        "parent": None if reference is None else [reference.number, reference.id],
        "tree": tree,
        "metrics": record.metrics,
        "saved": record.saved,
    }
    header_bytes, file_bytes = write_version(
        io.join(name),
        header,
        {path: (tensor, checksums[path]) for path, tensor in tensors.items()},
        {} if reference is None else reference.tensors,
        options=io.options,
        workers=io.workers,
    )
    return dataclasses.replace(
        record,
        parent=None if reference is None else reference.number,
        file=name,
        file_bytes=file_bytes,
        header_bytes=header_bytes,
    )


def is_exact_smaller(
    samples: dict[str, Sample],
    old: dict[str, Exact],
    before: dict[str, Tensor],
    keyframe_every: int,
    is_due: bool,
) -> bool:
    """Whether a chain of exact versions would be smaller than one of quantized versions.

    Args:
        samples: Of each lossy tensor.
        old: Samples of the state that was saved before, as far as it is known.
        before: The version before, as it is stored.
        keyframe_every: The length of a chain.
        is_due: Whether the version will be a keyframe anyway.
    """
    if not old:  # the store was just opened: exact tensors tell what was saved
        old = {path: each.middle() for path, each in before.items() if isinstance(each, Exact)}
    pairs = [(now, old[path]) for path, now in samples.items() if path in old]
    pairs = [(now, was) for now, was in pairs if was.spec == now.part.spec]
    total = sum(now.num_words for now, _ in pairs)
    changed = sum(
        now.num_words * float((now.part.values != was.values).mean()) for now, was in pairs
    )
    if changed > _MOST_CHANGED * total or not pairs:
        return False
    keys, deltas = [0.0, 0.0], [0.0, 0.0]
    for now, was in pairs:
        scale = now.num_words / len(now.part.values)
        lattice_now = quantised(now.part.values, was.spec, now.bound, None)
        lattice_was = quantised(was.values, was.spec, now.bound, lattice_now)
        for form, (new, base) in enumerate([(lattice_now, lattice_was), (now.part, was)]):
            keys[form] += scale * _payload_bytes(new, None)
            deltas[form] += scale * _payload_bytes(new, base)
    is_exact = not is_lossy(before)
    costs = [
        (keys[form] if is_due or form != is_exact else deltas[form])
        + (keyframe_every - 1) * deltas[form]
        for form in (0, 1)
    ]
    return costs[1] < costs[0]


def _payload_bytes(tensor: Tensor, reference: Tensor | None) -> int:
    return sum(encode("", tensor, reference)[0].sizes)


class Sample(NamedTuple):
    """Words from the middle of a tensor, and what it may lose."""

    part: Exact
    num_words: int
    bound: Bound


def sample(leaf: Leaf, bound: Bound) -> Sample:
    """Take a sample of a tensor, without the memory of the whole state."""
    words = words_of(leaf.tensor)
    part = Exact(spec_of(leaf.tensor), words).middle()
    return Sample(Exact(part.spec, part.values.copy()), len(words), bound)


def is_lossy(tensors: dict[str, Tensor]) -> bool:
    """Whether any tensor of a version is quantized."""
    return any(isinstance(tensor, Quantised) for tensor in tensors.values())


class Stored(NamedTuple):
    """A tensor as it is stored, and what identifies its restored bytes."""

    path: str
    tensor: Tensor
    digest: bytes
    checksum: int


def store_leaf(leaf: Leaf, bound: Bound | None, before: Tensor | None) -> Stored:
    """Exact or quantized: what a version holds of a tensor."""
    words: Words = words_of(leaf.tensor)
    spec: TensorSpec = spec_of(leaf.tensor)
    if bound is None:
        tensor: Tensor = Exact(spec, words.copy())  # without the memory of the whole state
    else:
        restored = np.empty_like(words)
        tensor = quantised(words, spec, bound, before, restored)
        words = restored
    return Stored(leaf.path, tensor, hashlib.sha256(words.data).digest(), crc32c(words))
