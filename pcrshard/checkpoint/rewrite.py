"""Whole stores: verify, recover, remove versions, write deltas in another order, exactly."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from .. import storage
from ..errors import (
    CorruptCheckpoint,
    FormatError,
    PCRError,
    UnsupportedVersion,
    VersionUnavailable,
)
from .file_frame import HEAD_BYTES, require
from .held_version import HeldVersion, Progress, Steps
from .manifest import (
    MANIFEST_NAME,
    ORDERS,
    Manifest,
    VersionRecord,
    read_manifest,
    require_manifest,
    write_manifest,
)
from .version_file import VersionFile, named
from .writer import Place, clean, replace_manifest, version_files, writing

# What becomes of a manifest that could not be read.
DAMAGED_NAME = "manifest.damaged"
_KEYFRAME_EVERY = 10


def parents_of(
    numbers: Sequence[int],
    order: str,
    keyframe_every: int,
) -> dict[int, int | None]:
    """Which version each one refers to.

    >>> parents_of([1, 2, 3, 4], "forward", 3)
    {1: None, 2: 1, 3: 2, 4: None}
    >>> parents_of([1, 2, 3, 4], "backward", 3)
    {1: 2, 2: 3, 3: None, 4: None}
    >>> parents_of([1, 2, 3, 4], "hop", 3)
    {1: None, 2: 1, 3: 1, 4: None}
    """
    parents: dict[int, int | None] = {}
    for start in range(0, len(numbers), keyframe_every):
        group = numbers[start : start + keyframe_every]
        if order == "backward":
            parents |= dict(zip(group, [*group[1:], None], strict=True))
        elif order == "forward":
            parents |= dict(zip(group, [None, *group[:-1]], strict=True))
        else:
            parents |= dict.fromkeys(group, group[0]) | {group[0]: None}
    return parents


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a store shall become.

    Attributes:
        order: How versions refer to each other.
        keyframe_every: At most so many versions hang on one keyframe.
        parents: By number of each version that stays.
    """

    order: str
    keyframe_every: int
    parents: dict[int, int | None]


def plan(
    manifest: Manifest,
    *,
    keep: Collection[int] | None = None,
    order: str | None = None,
    keyframe_every: int | None = None,
) -> Plan:
    """What a store shall become.

    Raises:
        VersionUnavailable: A version to keep is not there.
        ValueError: There is no such order.
    """
    order = manifest.order if order is None else order
    every = manifest.keyframe_every if keyframe_every is None else keyframe_every
    if order not in ORDERS or every < 1:
        raise ValueError(
            f"expected an order of {ORDERS} and a number above 0, got {order}, {every}"
        )
    known = [record.number for record in manifest.versions]
    missing = set(keep or ()) - set(known)
    if missing:
        raise VersionUnavailable(f"there is no version {min(missing)}")
    kept = known if keep is None else [number for number in known if number in keep]
    return Plan(order, every, parents_of(kept, order, every))


def apply(
    place: Place,
    make_plan: Callable[[Manifest], Plan],
    progress: Progress | None = None,
) -> Manifest:
    """Write the files that a plan changes, then the manifest; then remove what is left over.

    Args:
        place: The store.
        make_plan: What it shall become.
        progress: Called with the versions that are written, or need not be.

    Raises:
        ConcurrentWriter: Another process is writing.
        PCRError: A version cannot be read; nothing has changed then.
    """
    with writing(place):
        manifest = require_manifest(place.url, place.options)
        plan = make_plan(manifest)
        steps = Steps(len(plan.parents), progress)
        records = list(steps.counted(_rewritten(place, manifest, plan)))
        after = dataclasses.replace(
            manifest,
            order=plan.order,
            keyframe_every=plan.keyframe_every,
            generation=manifest.generation + 1,
            versions=tuple(records),
        )
        replace_manifest(place, manifest.generation, after)
        kept = {record.file for record in records}
        place.remove([record.file for record in manifest.versions if record.file not in kept])
        clean(place, after)
    return after


