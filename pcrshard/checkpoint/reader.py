"""Restore a version from a keyframe and its chain of deltas, and verify the digests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..errorbound import Words
from ..errors import BrokenChain, CorruptCheckpoint, PCRError, VersionUnavailable
from .codec import Tensor, digest_of
from .frame import damage_named
from .manifest import Manifest, StoreIO
from .tensors import tensor_from
from .typed_tree import TreeReader
from .version_file import VersionFile, parallel_map


class Decoded(NamedTuple):
    """A version in memory, in its stored form."""

    number: int
    id: bytes
    tensors: dict[str, Tensor]


def read_tensors(
    io: StoreIO,
    manifest: Manifest,
    number: int,
    *,
    paths: Collection[str] | None = None,
    known: Decoded | None = None,
) -> tuple[VersionFile, dict[str, Tensor]]:
    """Decode a version's tensors, reading only the required files and payloads.

    Args:
        io: The store.
        manifest: The store's manifest.
        number: The version's number.
        paths: Paths of the tensors to read; default: all.
        known: A version already in memory, at which the chain may end.

    Raises:
        VersionUnavailable: The version does not exist.
        BrokenChain: A reference is missing or is a different version.
        CorruptCheckpoint: A payload is damaged.
    """
    layers: list[tuple[VersionFile, list[str]]] = []
    tensors: dict[str, Tensor] = {}
    for record in manifest.chain(number):
        if layers:
            child, wanted = layers[-1]
            parent = (child.header.parent, child.header.parent_id)
            if parent != (record.number, record.id):
                message = f"the parent of version {child.header.number} is another version"
                raise BrokenChain(f"{message} than {record.number}", url=child.url)
            paths = [path for path in wanted if child.entries[path].is_delta]
            if not paths:
                break
            if known is not None and parent == known[:2]:
                tensors = known.tensors
                break
        file = io.open(record)
        missing = set(paths or ()) - file.entries.keys()
        if missing:
            raise BrokenChain(
                "the reference of a tensor is missing", url=file.url, key=min(missing)
            )
        layers.append((file, list(file.entries if paths is None else paths)))
    for file, wanted in reversed(layers):
        tensors = file.decode(wanted, tensors, io.workers)
    return layers[0][0], tensors


def restore(file: VersionFile, tensors: Mapping[str, Tensor], workers: int = 1) -> dict[str, Words]:
    """Restore the words (N,) of tensors by path, and verify each against its digest.

    Raises:
        CorruptCheckpoint: A restored tensor does not match its digest.
    """

    def work(path: str) -> Words:
        with damage_named("the tensor cannot be restored", file.url, path):
            words = tensors[path].restore()
        if digest_of(words) != file.entries[path].digest:
            message = "the restored tensor does not match its digest"
            raise CorruptCheckpoint(message, url=file.url, key=path)
        return words

    return dict(zip(tensors, parallel_map(workers, work, tensors), strict=True))


def load_version(
    io: StoreIO,
    manifest: Manifest,
    number: int,
    *,
    names: Collection[str] | None = None,
    map_location: Any = None,
) -> Any:
    """Load a version, or the parts selected by ``names``; see :meth:`DeltaStore.load`."""
    paths = None
    parts = {}
    if names is not None:
        file = io.open(manifest.record(number))
        parts = _parts(file, names)
        paths = _leaves(file, parts.values())
    file, tensors = read_tensors(io, manifest, number, paths=paths)
    words = restore(file, tensors, io.workers)
    made: dict[int, torch.Tensor] = {}

    def tensor(number: int) -> torch.Tensor:
        if number not in made:
            path = file.tree.names[number]
            found = words[path]
            # Words of an exact tensor may be in read-only memory.
            found = found if found.flags.writeable else found.copy()
            made[number] = tensor_from(found, file.entries[path].spec)
        return made[number]

    with damage_named("the tree is damaged", file.url):
        tree = TreeReader(file.header.tree, tensor, map_location)
        if names is None:
            return tree.read()
        return {name: tree.read(parts[name]) for name in names}


def _parts(file: VersionFile, names: Collection[str]) -> dict[str, tuple[int, int]]:
    """Return the range of tokens for each name, the path of a tensor or of any subtree."""
    missing = set(names) - file.tree.parts.keys()
    if missing:
        raise VersionUnavailable("there is no such tensor", url=file.url, key=min(missing))
    return {name: file.tree.parts[name] for name in names}


def _leaves(file: VersionFile, parts: Iterable[tuple[int, int]]) -> list[str]:
    """Return the paths of all tensors referenced by parts of the tree."""
    numbers: set[int] = set()
    with damage_named("the tree is damaged", file.url):
        tree = TreeReader(file.header.tree)
        for part in parts:
            tree.read(part)
        numbers = tree.leaves
        return [file.tree.names[number] for number in sorted(numbers)]


def problem_of(
    io: StoreIO, manifest: Manifest, number: int, known: Decoded | None = None
) -> tuple[PCRError | None, Decoded | None]:
    """Read every byte of a version and restore it.

    Returns:
        The problem found, or the decoded version, which can serve as ``known`` for the next one.
    """
    try:
        file, tensors = read_tensors(io, manifest, number, known=known)
        file.check_size()
        restore(file, tensors, io.workers)
    except PCRError as error:
        return error, None
    return None, Decoded(file.header.number, file.header.id, tensors)
