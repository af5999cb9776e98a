"""Restore a version from a keyframe and its chain of deltas, and verify the digests."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from ..errors import BrokenChain, PCRError, VersionUnavailable
from .codec import Tensor
from .frame import damage_named
from .manifest import Manifest, StoreIO
from .tensors import tensor_from
from .typed_tree import TreeReader
from .version_file import VersionFile, VersionRecord

# A version in memory, in its stored form.
Decoded = tuple[VersionRecord, dict[str, Tensor]]


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
    layers: list[tuple[VersionFile, Collection[str]]] = []
    tensors: dict[str, Tensor] = {}
    for record in manifest.chain(number):
        if layers:
            child, wanted = layers[-1]
            if (child.header.parent, child.header.parent_id) != (record.number, record.id):
                message = f"the parent of version {child.header.number} is another version"
                raise BrokenChain(f"{message} than {record.number}", url=child.url)
            paths = [path for path in wanted if child.entries[path].is_delta]
            if not paths:
                break
            if known is not None and record == known[0]:
                tensors = known[1]
                break
        file = io.open(record)
        if paths is None:
            paths = file.entries.keys()
        if missing := set(paths) - file.entries.keys():
            message = "the reference of a tensor is missing"
            raise BrokenChain(message, url=file.url, key=min(missing))
        layers.append((file, paths))
    for file, wanted in reversed(layers):
        tensors = file.decode(wanted, tensors)
    return layers[0][0], tensors


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
    if names is not None:
        tree = io.open(manifest.record(number)).tree
        if missing := set(names) - tree.parts.keys():
            raise VersionUnavailable("there is no such tensor", url=io.url, key=min(missing))
        positions = {at for name in names for at in range(*tree.parts[name])}
        paths = {tree.names[tree.uses[at]] for at in positions & tree.uses.keys()}
    file, tensors = read_tensors(io, manifest, number, paths=paths)
    words = file.restore(tensors)

    @functools.cache
    def tensor(number: int) -> torch.Tensor:
        path = file.tree.names[number]
        # Words of an exact tensor may be in read-only memory.
        found = words[path] if words[path].flags.writeable else words[path].copy()
        made = tensor_from(found, tensors[path].spec)
        return made if number in file.tree.arrays else made.to(map_location)

    with damage_named("the tree is damaged", file.url):
        reader = TreeReader(file.header.tree, tensor)
        if names is None:
            return reader.read()
        return {name: reader.read(file.tree.parts[name]) for name in names}


def problems(io: StoreIO, manifest: Manifest, numbers: Iterable[int]) -> Iterator[PCRError | None]:
    """Read every byte of versions and restore them; yield the problem of each, if any."""
    known: Decoded | None = None
    for number in numbers:
        problem = None
        try:
            file, tensors = read_tensors(io, manifest, number, known=known)
            file.check_size()
            file.restore(tensors)
            known = manifest.record(number), tensors
        except PCRError as error:
            problem = error
        yield problem
