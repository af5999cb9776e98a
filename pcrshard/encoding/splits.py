"""Training, validation and test sets in one source, and folders that belong together.

By the names of folders and tars, and without any names by structure: folders that hold the same
subfolders are sets, and folders that hold files of the same names are images and their masks.
"""

from __future__ import annotations

import itertools
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence

from .samples import FieldRef
from .tars import is_archive

TRAINING = frozenset({"train", "training", "trainval"})
_OTHERS = frozenset({"val", "valid", "validation", "eval", "dev", "test", "testing"})
_SPLITS = TRAINING | _OTHERS
# Words that say nothing beside the name of a split.
_PLAIN = frozenset({"set", "data", "dataset", "split", "images", "image", "imgs", "img"})
_MASKS = frozenset(
    {"annotation", "annotations", "mask", "masks", "label", "labels", "gt", "groundtruth"}
    | {"segmentation", "segmentations", "trimaps", "depth"}
)
# Camel case, runs of capitals, numbers.
_TOKEN = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def split_word(name: str) -> tuple[str, tuple[str, ...]]:
    """Return the word of a split in a name, and what else the name says; an empty word without one.

    >>> split_word("seg_train2017"), split_word("test_tube"), split_word("train_val")
    (('train', ('seg',)), ('test', ('tube',)), ('', ()))
    """
    tokens = _TOKEN.findall(name)
    words = [token for token in tokens if token.lower() in _SPLITS]
    if len(words) != 1:
        return "", ()
    rest = (token.lower() for token in tokens if token != words[0] and not token.isdigit())
    return words[0], tuple(token for token in rest if token not in _PLAIN)


def are_splits(names: Iterable[str]) -> bool:
    """Return whether the values of a column are the names of a training set and others."""
    words = [split_word(name)[0].lower() for name in names]
    return all(words) and not TRAINING.isdisjoint(words) and not _OTHERS.isdisjoint(words)


def split_files(files: Sequence[FieldRef]) -> dict[str, list[FieldRef]]:
    """Return the files of each split, with names relative to it; empty without splits.

    A split is a top-level folder with one of the usual words in its name, or, for tars outside
    folders, such a word in the tar's name. Because a class may be called ``train`` or
    ``test_tube``, either all files must be in splits, or there must be a training set and another
    split whose names agree but for that word, or a split must have folders inside where others have
    none (``train/cat/1.jpg unlabeled/2.jpg``). Folders with the same subfolders are splits, too.
    Tars of a single split need no choice, so they are not reported as one.
    """
    by_top: dict[str, list[FieldRef]] = {}
    for file in files:
        top, slash, rest = file.name.partition("/")
        if slash:
            by_top.setdefault(top, []).append(file._replace(name=rest))
        elif is_archive(file.name):
            by_top.setdefault(split_word(file.name)[0], []).append(file)
    named = {top: split_word(top) for top in by_top}
    named = {top: (word.lower(), rest) for top, (word, rest) in named.items() if word}
    if sum(len(by_top[top]) for top in named) < len(files):
        rests = {
            rest
            for (word, rest), (other, rest_2) in itertools.permutations(named.values(), 2)
            if rest == rest_2 and word in TRAINING and other in _OTHERS
        }
        flat = {top for top, own in by_top.items() if not any("/" in file.name for file in own)}
        named = {
            top: (word, rest)
            for top, (word, rest) in named.items()
            if rest in rests or (flat and _has_folders(by_top[top]))
        }
    elif len(named) == 1 and any(rest or is_archive(files[0].name) for _, rest in named.values()):
        named = {}
    if not named and _share_subfolders(by_top.values(), len(files)):
        return dict(sorted(by_top.items()))
    return {top: by_top[top] for top in sorted(named)}


def _has_folders(files: Sequence[FieldRef]) -> bool:
    """Return whether files are in several folders, and none outside them."""
    return len({file.name.partition("/")[0] for file in files}) > 1 and all(
        "/" in file.name for file in files
    )


def _share_subfolders(tops: Iterable[Sequence[FieldRef]], num_files: int) -> bool:
    """Return whether several folders hold the same subfolders, and no files beside them."""
    folders = [{file.name.partition("/")[0] for file in own if "/" in file.name} for own in tops]
    inside = sum("/" in file.name for own in tops for file in own)
    if len(folders) < 2 or inside < num_files:
        return False
    common = set.intersection(*folders)
    return len(common) >= 2 and all(2 * len(common) >= len(own) for own in folders)


def find_masks(files: Sequence[FieldRef]) -> tuple[str, str] | None:
    """Return two top-level folders of which one seems to hold masks of the other's images.

    Their files have the same names, but another extension, or one of the folders is called so.
    """
    stems: dict[str, dict[str, str]] = {}
    for file in files:
        top, slash, rest = file.name.partition("/")
        if slash:
            stem, extension = posixpath.splitext(rest)
            stems.setdefault(top, {})[stem] = extension.lower()
    for one, other in itertools.combinations(stems, 2):
        if _are_alike(stems[one], stems[other]):
            words = {token.lower() for name in (one, other) for token in _TOKEN.findall(name)}
            kinds = [set(stems[name].values()) for name in (one, other)]
            if words & _MASKS or kinds[0].isdisjoint(kinds[1]):
                return one, other
    return None


def _are_alike(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return whether half of the names are the same, but for what masks have at their ends."""
    short, long = sorted(
        ({posixpath.basename(stem) for stem in each} for each in (one, other)), key=len
    )
    return 2 * sum(stem in long for stem in short) >= len(short)


def strip_common(files: Sequence[FieldRef]) -> list[FieldRef]:
    """Return files named relative to the folder that all are in.

    The last folder stays, because it may be the only class.
    """
    prefix = posixpath.commonprefix([f"{posixpath.dirname(file.name)}/" for file in files])
    prefix = prefix[: prefix.rfind("/") + 1]
    below = {file.name[len(prefix) :].partition("/")[1] for file in files}
    if "" in below:  # some are in that folder itself
        prefix = prefix[: prefix.rstrip("/").rfind("/") + 1]
    return [file._replace(name=file.name[len(prefix) :]) for file in files]
