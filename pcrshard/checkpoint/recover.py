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
from .frame import HEAD_BYTES
from .manifest import Manifest, StoreIO, VersionRecord, manifest_numbers, number_in, record_of
from .reader import problem_of
from .version_file import Progress, VersionFile, reported


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
    try:
        if io.newest().number:
            raise ValueError("the manifest is sound: there is nothing to recover")
    except UnsupportedVersion:
        raise
    except FormatError:
        pass  # the damage to repair
    names = io.list()
    wanted = {name: number for name in names if (number := number_in(name)) is not None}
    if not wanted:
        raise VersionUnavailable("there are no files of versions to recover", url=url)
    files, lost = _open_files(io, wanted)
    parents = {(file.header.parent, file.header.parent_id) for file in files.values()}

    def rank(name: str) -> tuple[int, bool, float]:
        """Sort parents before deltas, and for duplicate numbers the referenced file first."""
        header = files[name].header
        return header.number, (header.number, header.id) not in parents, -header.saved

    manifest = Manifest()
    for name in reported(sorted(files, key=rank), progress):
        try:
            manifest = _with_file(io, manifest, name, files[name])
        except PCRError as error:
            lost[name] = str(error)
    gone = sorted({*wanted.values()} - {record.number for record in manifest.versions})
    if (gone and not allow_loss) or not manifest.versions:
        reasons = "; ".join(lost[name] for name in lost if wanted[name] in gone)
        raise CorruptCheckpoint(f"cannot recover the versions {gone}, see allow_loss: {reasons}")
    # Skip numbers so that an active writer cannot mistake this manifest for its own.
    last = max(manifest_numbers(names) | {int(time.time())})
    before = manifest.replace(number=last)
    io.commit(before, manifest.replace(next_version=max(wanted.values()) + 1))
    return Recovered(manifest.versions, lost)


def _open_files(
    io: StoreIO, wanted: dict[str, int]
) -> tuple[dict[str, VersionFile], dict[str, str]]:
    """Open the files with valid headers, and return the problem of each other file."""
    files: dict[str, VersionFile] = {}
    lost = {}
    for name in sorted(wanted):
        try:
            file = VersionFile(io.join(name), options=io.options)
            file.check_size()
            if file.header.number != wanted[name]:
                raise CorruptCheckpoint("expected the number in the name", url=file.url)
            files[name] = file
        except FormatError as error:
            lost[name] = str(error)
    return files, lost


def _with_file(io: StoreIO, manifest: Manifest, name: str, file: VersionFile) -> Manifest:
    """Return the manifest extended by one version.

    Raises:
        PCRError: The version cannot be added.
    """
    header = file.header
    ids = {record.number: record.id for record in manifest.versions}
    if header.number in ids:
        raise CorruptCheckpoint("another file of this version is used")
    if header.parent is not None and ids.get(header.parent) != header.parent_id:
        raise CorruptCheckpoint(f"its parent, version {header.parent}, is missing")
    record = record_of(header, name, file.payload_start - HEAD_BYTES, file.num_bytes)
    more = manifest.with_versions((*manifest.versions, record))
    error, _ = problem_of(io, more, header.number)
    if error is not None:
        raise error
    return more
