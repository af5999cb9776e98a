"""References to samples that are not yet read: byte ranges, keys, and image lists."""

from __future__ import annotations

import itertools
import posixpath
import re
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from .. import storage
from ..errors import EncodeError
from ..format.names import is_metadata, numbered, place_in_list
from ..format.shard_index import MAX_LISTED
from ..redaction import links_of

StorageOptions = storage.Options
LABEL_FIELD = "cls"


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
    """A sample to encode: fields to read, and fields whose bytes are known from the listing."""

    key: str
    refs: tuple[FieldRef, ...]
    known: tuple[tuple[str, bytes], ...] = ()


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
        stem = _legal_key(path)
        numbered_stems = (f"{stem}_{number}" for number in itertools.count(1))
        candidates = itertools.chain([stem], numbered_stems)
        keys[next(key for key in candidates if key not in keys)] = None
    return list(keys)


def _legal_key(path: str) -> str:
    """Return a valid key for a file name, or for the path of a URL."""
    links = links_of(path)
    remote = [link for link in links if link.scheme] or links
    names = [link.path for link in remote] + [link.host for link in remote] + ["_"]
    usable = next(name for name in names if name.strip("/\\\0."))
    parts = [part for part in re.split(r"[/\\\0]", usable) if part not in ("", ".", "..")]
    parts[-1] = posixpath.splitext(parts[-1])[0].replace(".", "_") or "_"
    key = "/".join(parts).encode("utf-8", "replace").decode()
    return f"_{key.lstrip('_')}" if is_metadata(f"{key}.jpg") else key


def number_labels(
    samples: Sequence[SampleRef],
    labels: Sequence[str | None],
    classes: Sequence[str],
) -> list[SampleRef]:
    """Return the samples with the number of their class in the field ``cls``.

    Args:
        samples: The samples.
        labels: The class name of each sample, or ``None``.
        classes: The names of classes 0, 1, ...

    Raises:
        EncodeError: A name is not among ``classes``.
    """
    numbers = {name: str(number).encode() for number, name in enumerate(classes)}
    if unknown := {label for label in labels if label is not None} - numbers.keys():
        raise EncodeError(
            f"expected classes among the {len(classes)} given names, such as {classes[0]!r}, "
            f"got {min(unknown)!r} in the source"
        )
    return [
        sample
        if label is None
        else sample._replace(known=((LABEL_FIELD, numbers[label]), *sample.known))
        for sample, label in zip(samples, labels, strict=True)
    ]


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
    found: dict[str, list[list[int]]] = {}
    for row, sample in enumerate(samples):
        for ref in sample.refs:
            if place := place_in_list(ref.name):
                found.setdefault(place[0], [[] for _ in samples])[row].append(place[1])
    names = set()
    for name in found if wanted is None else wanted:
        rows = found.get(name, [])
        lengths = {len(row) for row in rows}
        gap = next((row for row in rows if sorted(row) != list(range(len(row)))), None)
        is_list = bool(rows) and gap is None and name not in fields
        if wanted is None:
            is_list = is_list and len(lengths) > 1 and 2 <= max(lengths) <= MAX_LISTED
        elif not is_list:
            raise EncodeError(
                f"expected fields {numbered(name, 0)!r}, {numbered(name, 1)!r}, ... without a gap "
                f"and no field {name!r}, to make the list {name!r}, got the numbers {gap or []}"
            )
        names |= {name} if is_list else set()
    return [_gather(sample, names) for sample in samples] if names else samples


def _gather(sample: SampleRef, names: Container[str]) -> SampleRef:
    refs = []
    for ref in sample.refs:
        name, place = place_in_list(ref.name) or ("", None)
        refs.append(ref._replace(name=name, place=place) if name in names else ref)
    return sample._replace(refs=tuple(sorted(refs, key=lambda ref: ref.place or 0)))
