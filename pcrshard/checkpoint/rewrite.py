"""Whole stores: verify, remove versions, write deltas in another order. Codes add up exactly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence

from ..errors import CorruptCheckpoint, PCRError, VersionUnavailable
from .held_version import HeldVersion, Progress, Steps
from .manifest import ORDERS, Manifest, VersionRecord, require_manifest
from .writer import Place, clean, replace_manifest, writing


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
