"""Folders of images, listed into columns."""

from __future__ import annotations

import bisect
import os
from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .. import storage
from ..format.names import JPEG_EXTENSIONS, OTHER_IMAGE_EXTENSIONS
from ..redaction import get_logger, redact_url
from ..storage.stores import mapped_errors
from ..storage.urls import split
from .row_lists import is_list
from .sample_table import Texts
from .samples import FieldRef
from .tars import is_archive

_log = get_logger("pcrshard")
_IMAGES = JPEG_EXTENSIONS | OTHER_IMAGE_EXTENSIONS


class Folder(NamedTuple):
    """Images of one folder.

    Attributes:
        name: Its path in the source, with a slash at the end; empty for the source itself.
        url: What the URLs of its images begin with.
        rest: What they end with.
        rows: Their numbers.
    """

    name: str
    url: str
    rest: str
    rows: range


class ImageFiles:
    """The images of folders, in the order of the folders' names, then of theirs.

    Attributes:
        folders: Those that hold images.
        archives: Tars among them.
        lists: Names of lists of files among them.
    """

    def __init__(self) -> None:
        self.folders: list[Folder] = []
        self.archives: list[FieldRef] = []
        self.lists: list[str] = []
        self.num_others = 0
        self.first_other = ""
        self._names = Texts()
        self._versions = Texts()
        self._times = array("q")
        self._sizes = array("q")
        self._firsts = array("Q")
        # URLs that are not that of their folder with the name.
        self._urls: dict[int, str] = {}

    def add(self, name: str, files: Iterable[tuple[str, str, int | None, str | int]]) -> None:
        """Add a folder's files: names, URLs, sizes, versions. Hidden ones are passed over.

        The versions of all files are texts, or times of writing in nanoseconds.
        """
        first = len(self._names)
        prefix, rest = "", ""
        for base, url, size, version in files:
            if base.startswith("."):
                continue
            stem, _, extension = base.rpartition(".")
            if stem and extension.lower() in _IMAGES:
                if len(self._names) == first:
                    protocol, path, rest = split(url)
                    prefix = protocol + path.removesuffix(base)
                if url != f"{prefix}{base}{rest}":
                    self._urls[len(self._names)] = url
                self._names.append(base)
                if isinstance(version, int):
                    self._times.append(version)
                else:
                    self._versions.append(version)
                self._sizes.append(-1 if size is None else size)
            elif is_archive(base):
                known = _version(size, version)
                self.archives.append(FieldRef(name + base, url, 0, size, known))
            else:
                self.num_others += 1
                self.first_other = self.first_other or name + base
                if is_list(base):
                    self.lists.append(name + base)
        if len(self._names) > first:
            rows = range(first, len(self._names))
            self.folders.append(Folder(name, prefix, rest, rows))
            self._firsts.append(first)

    def __len__(self) -> int:
        return len(self._names)

    def name(self, number: int) -> str:
        """Return the name of an image in its folder."""
        return self._names[number]

    def size(self, number: int) -> int | None:
        """Return the bytes of an image, if known."""
        size = self._sizes[number]
        return None if size < 0 else size

    def file(self, number: int) -> tuple[str, str]:
        """Return the URL and the version of an image."""
        url = self._urls.get(number)
        if url is None:
            folder = self.folders[bisect.bisect_right(self._firsts, number) - 1]
            url = f"{folder.url}{self._names[number]}{folder.rest}"
        if self._times:
            return url, _version(self.size(number), self._times[number])
        return url, self._versions[number]


def _version(size: int | None, version: str | int) -> str:
    if isinstance(version, str):
        return version
    return "" if size is None else storage.local_version(size, version)


def list_local(root: str) -> ImageFiles:
    """List a local folder; links to folders are followed once, after the folders themselves.

    A warning names links that lead to what is listed already, and images that are reached twice.

    Raises:
        StorageError: The folder or one in it cannot be read.
    """
    path = storage.plain_path(root)
    found = ImageFiles()
    with mapped_errors(root, "list"):
        walk = _Walk()
        walk.run(path)
        for name, real in sorted(walk.folders.items()):
            files = walk.files_of(os.path.join(path, name), real)
            url = f"{root.rstrip('/')}/{name}"
            found.add(name, ((base, url + base, size, version) for base, size, version in files))
    if walk.again:
        _log.warning(
            "%s: did not follow the links %s to folders that are listed already",
            redact_url(root),
            ", ".join(walk.again[:5]),
        )
    if walk.twice:
        _log.warning(
            "%s: %d files are reached twice by links, such as %s",
            redact_url(root),
            len(walk.twice),
            walk.twice[0],
        )
    return found


class _Walk:
    """A walk over local folders, each of which is entered once, by a link only if need be.

    Attributes:
        folders: Names in the source, with a slash at the end, and real paths.
        again: Links to folders that were entered already.
        twice: Linked files that are listed under another name, too.
    """

    def __init__(self) -> None:
        self.folders: dict[str, str] = {}
        self.again: list[str] = []
        self.twice: list[str] = []
        self._entered: set[str] = set()
        self._targets: set[str] = set()

    def run(self, root: str) -> None:
        """Find all folders."""
        links = [("", root)]
        while links:
            name, path = links.pop(0)
            real = os.path.realpath(path)
            if real in self._entered:
                self.again.append(name.rstrip("/"))
                continue
            links += sorted(self._enter(name, real))
            links.sort()

    def _enter(self, name: str, real: str) -> Iterator[tuple[str, str]]:
        """Enter a folder and those in it; yield links to others."""
        inside = [(name, real)]
        while inside:
            name, real = inside.pop()
            if real in self._entered:
                continue  # a link has led here before
            self._entered.add(real)
            self.folders[name] = real
            with os.scandir(real) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        inside.append((f"{name}{entry.name}/", entry.path))
                    elif entry.is_symlink() and entry.is_dir():
                        yield f"{name}{entry.name}/", entry.path

    def files_of(self, path: str, real: str) -> Iterator[tuple[str, int | None, int]]:
        """Yield the files of a folder in the order of their names: name, size, time."""
        with os.scandir(real) as entries:
            names = sorted(
                (entry.name, entry.is_symlink())
                for entry in entries
                if not entry.name.startswith(".") and not entry.is_dir()
            )
        for name, is_link in names:
            if is_link:
                target = os.path.realpath(f"{real}/{name}")
                if target in self._targets or os.path.dirname(target) in self._entered:
                    self.twice.append(os.path.join(path, name))
                self._targets.add(target)
            try:
                status = os.stat(f"{real}/{name}")
            except OSError:  # a broken link; whoever reads it says so
                yield name, None, 0
                continue
            yield name, status.st_size, status.st_mtime_ns


def list_named(files: Iterable[tuple[str, storage.Listed]]) -> ImageFiles:
    """List files that a store has listed, by their paths in the source."""
    found = ImageFiles()
    by_folder: dict[str, list[tuple[str, str, int | None, str]]] = {}
    for path, (url, size, version) in files:
        folder, slash, base = path.rpartition("/")
        if not any(part.startswith(".") for part in folder.split("/")):
            by_folder.setdefault(folder + slash, []).append((base, url, size, version))
    for name, own in sorted(by_folder.items()):
        found.add(name, sorted(own, key=lambda file: file[:2]))
    return found
