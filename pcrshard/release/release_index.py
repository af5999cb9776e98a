"""The index of a folder of releases: which versions it has, and which files lead to them.

See docs/checkpoints-format.md, section 5.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .. import storage
from ..checkpoint.file_frame import require
from ..checkpoint.version_file import named
from ..errors import CorruptCheckpoint, StorageError, UnsupportedVersion, VersionUnavailable

INDEX_NAME = "releases.json"
FORMAT = "pcrshard releases"
VERSION = 1
# Read at most: ten thousand releases. Values take thirty times as much in memory.
MAX_INDEX_BYTES = 1 << 22
# No network and no patch is larger.
_MAX_COUNT = 1 << 48
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"[0-9]{6,12}-[0-9a-f]{16}-(keyframe|delta)\.pcp")
_DIGITS_OF_ID = 16


@dataclasses.dataclass(frozen=True)
class Release:
    """One version that is offered.

    Attributes:
        number: Its number in the sender's store.
        id: SHA-256 of its restored content, in hexadecimal digits.
        raw_bytes: Bytes of the restored tensors.
    """

    number: int
    id: str
    raw_bytes: int


@dataclasses.dataclass(frozen=True)
class ReleaseFile:
    """One file: a patch that makes a version of an older one, or of nothing.

    Attributes:
        name: In the folder of the index.
        num_bytes: Its size.
        sha256: Of all its bytes, in hexadecimal digits.
        old: Id of the version that the receiver must hold; ``None`` for a keyframe.
        new: Id of the version that it makes.
    """

    name: str
    num_bytes: int
    sha256: str
    old: str | None
    new: str


@dataclasses.dataclass(frozen=True)
class ReleaseIndex:
    """All releases of a folder.

    Attributes:
        releases: In the order in which they were published.
        files: What leads to them.
        generation: Counts how often the index was written.
    """

    releases: tuple[Release, ...] = ()
    files: tuple[ReleaseFile, ...] = ()
    generation: int = 0

    def find(self, number: int | None) -> Release:
        """The release of a number; ``None`` for the newest.

        Raises:
            VersionUnavailable: There is none.
        """
        if number is None and self.releases:
            return self.releases[-1]
        for release in self.releases:
            if release.number == number:
                return release
        known = ", ".join(str(release.number) for release in self.releases[-20:])
        asked = "the newest" if number is None else number
        raise VersionUnavailable(f"expected one of the releases {known or '(none)'}, got {asked}")

    def path_to(
        self,
        release: Release,
        held: Collection[str],
    ) -> list[ReleaseFile]:
        """The files that make a release of what is held, with the fewest bytes; in their order.

        >>> one = Release(1, "a", 10)
        >>> two = Release(2, "b", 10)
        >>> key = ReleaseFile("key", 9, "", None, "b")
        >>> delta = ReleaseFile("delta", 2, "", "a", "b")
        >>> index = ReleaseIndex((one, two), (key, delta))
        >>> [file.name for file in index.path_to(two, {"a"})]
        ['delta']
        >>> [file.name for file in index.path_to(two, set())]
        ['key']

        Raises:
            VersionUnavailable: No files lead to it.
        """
        leading: dict[str | None, list[ReleaseFile]] = {}
        for file in self.files:
            leading.setdefault(file.old, []).append(file)
        came_by = _cheapest(leading, release.id, {None, *held})
        if release.id not in came_by:
            raise VersionUnavailable(f"no file leads to release {release.number}")
        path: list[ReleaseFile] = []
        file_to = came_by[release.id]
        while file_to is not None:
            path.append(file_to)
            file_to = came_by[file_to.old]
        return path[::-1]


def _cheapest(
    leading: Mapping[str | None, Sequence[ReleaseFile]],
    wanted: str,
    held: Collection[str | None],
) -> dict[str | None, ReleaseFile | None]:
    """The last file on the way with the fewest bytes to each version, by Dijkstra's algorithm."""
    came_by: dict[str | None, ReleaseFile | None] = {}
    # The second number only keeps the heap from comparing what cannot be compared.
    heap: list[tuple[int, int, str | None, ReleaseFile | None]] = []
    for start in held:
        heapq.heappush(heap, (0, len(heap), start, None))
    pushed = len(heap)
    while heap and wanted not in came_by:
        cost, _, at, file = heapq.heappop(heap)
        if at in came_by:
            continue
        came_by[at] = file
        for following in leading.get(at, ()):
            entry = (cost + following.num_bytes, pushed, following.new, following)
            heapq.heappush(heap, entry)
            pushed += 1
    return came_by


