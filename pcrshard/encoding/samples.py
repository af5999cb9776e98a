"""References to samples that are not yet read: byte ranges, keys, and image lists."""

from __future__ import annotations

import contextlib
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .. import storage
from ..errors import PCRError, StorageError
from ..format.names import is_metadata
from ..redaction import links_of

StorageOptions = storage.Options
LABEL_FIELD = "cls"
# Beginning of the names of unpacked copies of tars.
UNPACKED = "unpacked-"
_SAMPLES_PER_READ = 64
# Names of which nothing has to be changed for a key.
_PLAIN_STEM = re.compile(r"([A-Za-z0-9-][A-Za-z0-9_-]*)\.[A-Za-z0-9]+\Z")
_PLAIN_FOLDER = re.compile(r"([A-Za-z0-9-][A-Za-z0-9_-]*/)*")


class FieldRef(NamedTuple):
    """The byte range ``[start, stop)`` of a field in a file; to its end if stop is ``None``.

    ``version`` is that of the file when it was listed, see :class:`pcrshard.storage.Listed`.
    """

    name: str
    url: str
    start: int = 0
    stop: int | None = None
    version: str = ""


# A number, the name of a class, or none.
Label = int | str | None


class ListedImage(NamedTuple):
    """An image of a folder or a list.

    Attributes:
        file: The whole file, named by its path.
        label: Its class.
        known: Its other fields.
        split: The split that a list says it is in.
    """

    file: FieldRef
    label: Label = None
    known: tuple[tuple[str, bytes], ...] = ()
    split: str = ""


class SampleRef(NamedTuple):
    """A sample to encode: fields to read, and fields whose bytes are known from the listing."""

    key: str
    refs: tuple[FieldRef, ...]
    known: tuple[tuple[str, bytes], ...] = ()


class Unlayered(NamedTuple):
    """A file, a sample or a tar that is not stored as progressive scans of its own.

    Attributes:
        key: Key of the sample; empty for the rest of a damaged tar.
        source: URL of the image or the tar.
        reason: What is wrong.
        outcome: ``skipped``, ``kept``, ``undecodable`` (kept, but no decoder here can decode it) or
            ``reencoded``.
        member: Name of the member of a tar that could not be listed.
        offset: Where it, or the damage of the tar, is.
    """

    key: str
    source: str
    reason: str
    outcome: str
    member: str | None = None
    offset: int | None = None


class Source(NamedTuple):
    """All samples of a source in a stable order.

    Attributes:
        samples: The samples.
        classes: Names of the labels 0, 1, ...; empty if labels are numbers or missing.
        skipped: What was left out.
    """

    samples: Sequence[SampleRef]
    classes: tuple[str, ...]
    skipped: tuple[Unlayered, ...] = ()


def unique_keys(paths: Iterable[str]) -> list[str]:
    """Return valid, distinct keys for file names: no dots in the last part, no ``..``."""
    return list(distinct_keys(map(_legal_key, paths)))


def distinct_keys(stems: Iterable[str]) -> Iterator[str]:
    """Yield keys, each with a number at its end if it was there before."""
    keys: set[str] = set()
    # How often each stem was taken: thousands of URLs may differ in their queries only.
    taken: dict[str, int] = {}
    for stem in stems:
        key = stem
        while key in keys:
            taken[stem] = taken.get(stem, 0) + 1
            key = f"{stem}_{taken[stem]}"
        keys.add(key)
        yield key


def legal_keys(folder: str, names: Iterable[str]) -> Iterator[str]:
    """Yield valid keys of files of a folder, whose name ends with a slash; some may be equal."""
    prefix = _legal_key(f"{folder}x")[:-1]
    # Not if the folder's name may be read as something else.
    plain = _PLAIN_STEM.match if _PLAIN_FOLDER.fullmatch(folder) else lambda _: None
    for name in names:
        stem = plain(name)
        yield f"{prefix}{stem[1]}" if stem else _legal_key(folder + name)


def _legal_key(path: str) -> str:
    """Return a valid key for a file name, or for the path of a URL."""
    link = next((link for link in links_of(path) if link.scheme), None)
    usable = path if link is None else link.path.strip("/") or link.host
    parts = [part for part in re.split(r"[/\\\0]", usable) if part not in ("", ".", "..")] or ["_"]
    parts[-1] = posixpath.splitext(parts[-1])[0].replace(".", "_") or "_"
    key = "/".join(parts).encode("utf-8", "replace").decode()
    return f"_{key.lstrip('_')}" if is_metadata(f"{key}.jpg") else key


def is_unpacked(url: str) -> bool:
    """Return whether a file is an unpacked copy of a tar, whose version is that of the tar."""
    return storage.file_name(url).startswith(UNPACKED)


def version_of(url: str) -> str:
    """Return the version of a file that a user named; empty for a remote one.

    To look up each of them would double the requests.
    """
    with contextlib.suppress(StorageError):  # whoever reads it says that it is missing
        return storage.look_up(url).version if storage.is_local(url) else ""
    return ""


def read_samples(
    samples: Sequence[SampleRef], options: StorageOptions
) -> Iterator[tuple[SampleRef, dict[str, bytes] | PCRError]]:
    """Yield each sample with its fields by name, or the first error of reading them.

    Raises:
        StorageError: At the end, a tar is no longer the one that was listed; one request a tar.
    """
    tars: dict[str, str] = {}
    for start in range(0, len(samples), _SAMPLES_PER_READ):
        batch = samples[start : start + _SAMPLES_PER_READ]
        refs = [ref for sample in batch for ref in sample.refs]
        # A file that has grown since it was listed is read whole.
        ranges = [(ref.url, ref.start, ref.stop if ref.start else None) for ref in refs]
        tars |= {ref.url: ref.version for ref in refs if ref.start and not is_unpacked(ref.url)}
        values = iter(storage.read_ranges(ranges, options=options))
        for sample in batch:
            found: dict[str, Any] = {ref.name: next(values) for ref in sample.refs}
            errors = (value for value in found.values() if isinstance(value, PCRError))
            yield sample, next(errors, None) or found | dict(sample.known)
    for url, listed in tars.items():
        if storage.look_up(url, options=options).version != listed:
            raise StorageError(
                "the tar was replaced after it was listed: run again (encode with --resume)",
                url=url,
            )
