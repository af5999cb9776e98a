"""Training, validation and test sets that lie side by side in one folder."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable

TRAINING = frozenset({"train", "training"})
_OTHERS = frozenset({"val", "valid", "validation", "eval", "test", "testing"})
_SPLITS = TRAINING | _OTHERS


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
    stem, extension = posixpath.splitext(name)
    if extension != ".tar":
        return None
    words = [word for word in re.split(r"[-_.]", stem) if word.lower() in _SPLITS]
    return words[0] if len(words) == 1 else None