def _rewritten(
    place: Place,
    manifest: Manifest,
    plan: Plan,
) -> Iterator[VersionRecord]:
    """The record of each version that stays, written again if its reference is another one."""
    for number, parent in plan.parents.items():
        record = manifest.record(number)
        if record.parent != parent:
            reference = None if parent is None else place.read(manifest, parent)
            record = place.write(place.read(manifest, number), reference)
        yield record


def verify(
    place: Place,
    manifest: Manifest,
    numbers: Collection[int],
    progress: Progress | None = None,
) -> list[PCRError]:
    """Read every byte of versions, and restore them; the progress counts versions.

    Returns:
        What is wrong, in the order of the versions.
    """
    found = (_problem(place, manifest, number) for number in numbers)
    problems = Steps(len(numbers), progress).counted(found)
    return [problem for problem in problems if problem is not None]


def _problem(
    place: Place,
    manifest: Manifest,
    number: int,
) -> PCRError | None:
    try:
        _verify_version(place, manifest, number)
    except PCRError as error:
        return error
    return None


def _verify_version(
    place: Place,
    manifest: Manifest,
    number: int,
) -> HeldVersion:
    record = manifest.record(number)
    file = place.open(record)
    parent = None if file.header.parent is None else file.header.parent[0]
    if parent != record.parent or file.num_bytes != record.file_bytes:
        message = f"expected parent {record.parent} and {record.file_bytes} bytes"
        raise CorruptCheckpoint(f"{message}, got {parent} and {file.num_bytes}", url=file.url)
    file.check_size()
    return place.read(manifest, number)


@dataclasses.dataclass(frozen=True)
class Recovered:
    """What was found of a store whose manifest was lost.

    Attributes:
        versions: Those that the new manifest has; each was restored and compared with its id.
        lost: Why a file of a version is not used, by its name.
    """

    versions: tuple[VersionRecord, ...]
    lost: dict[str, str]


def recover(
    place: Place,
    *,
    allow_loss: bool = False,
    progress: Progress | None = None,
) -> Recovered:
    """Write the manifest of a store again, from the files of its versions.

    Args:
        place: The store.
        allow_loss: Go on if a version cannot be restored. The next writer removes its files.
        progress: Called with the versions that are checked.

    Raises:
        ValueError: The manifest is sound.
        CorruptCheckpoint: A version is lost; nothing is written.
        VersionUnavailable: There are no versions.
    """
    with writing(place):
        _check_manifest_is_lost(place)
        names = version_files(place)
        lost: dict[str, str] = {}
        files = _open_files(place, names, lost)
        manifest = _sound_manifest(place, files, lost, progress)
        _check_loss(names, manifest, lost, allow_loss)
        _keep_damaged_manifest(place)
        # Numbers of lost versions are not used again.
        last = max(number_in(name) for name in names)
        manifest = dataclasses.replace(manifest, next_number=last + 1)
        write_manifest(place.url, manifest, place.options)
    return Recovered(manifest.versions, lost)


def _check_manifest_is_lost(place: Place) -> None:
    try:
        manifest = read_manifest(place.url, place.options)
    except UnsupportedVersion:
        raise
    except FormatError:
        return
    if manifest is not None:
        raise ValueError("the manifest is sound: there is nothing to recover")


def _open_files(
    place: Place,
    names: Sequence[str],
    lost: dict[str, str],
) -> dict[str, VersionFile]:
    """The files whose headers are sound, by name."""
    files = {}
    for name in names:
        url = storage.join(place.url, name)
        try:
            file = VersionFile(url, options=place.options)
            with named(url):
                require(file.header.number == number_in(name), "expected the number in the name")
            file.check_size()
        except FormatError as error:
            lost[name] = str(error)
        else:
            files[name] = file
    return files


def number_in(name: str) -> int:
    """The version's number in the name of its file."""
    return int(name.partition("-")[0])


