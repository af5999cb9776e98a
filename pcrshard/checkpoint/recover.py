"""Rebuilding the manifest of a store from the files of its versions."""

from __future__ import annotations

import dataclasses
import time

from .. import storage
from ..errors import CorruptCheckpoint, FormatError, UnsupportedVersion, VersionUnavailable
from .frame import HEAD_BYTES
from .manifest import (
    Manifest,
    StoreIO,
    VersionRecord,
    is_version_file,
    manifest_numbers,
)
from .reader import problem_of
from .version_file import Progress, VersionFile


@dataclasses.dataclass(frozen=True)
class Recovered:
    """What was found of a store whose manifest was lost.

    Attributes:
        versions: Those of the new manifest; each was restored and compared with its id.
        lost: Why a version's file is not used, by name.
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
    """Rebuild a lost or damaged manifest from the files of the versions.

    Args:
        url: The store's folder.
        allow_loss: Go on if a version cannot be restored; the next writer removes its files.
        options: fsspec storage options.
        progress: Called with the number of checked files, and of all files.

    Raises:
        ValueError: The manifest is sound.
        CorruptCheckpoint: A version is lost; nothing is written.
        VersionUnavailable: There are no versions.
    """
    io = StoreIO(url, options)
    try:
        if io.newest().number:
            raise ValueError("the manifest is sound: there is nothing to recover")
    except UnsupportedVersion:
        raise
    except FormatError:
        pass  # the damage that is to be repaired
    names = io.list()
    files, lost = _open_files(io, sorted(filter(is_version_file, names)))
    wanted = {int(name.partition("-")[0]) for name in [*files, *lost]}
    if not wanted:
        raise VersionUnavailable("there are no files of versions to recover", url=url)
    parents = {file.parent for file in files.values()}
    manifest = Manifest()
    # Parents come before their deltas. Of two files of one number, the one that others refer to.
    order = sorted(
        files.items(),
        key=lambda pair: (
            pair[1].number, (pair[1].number, pair[1].id) not in parents, -pair[1].saved,
        ),
    )  # fmt: skip
    for done, (name, file) in enumerate(order, 1):
        reason = _add(io, manifest, name, file)
        if isinstance(reason, Manifest):
            manifest = reason
        else:
            lost[name] = reason
        if progress is not None:
            progress(done, len(order))
    gone = sorted(wanted - {record.number for record in manifest.versions})
    if (gone and not allow_loss) or not manifest.versions:
        reasons = "; ".join(lost[name] for name in lost if int(name.partition("-")[0]) in gone)
        raise CorruptCheckpoint(f"cannot recover the versions {gone}, see allow_loss: {reasons}")
    # No writer that is still at work may take this manifest for its own.
    last = max(manifest_numbers(names) | {int(time.time())})
    before = dataclasses.replace(manifest, number=last)
    io.commit(before, dataclasses.replace(manifest, next_version=max(wanted) + 1))
    return Recovered(manifest.versions, lost)


def _open_files(io: StoreIO, names: list[str]) -> tuple[dict[str, VersionFile], dict[str, str]]:
    """Open the files whose headers are sound; say what is wrong with the others."""
    files, lost = {}, {}
    for name in names:
        try:
            file = VersionFile(io.join(name), options=io.options)
            file.check_size()
            if file.number != int(name.partition("-")[0]):
                raise CorruptCheckpoint("expected the number in the name", url=file.url)
        except FormatError as error:
            lost[name] = str(error)
        else:
            files[name] = file
    return files, lost


def _add(io: StoreIO, manifest: Manifest, name: str, file: VersionFile) -> Manifest | str:
    """Return the manifest with one more version, or why it cannot be added."""
    known = {(record.number, record.id) for record in manifest.versions}
    if any(number == file.number for number, _ in known):
        return "another file of this version is used"
    if file.parent is not None and file.parent not in known:
        return f"its parent, version {file.parent[0]}, is missing"
    record = VersionRecord(
        number=file.number,
        id=file.id,
        parent=None if file.parent is None else file.parent[0],
        file=name,
        file_bytes=file.num_bytes,
        header_bytes=file.payload_start - HEAD_BYTES,
        raw_bytes=file.raw_bytes,
        metrics=file.metrics,
        saved=file.saved,
    )
    more = dataclasses.replace(manifest, versions=(*manifest.versions, record))
    error, _ = problem_of(io, more, file.number)
    return more if error is None else str(error)
