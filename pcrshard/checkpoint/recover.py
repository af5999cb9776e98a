"""Rebuild the manifest of a store from its version files."""

from __future__ import annotations

import dataclasses
import time

from .. import storage
from ..errors import (
    CorruptCheckpoint,
    FormatError,
    PCRError,
    UnsupportedVersion,
    VersionUnavailable,
)
from .frame import require
from .manifest import Manifest, StoreIO, manifest_numbers, number_in
from .reader import problems
from .version_file import Progress, VersionFile, VersionRecord, reported


@dataclasses.dataclass(frozen=True)
class Recovered:
    """The result of recovering a store whose manifest was lost.

    Attributes:
        versions: Records of the new manifest; each version was restored and verified.
        lost: Reason for each unused file, by file name.
    """

    versions: tuple[VersionRecord, ...]
    lost: dict[str, str]


def recover(
    url: str,
    *,
    allow_loss: bool = False,
    options: storage.Options | None = None,
    progress: Progress | None = None,
) -> Recovered:
    """Rebuild a lost or damaged manifest from the version files.

    Args:
        url: The store's folder.
        allow_loss: Continue if a version cannot be restored; the next writer deletes its files.
        options: fsspec storage options.
        progress: Called with the number of files checked and the total.

    Raises:
        ValueError: The manifest is intact.
        CorruptCheckpoint: A version cannot be restored; nothing is written.
        VersionUnavailable: The folder contains no versions.
    """
    io = StoreIO(url, options)
    if _has_manifest(io):
        raise ValueError("the manifest is sound: there is nothing to recover")
    names = io.list()
    numbers = {name: number for name in names if (number := number_in(name)) is not None}
    if not numbers:
        raise VersionUnavailable("there are no files of versions to recover", url=url)
    files = []
    lost = {}
    for name in sorted(numbers):
        try:
            files.append(_open(io, name))
        except FormatError as error:
            lost[name] = str(error)
    parents = {(file.header.parent, file.header.parent_id) for file in files}

    def rank(file: VersionFile) -> tuple[int, bool, float]:
        """Sort parents before deltas, and for duplicate numbers the referenced file first."""
        header = file.header
        return header.number, (header.number, header.id) not in parents, -header.saved

    manifest = Manifest()
    for file in reported(sorted(files, key=rank), progress):
        try:
            manifest = _with_file(io, manifest, file)
        except PCRError as error:
            lost[file.record.file] = str(error)
    gone = sorted({*numbers.values()} - {record.number for record in manifest.versions})
    if (gone and not allow_loss) or not manifest.versions:
        reasons = "; ".join(lost[name] for name in lost if numbers[name] in gone)
        raise CorruptCheckpoint(f"cannot recover the versions {gone}, see allow_loss: {reasons}")
    # Skip numbers so that an active writer cannot mistake this manifest for its own.
    last = max(manifest_numbers(names) | {int(time.time())})
    before = manifest.replace(number=last)
    io.commit(before, manifest.replace(next_version=max(numbers.values()) + 1))
    return Recovered(manifest.versions, lost)


def _has_manifest(io: StoreIO) -> bool:
    """Return whether the manifest exists and is intact."""
    try:
        return io.newest().number > 0
    except UnsupportedVersion:
        raise
    except FormatError:
        return False


def _open(io: StoreIO, name: str) -> VersionFile:
    file = VersionFile(io, name)
    require(file.header.number == number_in(name), "expected the number in the name")
    return file


def _with_file(io: StoreIO, manifest: Manifest, file: VersionFile) -> Manifest:
    """Return the manifest extended by one version.

    Raises:
        PCRError: The version cannot be added.
    """
    header = file.header
    ids = {record.number: record.id for record in manifest.versions}
    require(header.number not in ids, "another file of this version is used")
    if header.parent is not None:
        is_there = ids.get(header.parent) == header.parent_id
        require(is_there, f"its parent, version {header.parent}, is missing")
    more = manifest.with_versions((*manifest.versions, file.record))
    for problem in problems(io, more, [header.number]):
        if problem is not None:
            raise problem
    return more