def _sound_manifest(
    place: Place,
    files: dict[str, VersionFile],
    lost: dict[str, str],
    progress: Progress | None,
) -> Manifest:
    """The manifest of those files that restore to what they promise."""
    while True:
        chosen = _choose(files)
        manifest = _manifest_of({name: files[name] for name in chosen})
        numbers = [record.number for record in manifest.versions]
        found = zip(numbers, (_problem(place, manifest, number) for number in numbers), strict=True)
        steps = Steps(len(numbers), progress)
        wrong = {number: error for number, error in steps.counted(found) if error is not None}
        if not wrong:
            break
        for record in manifest.versions:
            # Versions that only depend on a wrong one may have another file to depend on.
            if record.number in wrong and record.parent not in wrong:
                lost[record.file] = str(wrong[record.number])
                del files[record.file]
    for name in files.keys() - set(chosen):
        lost[name] = "its reference is missing, or another file of this version is used"
    return manifest


def _choose(files: dict[str, VersionFile]) -> list[str]:
    """Names of files that hang together down to keyframes, one for each number."""
    reached = _reached(files, files)
    references = collections.Counter(files[name].parent_id for name in reached.values())
    best: dict[int, tuple[int, float, bytes]] = {}
    for identity, name in reached.items():
        header = files[name].header
        rank = (references[identity], header.saved, identity)
        best[header.number] = max(best.get(header.number, rank), rank)
    kept = {identity for _, _, identity in best.values()}
    alone = [name for name, file in files.items() if file.header.id in kept]
    return list(_reached(files, alone).values())


def _reached(files: dict[str, VersionFile], names: Collection[str]) -> dict[bytes, str]:
    """For each version that can be restored, by id, a file: keyframes first, then their deltas."""
    reached: dict[bytes, str] = {}
    grows = True
    while grows:
        before = len(reached)
        known = {(files[name].header.number, identity) for identity, name in reached.items()}
        for name in names:
            header = files[name].header
            if header.id not in reached and (header.parent is None or header.parent in known):
                reached[header.id] = name
        grows = len(reached) > before
    return reached


def _manifest_of(files: dict[str, VersionFile]) -> Manifest:
    records = sorted(
        (_record_of(name, file) for name, file in files.items()), key=lambda record: record.number
    )
    parents = {record.number: record.parent for record in records}
    # No writer that is still at work may take this manifest for the one that it knows.
    generation = int(time.time())
    last = max(parents, default=0)
    return Manifest(order_of(parents), _KEYFRAME_EVERY, {}, generation, last + 1, tuple(records))


def _record_of(name: str, file: VersionFile) -> VersionRecord:
    header = file.header
    return VersionRecord(
        number=header.number,
        id=header.id,
        file=name,
        file_bytes=file.num_bytes,
        header_bytes=file.payload_start - HEAD_BYTES,
        parent=None if header.parent is None else header.parent[0],
        raw_bytes=sum(entry.described.spec.num_bytes for entry in header.tensors),
        metrics=header.metrics,
        saved=header.saved,
    )


def order_of(parents: dict[int, int | None]) -> str:
    """The order in which versions refer to each other; the default one where none does.

    >>> order_of({1: 2, 2: None}), order_of({1: None, 2: 1, 3: 2}), order_of({1: None, 2: 1, 3: 1})
    ('backward', 'forward', 'hop')
    """
    known = {number: parent for number, parent in parents.items() if parent is not None}
    if all(parent > number for number, parent in known.items()):
        return "backward"
    return "forward" if len(set(known.values())) == len(known) else "hop"


def _check_loss(
    names: Sequence[str],
    manifest: Manifest,
    lost: dict[str, str],
    allow_loss: bool,
) -> None:
    if not manifest.versions:
        raise VersionUnavailable(f"expected files of versions, got {len(names)} that are no use")
    gone = {number_in(name) for name in names} - {record.number for record in manifest.versions}
    if gone and not allow_loss:
        reasons = "; ".join(lost[name] for name in names if number_in(name) in gone)
        raise CorruptCheckpoint(
            f"cannot recover the versions {sorted(gone)}, see allow_loss: {reasons}"
        )


def _keep_damaged_manifest(place: Place) -> None:
    source = storage.join(place.url, MANIFEST_NAME)
    if not storage.exists(source, options=place.options):
        return
    data = storage.read_bytes(source, options=place.options)
    target = storage.join(place.url, DAMAGED_NAME)
    with storage.atomic_write(target, options=place.options) as file:
        file.write(data)
