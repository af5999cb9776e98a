"""Sources of samples: image folders, patterns, WebDataset tars, lists of files.

A source is listed once, cheaply. A listed sample has the byte ranges of its fields, so that any
worker can read it.
"""

from __future__ import annotations

import posixpath
import re
import urllib.parse
from collections.abc import Sequence

from .. import storage
from ..errors import EncodeError, StorageError
from ..format.names import JPEG_EXTENSIONS
from ..redaction import get_logger, redact_url
from .row_lists import LISTS, list_rows
from .samples import (
    FieldRef,
    SampleRef,
    Source,
    StorageOptions,
    number_labels,
    unique_keys,
)
from .tars import list_tars

_log = get_logger("pcrshard")
CONVERTIBLE = frozenset({"png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "jp2"})
_IMAGES = JPEG_EXTENSIONS | CONVERTIBLE
_HTTP = ("http://", "https://")
_TRAINING = frozenset({"train", "training"})
_OTHER_SPLITS = frozenset({"val", "valid", "validation", "eval", "test", "testing"})
_SPLITS = _TRAINING | _OTHER_SPLITS
# The value of `split` that treats the split folders as classes.
NO_SPLIT = "none"


def list_source(
    src: str,
    *,
    prefix_keys: bool = False,
    split: str | None = None,
    classes: tuple[str, ...] = (),
    options: StorageOptions = None,
    retry: storage.Retry = storage.Retry(),
) -> Source:
    """List the samples of a source.

    Args:
        src: A folder of images (its subfolders are classes if every image is in one), or a pattern
            of such files (``photos/*/*.jpg``); a folder, URL, or pattern of WebDataset tars; a
            ``.csv``, ``.tsv``, or ``.jsonl`` list of path, label, and other columns.
        prefix_keys: Prefix keys with the name of their tar, and its folder if the tars are in
            several; for tars that use the same keys.
        split: The split to list; its labels are numbered by the classes of all splits. ``None``
            lists all samples and names the splits in the result; ``"none"`` treats the split
            folders as classes.
        classes: Class names, in label order. Default: the sorted names in the source.
        options: fsspec storage options.
        retry: ``deadline`` limits the time without a new file or sample.

    Raises:
        EncodeError: Nothing to encode was found, two samples have the same key, the split does not
            exist, or a class is not among ``classes``.
        StorageError: The source cannot be listed, or does not answer.
    """
    is_list = src.endswith(LISTS)
    files, ignored = ([], ()) if is_list else _find_files(src, options, retry)
    splits = {} if split == NO_SPLIT else _find_splits(files)
    if split not in (None, NO_SPLIT, *splits):
        shown = f"{redact_url(src)} ({', '.join(splits) or 'it has none'})"
        raise EncodeError(f"expected a split of {shown}, got {split!r}")
    files = splits.get(split or "", files)
    tars = [file for file in files if file.name.endswith(".tar")]
    if tars and len(tars) < len(files):
        raise EncodeError("found both images and tars: select the tars with a pattern", url=src)

    if is_list:
        samples = list_rows(src, options)
    elif tars:
        samples = list_tars(tars, prefix_keys, options, retry)
    else:
        keys = unique_keys(file.name for file in files)
        samples = [
            SampleRef(key, (file._replace(name="jpg"),), label=label)
            for key, file, label in zip(keys, files, _folder_labels(src, files), strict=True)
        ]
    if not samples:
        raise EncodeError(
            "expected images, .tar files, or a .csv, .tsv or .jsonl list in "
            f"{redact_url(src)}, found none{_http_advice(src)}"
        )
    named = {sample.label for sample in samples}
    if split in splits and not tars:
        named.update(*(_folder_labels(src, others) for others in splits.values()))
    classes = classes or tuple(sorted(name for name in named if name is not None))
    return Source(number_labels(samples, classes), classes, ignored, tuple(splits))


def _find_files(
    src: str, options: StorageOptions, retry: storage.Retry
) -> tuple[list[FieldRef], tuple[str, ...]]:
    """Return the images or tars of a source, named by their relative paths, and all other files."""
    urls = storage.expand(src)
    if len(urls) > 1 or urls[0].endswith(".tar") or storage.is_pattern(urls[0]):
        found = _match_files(urls, options, retry)
    else:
        found = _list_folder(urls[0].rstrip("/") or "/", options, retry)
    usable, others = [], []
    for file in found:
        extension = posixpath.splitext(file.name)[1][1:].lower()
        if any(part.startswith(".") for part in file.name.split("/")):
            continue  # hidden
        if extension in _IMAGES or file.name.endswith(".tar"):
            usable.append(file)
        else:
            others.append(file.name)
    return usable, tuple(others)


def _list_folder(folder: str, options: StorageOptions, retry: storage.Retry) -> list[FieldRef]:
    try:
        listed = storage.list_files(folder, options=options, retry=retry)
    except StorageError as error:
        if advice := _http_advice(folder):
            raise StorageError(f"{error}{advice}") from error.__cause__
        raise
    if folder.startswith(_HTTP):
        # HTML listings contain sort links, and their names are URL-quoted.
        listed = [(name, size) for name, size in listed if "?" not in name]
    return [FieldRef(_shown(folder, n), storage.join(folder, n), 0, size) for n, size in listed]


def _match_files(
    patterns: list[str],
    options: StorageOptions,
    retry: storage.Retry,
) -> list[FieldRef]:
    """Return the files that URLs or patterns name, by their paths from a common folder."""
    found: dict[str, int | None] = {}
    for pattern in patterns:
        if storage.is_pattern(pattern):
            found |= storage.list_matching(pattern, options=options, retry=retry)
        else:
            found[pattern] = None
    shared = posixpath.commonprefix(
        [redact_url(storage.fixed_folder(each), query="") for each in patterns]
    )
    folder = shared[: shared.rfind("/") + 1]
    return [
        FieldRef(_shown(url, redact_url(url, query="").removeprefix(folder)), url, 0, size)
        for url, size in sorted(found.items())
    ]


def _shown(url: str, name: str) -> str:
    return urllib.parse.unquote(name) if url.startswith(_HTTP) else name


def _http_advice(src: str) -> str:
    if not src.startswith(_HTTP):
        return ""
    return (
        "; a web server may not list its folders: name tars with a brace pattern "
        "(x-{000..099}.tar), or images by a .csv list of URLs"
    )


def _folder_labels(src: str, images: Sequence[FieldRef]) -> list[str | None]:
    """Return each image's top folder as its class; no classes if any image is in no folder."""
    outside = [image.name for image in images if "/" not in image.name]
    if not outside:
        return [image.name.partition("/")[0] for image in images]
    if len(outside) < len(images):
        _log.warning(
            "%s: no class labels, because %s and %d others are not in a subfolder",
            redact_url(src),
            outside[0],
            len(outside) - 1,
        )
    return [None] * len(images)


def _find_splits(files: Sequence[FieldRef]) -> dict[str, list[FieldRef]]:
    """Return the files of each split, with names relative to it; empty without splits.

    A split is a top-level folder with one of the usual names, or, for tars outside folders, such a
    word in the tar's name. Because a class may be called ``train``, either all files must be in
    splits, or there must be a training set and another split. Tars of a single split need no
    choice, so they are not reported as one.
    """
    splits: dict[str, list[FieldRef]] = {}
    for file in files:
        folder, slash, rest = file.name.partition("/")
        stem, extension = posixpath.splitext(file.name)
        words = [folder] if slash else re.split(r"[-_.]", stem) if extension == ".tar" else []
        found = [word for word in words if word.lower() in _SPLITS]
        if len(found) == 1:
            splits.setdefault(found[0], []).append(file._replace(name=rest or file.name))
    kinds = {split.lower() for split in splits}
    is_whole = sum(map(len, splits.values())) == len(files)
    if not (is_whole or (kinds & _TRAINING and kinds & _OTHER_SPLITS)):
        return {}
    if len(splits) == 1 and files[0].name.endswith(".tar"):
        return {}
    return dict(sorted(splits.items()))
