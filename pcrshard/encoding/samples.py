"""References to samples that are not yet read: byte ranges, keys, and image lists."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from .. import storage
from ..errors import EncodeError, PCRError
from ..format.names import is_metadata, numbered, place_in_list
from ..format.shard_index import MAX_LISTED
from ..redaction import links_of

StorageOptions = storage.Options
LABEL_FIELD = "cls"
_SAMPLES_PER_READ = 64


class FieldRef(NamedTuple):
    """The byte range ``[start, stop)`` of a field in a file; to its end if stop is ``None``.

    ``place`` is the position of an image in the list ``name``, and ``None`` for other fields.
    """

    name: str
    url: str
    start: int = 0
    stop: int | None = None
    place: int | None = None


class SampleRef(NamedTuple):
    """A sample to encode: fields to read, and fields whose bytes are known from the listing.

    ``label`` is the name of its class until classes are numbered.
    """

    key: str
    refs: tuple[FieldRef, ...]
    known: tuple[tuple[str, bytes], ...] = ()
    label: str | None = None


class Source(NamedTuple):
    """All samples of a source in a stable order.

    Attributes:
        samples: The samples.
        classes: Names of the labels 0, 1, ...; empty if labels are numbers or missing.
        ignored: Files that are neither images nor tars.
        splits: Names of the training, validation, and test sets that the source appears to hold.
    """

    samples: list[SampleRef]
    classes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()


def unique_keys(paths: Iterable[str]) -> list[str]:
    """Return valid, distinct keys for file names: no dots in the last part, no ``..``."""
    keys: dict[str, None] = {}
    for path in paths:
        key = stem = _legal_key(path)
        number = 0
        while key in keys:
            number += 1
            key = f"{stem}_{number}"
        keys[key] = None
    return list(keys)


def _legal_key(path: str) -> str:
    """Return a valid key for a file name, or for the path of a URL."""
    link = next((link for link in links_of(path) if link.scheme), None)
    usable = path if link is None else link.path.strip("/") or link.host
    parts = [part for part in re.split(r"[/\\\0]", usable) if part not in ("", ".", "..")] or ["_"]
    parts[-1] = posixpath.splitext(parts[-1])[0].replace(".", "_") or "_"
    key = "/".join(parts).encode("utf-8", "replace").decode()
    return f"_{key.lstrip('_')}" if is_metadata(f"{key}.jpg") else key


def number_labels(samples: Sequence[SampleRef], classes: Sequence[str]) -> list[SampleRef]:
    """Return the samples with the number of their class in the field ``cls``.

    Raises:
        EncodeError: The class of a sample is not among ``classes``.
    """
    numbers = {name: str(number).encode() for number, name in enumerate(classes)}

    def number(sample: SampleRef) -> SampleRef:
        if sample.label is None:
            return sample
        if sample.label not in numbers:
            raise EncodeError(
                f"expected classes among the {len(classes)} given names, such as {classes[0]!r}, "
                f"got {sample.label!r} in the source"
            )
        known = ((LABEL_FIELD, numbers[sample.label]), *sample.known)
        return sample._replace(known=known, label=None)

    return list(map(number, samples))


def gather_lists(
    samples: list[SampleRef],
    wanted: Sequence[str] | None = None,
) -> list[SampleRef]:
    """Gather numbered images into lists: ``images.0.jpg``, ``images.1.jpg`` to ``images.jpg``.

    Args:
        samples: The samples of tars.
        wanted: Names of the lists to make. Default: fields that are numbered from 0 without a gap
            and vary in count between samples.

    Raises:
        EncodeError: A wanted list does not exist, or has a gap.
    """
    fields = {ref.name for sample in samples for ref in sample.refs}
    places: dict[str, list[list[int]]] = {}
    for row, sample in enumerate(samples):
        for ref in sample.refs:
            if found := place_in_list(ref.name):
                name, place = found
                places.setdefault(name, [[] for _ in samples])[row].append(place)
    lists = set()
    for name in places if wanted is None else wanted:
        rows = [sorted(row) for row in places.get(name, [])]
        gap = next((row for row in rows if row != list(range(len(row)))), None)
        can_be_list = bool(rows) and gap is None and name not in fields
        lengths = set(map(len, rows))
        if wanted is not None and not can_be_list:
            raise EncodeError(
                f"expected fields {numbered(name, 0)!r}, {numbered(name, 1)!r}, ... without a gap "
                f"and no field {name!r}, to make the list {name!r}, got the numbers {gap or []}"
            )
        if wanted is not None or (
            can_be_list and len(lengths) > 1 and 2 <= max(lengths) <= MAX_LISTED
        ):
            lists.add(name)
    return [_gather(sample, lists) for sample in samples] if lists else samples


def _gather(sample: SampleRef, lists: Container[str]) -> SampleRef:
    refs = []
    for ref in sample.refs:
        name, place = place_in_list(ref.name) or ("", None)
        refs.append(ref._replace(name=name, place=place) if name in lists else ref)
    return sample._replace(refs=tuple(sorted(refs, key=lambda ref: ref.place or 0)))


def read_samples(
    samples: Sequence[SampleRef], options: StorageOptions
) -> Iterator[tuple[SampleRef, list[bytes | PCRError]]]:
    """Yield each sample with the bytes of its fields, or the error of reading them."""
    for start in range(0, len(samples), _SAMPLES_PER_READ):
        batch = samples[start : start + _SAMPLES_PER_READ]
        ranges = [(ref.url, ref.start, ref.stop) for sample in batch for ref in sample.refs]
        # All ranges of a tar must come from the same version of it.
        tars = {url for url, start, stop in ranges if (start, stop) != (0, None)}
        with storage.unchanged(tars, options=options):
            values = iter(storage.read_ranges(ranges, options=options))
        for sample in batch:
            yield sample, [next(values) for _ in sample.refs]
