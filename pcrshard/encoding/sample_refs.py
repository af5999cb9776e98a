"""What is known of the samples of a source before they are read, and of its splits."""

from __future__ import annotations

import itertools
import posixpath
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from .. import storage
from ..errors import EncodeError
from ..format.names import is_metadata, numbered, place_in_list
from ..format.shard_index import MAX_LISTED
from ..redaction import links_of

StorageOptions = storage.Options
TRAINING = frozenset({"train", "training"})
_OTHERS = frozenset({"val", "valid", "validation", "eval", "test", "testing"})
_SPLITS = TRAINING | _OTHERS


class FieldRef(NamedTuple):
    """Where a field's bytes are: ``[start, stop)`` of a file, to its end if stop is ``None``.

    ``place`` is that of an image in a list, whose name is ``name``; ``None`` for a field alone.
    """

    name: str
    url: str
    start: int = 0
    stop: int | None = None
    place: int | None = None


class SampleRef(NamedTuple):
    """A sample to encode: fields to read, and fields already known."""

    key: str
    refs: tuple[FieldRef, ...]
    known: tuple[tuple[str, bytes], ...] = ()


class Source(NamedTuple):
    """All samples of a source in a stable order.

    ``classes`` are the names of its labels, ``ignored`` the files that were left out, and
    ``splits`` the training, validation and test sets that it seems to hold, each with what to
    encode for that one.
    """

    samples: list[SampleRef]
    classes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    splits: Mapping[str, str] = {}


def unique_keys(paths: Iterable[str]) -> list[str]:
    """Legal, distinct keys for file names: no dots in the last part, no way out of a folder."""
    keys: dict[str, None] = {}
    for path in paths:
        keys[_free_key(_legal_key(path), keys)] = None
    return list(keys)


def _free_key(stem: str, taken: Container[str]) -> str:
    """A key that is not taken: the stem, or the stem and a number."""
    numbered = (f"{stem}_{number}" for number in itertools.count(1))
    candidates = itertools.chain([stem], numbered)
    return next(key for key in candidates if key not in taken)


def _legal_key(path: str) -> str:
    """A legal key for a file's name, or for the path of a URL, never for the rest of it."""
    links = links_of(path)
    remote = [link for link in links if link.scheme] or links
    names = [link.path for link in remote] + [link.host for link in remote] + ["_"]
    local = next(name for name in names if name.strip("/\\\0."))
    parts = _legal_parts(local)
    key = "/".join(parts).encode("utf-8", "replace").decode()
    return f"_{key.lstrip('_')}" if is_metadata(f"{key}.jpg") else key


def _legal_parts(path: str) -> list[str]:
    """The folders of a path and its name, without dots and an extension."""
    parts = re.split(r"[/\\\0]", path)
    *folders, name = [part for part in parts if part not in ("", ".", "..")]
    stem = posixpath.splitext(name)[0]
    return [*folders, stem.replace(".", "_") or "_"]


def gather_lists(
    samples: list[SampleRef],
    wanted: Sequence[str] | None = None,
) -> list[SampleRef]:
    """Make lists of numbered images: of ``images.0.jpg``, ``images.1.jpg`` the list ``images.jpg``.

    Args:
        samples: What a tar has.
        wanted: Which lists to make; by default those that are plainly meant: of samples that have
            different numbers of images, which are counted from 0 without a gap.

    Raises:
        EncodeError: A list that is wanted is not there, or has a gap.
    """
    found = _find_lists(samples)
    if wanted is None:
        fields = {ref.name for sample in samples for ref in sample.refs}
        names = {name for name, rows in found.items() if _is_plain(rows) and name not in fields}
    else:
        names = set(wanted)
        for name in wanted:
            _check_list(name, samples, found.get(name))
    return [_gather(sample, names) for sample in samples] if names else samples


def _find_lists(samples: Sequence[SampleRef]) -> dict[str, list[list[int]]]:
    """For each list that fields are numbered for, which places each sample has."""
    found: dict[str, list[list[int]]] = {}
    for row, sample in enumerate(samples):
        for place in map(place_in_list, (ref.name for ref in sample.refs)):
            if place is not None:
                rows = found.setdefault(place[0], [[] for _ in samples])
                rows[row].append(place[1])
    return found


def _is_plain(rows: Sequence[Sequence[int]]) -> bool:
    lengths = {len(places) for places in rows}
    return len(lengths) > 1 and 2 <= max(lengths) <= MAX_LISTED and all(map(_is_counted, rows))


def _is_counted(places: Sequence[int]) -> bool:
    return sorted(places) == list(range(len(places)))


def _check_list(
    name: str,
    samples: Sequence[SampleRef],
    rows: Sequence[Sequence[int]] | None,
) -> None:
    if rows is None:
        raise EncodeError(
            f"expected numbered fields such as {numbered(name, 0)!r} for the list {name!r}, "
            "found none"
        )
    for sample, places in zip(samples, rows, strict=True):
        if not _is_counted(places) or name in [ref.name for ref in sample.refs]:
            raise EncodeError(
                f"expected images 0, 1, ... of the list {name!r} without a gap and no field of "
                f"that name, got {sorted(places)}",
                key=sample.key,
            )


def _gather(sample: SampleRef, names: Container[str]) -> SampleRef:
    refs = []
    for ref in sample.refs:
        place = place_in_list(ref.name)
        if place is not None and place[0] in names:
            refs.append(ref._replace(name=place[0], place=place[1]))
        else:
            refs.append(ref)
    return sample._replace(refs=tuple(sorted(refs, key=lambda ref: ref.place or 0)))


def find_splits(names: Iterable[str]) -> dict[str, list[str]]:
    """The files of each split, or nothing if the files are no splits.

    A split is a top-level folder with one of the usual names; for tars without folders, it is such
    a word in the tar's name. All files must be in splits, or there must be a training set and
    another one: a class may be called ``train``. Tars of one split alone are not mixed with
    anything, and have labels of their own.

    Args:
        names: Paths of files relative to the source.

    >>> find_splits(["train/cat/1.jpg", "val/cat/2.jpg"])
    {'train': ['train/cat/1.jpg'], 'val': ['val/cat/2.jpg']}
    >>> find_splits(["bus/1.jpg", "train/2.jpg"])
    {}
    """
    splits: dict[str, list[str]] = {}
    is_whole = True
    for name in names:
        split = _split_of(name)
        if split is None:
            is_whole = False
        else:
            splits.setdefault(split, []).append(name)
    kinds = {split.lower() for split in splits}
    if not (is_whole or (kinds & TRAINING and kinds & _OTHERS)):
        return {}
    return {} if _is_one_of_tars(splits) else dict(sorted(splits.items()))


def _is_one_of_tars(splits: Mapping[str, Sequence[str]]) -> bool:
    if len(splits) != 1:
        return False
    names = next(iter(splits.values()))
    return names[0].endswith(".tar")


def _split_of(name: str) -> str | None:
    folder, slash, _ = name.partition("/")
    if slash:
        return folder if folder.lower() in _SPLITS else None
    return _split_of_tar(name)


def _split_of_tar(name: str) -> str | None:
    """The split that a tar is named for, if it is one."""
    stem, extension = posixpath.splitext(name)
    if extension != ".tar":
        return None
    words = [word for word in re.split(r"[-_.]", stem) if word.lower() in _SPLITS]
    return words[0] if len(words) == 1 else None
