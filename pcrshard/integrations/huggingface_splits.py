"""Splits of a dataset: subfolders such as ``train`` and ``val`` that hold datasets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .. import storage
from ..errors import StorageError
from ..format.dataset_index import DatasetIndex
from ..reading.dataset_folder import index_url, open_dataset

# Folder names by the name of their split in `datasets`.
FOLDERS = {
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid", "eval", "dev"),
    "test": ("test", "testing"),
}
NAMES = {folder: name for name, folders in FOLDERS.items() for folder in folders}
# A name in "train[:10%]+test".
_NAME = re.compile(r"(?<![^+\s])[^\[\]+\s]+(?=[\[+\s]|$)")


@dataclass(frozen=True)
class Part:
    """One split: its index, the URL of each shard, and its subfolder; "" for the URL itself."""

    index: DatasetIndex
    urls: list[str] = field(repr=False)
    folder: str = ""


# Splits by name.
Parts = dict[str, Part]


def open_splits(url: str, storage_options: storage.Options = None) -> Parts:
    """Open the splits of a dataset's folder, or of a folder of datasets; at least one.

    A dataset's folder is one split, named after the folder if that is a usual split name, otherwise
    ``train``. Costs one small request, or one per usual name if there is no dataset index.

    Raises:
        StorageError: No dataset or split was found.
        ValueError: Two folders are the same split, or classes differ between splits.
    """
    own = storage.file_name(storage.split_query(url)[0].rstrip("/"))
    try:
        return {NAMES.get(own, "train"): Part(*open_dataset(url, storage_options=storage_options))}
    except StorageError:
        found = _sub_folders(url, storage_options)
        if not found:
            raise
    parts = {NAMES[folder]: part for folder, part in found.items()}
    if len(parts) < len(found):
        raise ValueError(f"expected one folder for each split, got {list(found)}")
    if len({part.index.classes for part in parts.values()}) > 1:
        classes = {name: list(part.index.classes)[:8] for name, part in parts.items()}
        raise ValueError(f"expected the same classes in every split, got {classes}")
    return parts


def _sub_folders(url: str, storage_options: storage.Options) -> Parts:
    found = {}
    for folder in NAMES:
        place = storage.join(url, folder)
        if storage.exists(index_url(place), options=storage_options):
            index, urls = open_dataset(place, storage_options=storage_options)
            found[folder] = Part(index, urls, folder)
    return found


def usual_names(spec: str) -> str:
    """Replace folder names in a split's description with the names that `datasets` uses.

    >>> usual_names("val[:10%]+test")
    'validation[:10%]+test'
    """
    return _NAME.sub(lambda found: NAMES.get(found[0], found[0]), spec)


def asked_names(specs: Iterable[str], known: Sequence[str]) -> list[str]:
    """Return the known splits that descriptions name; ``all`` names every split.

    Raises:
        ValueError: A split does not exist; the message lists the existing ones.

    >>> asked_names(["train[:10%]+test"], ["train", "validation", "test"])
    ['train', 'test']
    """
    asked = {name for spec in specs for name in _NAME.findall(spec)}
    unknown = asked - {*known, "all"}
    if unknown:
        raise ValueError(f"expected splits of {list(known)}, got {sorted(unknown)}")
    return [name for name in known if name in asked or "all" in asked]
