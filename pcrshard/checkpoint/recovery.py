"""Rebuild the manifest of a store from its version files."""

from __future__ import annotations

import dataclasses
import os
import time
from contextlib import suppress

from .. import storage
from ..errors import (
    CorruptCheckpoint,
    FormatError,
    PCRError,
    VersionUnavailable,
)
from .chains import StoreIO
from .frame import require
from .manifest import MANIFEST_NAME, VERSION_NAME, Manifest, VersionRecord
from .version_file import Progress, VersionFile, reported

_YEAR_2020 = 1_577_836_800_000  # in Unix milliseconds; names of manifests have 12 digits


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
    url: str | os.PathLike[str],
    *,
    allow_loss: bool = False,
    options: storage.Options = None,
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
        UnsupportedVersion: A file has another format version.
        StorageError: A file cannot be read or written.
    """
    io = StoreIO(os.fspath(url), options)
    with suppress(CorruptCheckpoint):
        if io.newest().number:
            raise ValueError("the manifest is sound: there is nothing to recover")
    numbers = io.numbered(VERSION_NAME)
    if not numbers:
        raise VersionUnavailable("there are no files of versions to recover", url=io.url)
    files, lost = [], {}
    for name, number in numbers.items():
        try:
            file = VersionFile(io, name)
            require(file.header.number == number, "expected the number in the name")
            files.append(file)
        except FormatError as error:
            lost[name] = str(error)
    parents = {file.header.parent_id for file in files}
    # Parents before deltas; of two files of one version, the one that others refer to, or else the
    # newest: a writer that was killed leaves a file, and the next one reuses its number.
    files.sort(
        key=lambda file: (file.header.number, file.header.id not in parents, -file.header.saved)
    )
    manifest = Manifest()
    for file in reported(files, progress):
        try:
            is_new = file.header.number >= manifest.next_version
            require(is_new, "another file of this version is used")
            if file.header.parent is not None:
                manifest.record(file.header.parent)
            io.check(manifest, file)
            manifest = manifest.plus(file.record)
        except PCRError as error:
            lost[file.record.file] = str(error)
    gone = sorted({*numbers.values()} - {record.number for record in manifest.versions})
    if (gone and not allow_loss) or not manifest.versions:
        reasons = "; ".join(lost[name] for name in lost if numbers[name] in gone)
        raise CorruptCheckpoint(f"cannot recover the versions {gone}, see allow_loss: {reasons}")
    # Skip numbers so that an active writer cannot mistake this manifest for its own: a save takes
    # longer than a millisecond, so that numbers since an earlier recovery are below this.
    last = max([time.time_ns() // 1_000_000 - _YEAR_2020, *io.numbered(MANIFEST_NAME).values()])
    before = manifest.replace(number=last)
    io.commit(before, manifest.replace(next_version=max(numbers.values()) + 1))
    return Recovered(manifest.versions, lost)