def release_file_name(release: Release, old: str | None) -> str:
    """The name of a file, which depends on nothing but what it makes of what.

    >>> release_file_name(Release(7, "ab" * 32, 1), None)
    '000007-abababababababab-keyframe.pcp'
    """
    kind = "keyframe" if old is None else "delta"
    return f"{release.number:06d}-{release.id[:_DIGITS_OF_ID]}-{kind}.pcp"


def pack_index(index: ReleaseIndex) -> bytes:
    """The bytes of an index."""
    plain = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(index)}
    return json.dumps(plain, indent=1).encode()


def parse_index(data: bytes) -> ReleaseIndex:
    """The index of a file's bytes, possibly hostile.

    Raises:
        CorruptCheckpoint: A rule of the format is broken.
        UnsupportedVersion: A newer pcrshard has written it.
    """
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"the index of releases is not JSON: {error}") from error
    require(isinstance(raw, dict) and raw.get("format") == FORMAT, f"expected {FORMAT!r}")
    if raw.get("version") != VERSION:
        found = str(raw.get("version"))[:40]
        raise UnsupportedVersion(f"expected version {VERSION} of the index, got {found}")
    keys = {"format", "version", "generation", "releases", "files"}
    require(raw.keys() == keys, f"expected the keys {sorted(keys)}")
    require(_is_count(raw["generation"]), "expected a generation")
    releases = tuple(_parse_release(item) for item in _list(raw["releases"]))
    files = tuple(_parse_file(item) for item in _list(raw["files"]))
    _check_files(releases, files)
    return ReleaseIndex(releases, files, raw["generation"])


def _check_files(releases: Sequence[Release], files: Sequence[ReleaseFile]) -> None:
    """Each file leads from an older release to a newer one, so that there are no circles."""
    order = {release.id: place for place, release in enumerate(releases)}
    require(len(order) == len(releases), "expected distinct releases")
    numbers = {release.number for release in releases}
    require(len(numbers) == len(releases), "expected distinct numbers of releases")
    names = {file.name for file in files}
    require(len(names) == len(files), "expected distinct names of files")
    for file in files:
        require(file.new in order, f"{file.name}: it makes no release of this index")
        if file.old is not None:
            known = file.old in order and order[file.old] < order[file.new]
            require(known, f"{file.name}: expected it to begin at an older release")


def _parse_release(raw: Any) -> Release:
    require(_has_fields(raw, Release), "expected a release")
    require(_is_count(raw["number"]) and raw["number"] > 0, "expected a release's number")
    require(_is_digest(raw["id"]), "expected the id of a release")
    require(_is_count(raw["raw_bytes"]), "expected the bytes of a release")
    return Release(**raw)


def _parse_file(raw: Any) -> ReleaseFile:
    require(_has_fields(raw, ReleaseFile), "expected a file of a release")
    name = raw["name"]
    known = isinstance(name, str) and _FILE_NAME.fullmatch(name) is not None
    require(known, f"expected the name of a release's file, got {str(name)[:80]!r}")
    require(_is_count(raw["num_bytes"]), f"{name}: expected its size")
    require(_is_digest(raw["sha256"]), f"{name}: expected its SHA-256")
    require(_is_digest(raw["new"]), f"{name}: expected the id of the version that it makes")
    require(raw["old"] is None or _is_digest(raw["old"]), f"{name}: expected an id to begin at")
    return ReleaseFile(**raw)


def _has_fields(raw: Any, kind: Any) -> bool:
    names = {field.name for field in dataclasses.fields(kind)}
    return isinstance(raw, dict) and raw.keys() == names


def _list(raw: Any) -> list[Any]:
    require(isinstance(raw, list), "expected a list of releases and one of files")
    return list(raw)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def read_index(url: str, options: storage.Options | None = None) -> ReleaseIndex | None:
    """The index of a folder, one request; ``None`` if there is none.

    Raises:
        CorruptCheckpoint: It is damaged.
        StorageError: It cannot be read, or is too large.
    """
    place = storage.join(url, INDEX_NAME)
    try:
        data = storage.read_bytes(place, options=options, max_bytes=MAX_INDEX_BYTES)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    with named(place):
        return parse_index(data)
