"""What is known of the samples of a source before they are read, and of its splits."""

from __future__ import annotations

import itertools
import posixpath
import re
from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

from .. import storage
from ..format.names import is_metadata
from ..redaction import links_of

StorageOptions = storage.Options
TRAINING = frozenset({"train", "training"})
_OTHERS = frozenset({"val", "valid", "validation", "eval", "test", "testing"})
_SPLITS = TRAINING | _OTHERS


class FieldRef(NamedTuple):
    """Where a field's bytes are: ``[start, stop)`` of a file, to its end if stop is ``None``."""

    name: str
    url: str
    start: int = 0
    stop: int | None = None


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
        key = _free_key(_legal_key(path), keys)
        keys[key] = None
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
    parts = [part for part in re.split(r"[/\\\0]", local) if part not in ("", ".", "..")]
    parts[-1] = posixpath.splitext(parts[-1])[0].replace(".", "_") or "_"
    key = "/".join(parts).encode("utf-8", "replace").decode()
    return f"_{key.lstrip('_')}" if is_metadata(f"{key}.jpg") else key


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
    is_one_of_tars = len(splits) == 1 and next(iter(splits.values()))[0].endswith(".tar")
    return {} if is_one_of_tars else dict(sorted(splits.items()))


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
