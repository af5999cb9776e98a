"""The manifest: which versions a store has, in which files; written last, replaced as a whole.

See docs/checkpoints-format.md, section 3.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from typing import Any

from .. import storage
from ..errors import CorruptCheckpoint, StorageError, VersionUnavailable
from .file_frame import MANIFEST, pack_frame, require, unpack_frame
from .version_file import ID_BYTES

MANIFEST_NAME = "manifest.pcm"
ORDERS = ("backward", "forward", "hop")
_FILE_NAME = re.compile(r"[0-9]{6,12}-[0-9a-f]{8}\.pcd")
_RECORD_TYPES: dict[str, tuple[type, ...]] = {
    "number": (int,),
    "id": (bytes,),
    "file": (str,),
    "file_bytes": (int,),
    "header_bytes": (int,),
    "parent": (int, type(None)),
    "raw_bytes": (int,),
    "metrics": (dict,),
    "saved": (float,),
}


@dataclasses.dataclass(frozen=True)
class VersionRecord:
    """One version of a store.

    Attributes:
        number: From 1, increasing; numbers are not used again.
        id: SHA-256 of its restored content.
        file: Its file's name in the store's folder.
        file_bytes: Size of the file.
        header_bytes: Size of the packed header in it.
        parent: Number of the version that it is a delta to; ``None`` for a keyframe.
        raw_bytes: Bytes of the restored tensors.
        metrics: What the user noted.
        saved: Seconds since 1970.
    """

    number: int
    id: bytes
    file: str
    file_bytes: int
    header_bytes: int
    parent: int | None
    raw_bytes: int
    metrics: dict[str, Any]
    saved: float


@dataclasses.dataclass(frozen=True)
class Manifest:
    """All versions of a store.

    Attributes:
        order: One of :data:`ORDERS`.
        keyframe_every: At most so many versions are loaded through one keyframe.
        bounds: What the last writer allowed, described.
        generation: Counts how often the manifest was written.
        next_number: Of the next version.
        versions: By number, increasing.
    """

    order: str
    keyframe_every: int
    bounds: dict[str, Any]
    generation: int = 0
    next_number: int = 1
    versions: tuple[VersionRecord, ...] = ()

    def record(self, number: int) -> VersionRecord:
        """The record of a version.

        Raises:
            VersionUnavailable: There is none.
        """
        for record in self.versions:
            if record.number == number:
                return record
        known = ", ".join(str(record.number) for record in self.versions[-20:])
        raise VersionUnavailable(f"expected one of the versions {known or '(none)'}, got {number}")

    def replaced(self, *changed: VersionRecord) -> tuple[VersionRecord, ...]:
        """The records with some changed or added."""
        by_number = {record.number: record for record in (*self.versions, *changed)}
        return tuple(map(by_number.__getitem__, sorted(by_number)))


def file_name(number: int) -> str:
    """A name for a version's file that was never used, so that no file is overwritten."""
    return f"{number:06d}-{secrets.token_hex(4)}.pcd"


def is_version_file(name: str) -> bool:
    """Whether a name is one of :func:`file_name`."""
    return _FILE_NAME.fullmatch(name) is not None


def pack_manifest(manifest: Manifest) -> bytes:
    """The bytes of a manifest."""
    return pack_frame(MANIFEST, dataclasses.asdict(manifest))


def parse_manifest(data: bytes) -> Manifest:
    """The manifest of a file's bytes, possibly hostile.

    Raises:
        CorruptCheckpoint: A rule of the format is broken.
    """
    raw = unpack_frame(data, MANIFEST)
    names = {field.name for field in dataclasses.fields(Manifest)}
    require(raw.keys() == names, f"expected the keys {sorted(names)}")
    require(raw["order"] in ORDERS, f"expected an order of {ORDERS}")
    counts = (raw["keyframe_every"], raw["generation"], raw["next_number"])
    require(all(type(count) is int and count >= 0 for count in counts), "expected three counts")
    require(isinstance(raw["bounds"], dict), "expected a map of bounds")
    require(isinstance(raw["versions"], list), "expected a list of versions")
    versions = tuple(_parse_record(item) for item in raw["versions"])
    numbers = [record.number for record in versions]
    require(numbers == sorted(set(numbers)), "expected increasing numbers of versions")
    require(not numbers or numbers[-1] < raw["next_number"], "a number would be used again")
    return Manifest(**{**raw, "versions": versions})


def _parse_record(raw: Any) -> VersionRecord:
    require(isinstance(raw, dict) and raw.keys() == _RECORD_TYPES.keys(), "expected a record")
    for name, types in _RECORD_TYPES.items():
        require(type(raw[name]) in types, f"expected {name} to be {types[0].__name__}")
    counts = (raw["number"] - 1, raw["file_bytes"], raw["header_bytes"], raw["raw_bytes"])
    require(min(counts) >= 0, "expected counts in a record")
    require(len(raw["id"]) == ID_BYTES, "expected the id of a version")
    require(is_version_file(raw["file"]), f"expected the name of a version, got {raw['file']!r}")
    return VersionRecord(**raw)


def read_manifest(url: str, options: storage.Options | None = None) -> Manifest | None:
    """The manifest of a store, one request; ``None`` if there is none.

    Raises:
        CorruptCheckpoint: It is damaged.
        StorageError: It cannot be read.
    """
    place = storage.join(url, MANIFEST_NAME)
    data = _read_if_there(place, options)
    if data is None:
        return None
    try:
        return parse_manifest(data)
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"{error}: see DeltaStore.recover", url=place) from error


def _read_if_there(url: str, options: storage.Options | None) -> bytes | None:
    try:
        return storage.read_bytes(url, options=options)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def write_manifest(
    url: str,
    manifest: Manifest,
    options: storage.Options | None = None,
) -> None:
    """Replace the manifest as a whole.

    Raises:
        StorageError: The disk is full, or the store refuses.
    """
    place = storage.join(url, MANIFEST_NAME)
    durable = storage.is_local(url)
    with storage.atomic_write(place, options=options, durable=durable) as file:
        file.write(pack_manifest(manifest))


def require_manifest(url: str, options: storage.Options | None = None) -> Manifest:
    """The manifest of a store that is there.

    Raises:
        VersionUnavailable: There is no store.
    """
    manifest = read_manifest(url, options)
    if manifest is None:
        raise VersionUnavailable(
            "expected a store of checkpoints, there is none; where only its manifest was lost, "
            "`pcrshard checkpoint recover` writes it again",
            url=url,
        )
    return manifest


def check_pinned(
    record: VersionRecord,
    number: int,
    version_id: bytes,
) -> None:
    """Check that a file is the one that the manifest names.

    Raises:
        CorruptCheckpoint: It holds another version.
    """
    if (record.number, record.id) != (number, version_id):
        raise CorruptCheckpoint(
            f"expected version {record.number} {record.id.hex()}, got {number} {version_id.hex()}"
        )


def check_settings(
    manifest: Manifest,
    order: str | None,
    keyframe_every: int | None,
) -> None:
    """Check that options of a store are those that it has; ``None`` takes what it has.

    Raises:
        ValueError: It has another order or rhythm.
    """
    _check_setting("order", manifest.order, order)
    _check_setting("keyframe_every", manifest.keyframe_every, keyframe_every)


def _check_setting(
    name: str,
    known: object,
    asked: object,
) -> None:
    if asked is not None and asked != known:
        raise ValueError(f"the store has {name}={known!r}, got {asked!r}: see DeltaStore.rebase")
