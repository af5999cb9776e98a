"""Releases over a network: one file that makes a new version of an old one (section 4, case 1).

The receiver is refused unless it holds exactly the version that the patch was made from.
"""

from __future__ import annotations

import dataclasses

from .. import storage
from ..checkpoint import DeltaStore
from ..checkpoint.held_version import HeldVersion, Progress, write_version
from ..checkpoint.version_file import VersionFile


@dataclasses.dataclass(frozen=True)
class Patch:
    """A patch that was written.

    Attributes:
        old: Id of the version that the receiver must hold.
        new: Id of the version that it makes.
        num_bytes: Size of the file.
        raw_bytes: Bytes of all restored tensors.
    """

    old: bytes
    new: bytes
    num_bytes: int
    raw_bytes: int


def write_patch(
    store: DeltaStore,
    old: int,
    new: int,
    url: str,
    *,
    options: storage.Options | None = None,
    progress: Progress | None = None,
) -> Patch:
    """Write the difference of two versions as one file.

    Args:
        store: Where they are.
        old: Number of the version that the receiver holds.
        new: Number of the version that it shall get.
        url: The file.
        options: fsspec storage options of the file.
        progress: Called with the tensors that are encoded, and those that are to be.

    Raises:
        VersionUnavailable: One is not there.
        StorageError: The file cannot be written.
    """
    reference = store.read(old)
    target = store.read(new)
    written = write_version(url, target, reference, options=options, progress=progress)
    return Patch(reference.id, target.id, written.num_bytes, target.raw_bytes)


def apply_patch(
    store: DeltaStore,
    url: str,
    *,
    options: storage.Options | None = None,
) -> tuple[int, HeldVersion]:
    """Add the version that a patch makes to a store.

    Args:
        store: It must hold the version that the patch was made from, under any number.
        url: The patch, local or remote.
        options: fsspec storage options of the patch.

    Returns:
        The new version's number in this store, and the version.

    Raises:
        BrokenChain: The store does not hold the right reference; both ids are named.
        CorruptCheckpoint: The patch is damaged, or does not make what it promises.
    """
    file = VersionFile(url, options=options)
    file.check_size()
    version = store.append_file(file)
    return version.number, version
