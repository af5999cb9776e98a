"""Sources of samples: image folders, patterns, WebDataset tars, lists of files.

A source is listed once, cheaply. A listed sample has the byte ranges of its fields, so that any
worker can read it.
"""

from __future__ import annotations

import posixpath
import re
import urllib.parse
from collections.abc import Iterator, Sequence

from .. import storage
from ..errors import EncodeError, StorageError
from ..format.names import JPEG_EXTENSIONS, OTHER_IMAGE_EXTENSIONS
from ..redaction import get_logger, redact, redact_url
from .row_lists import is_list, list_rows
from .samples import (
    LABEL_FIELD,
    FieldRef,
    Label,
    ListedImage,
    SampleRef,
    Source,
    StorageOptions,
    Unlayered,
    unique_keys,
    version_of,
)
from .tars import is_archive, list_tars

_log = get_logger("pcrshard")
_IMAGES = JPEG_EXTENSIONS | OTHER_IMAGE_EXTENSIONS
_HTTP = ("http://", "https://")
_HTTP_ADVICE = (
    "; a web server may not list its folders: name tars with a brace pattern (x-{000..099}.tar), "
    "or images by a .csv list of URLs"
)
_TRAINING = frozenset({"train", "training"})
_OTHER_SPLITS = frozenset({"val", "valid", "validation", "eval", "test", "testing"})
_SPLITS = _TRAINING | _OTHER_SPLITS
# The value of `split` that treats the split folders as classes.
NO_SPLIT = "none"


def find_splits(src: str, *, options: StorageOptions = None) -> tuple[str, ...]:
    """Return the names of the training, validation, and test sets that a source appears to hold.

    Raises:
        StorageError: The source cannot be listed, or does not answer.
    """
    return tuple(_split_files(_find_files(src, options)))


def list_source(
    src: str,
    *,
    prefix_keys: bool = False,
    split: str | None = None,
    classes: tuple[str, ...] = (),
    skip: bool = False,
    options: StorageOptions = None,
    scratch: str | None = None,
) -> Source:
    """List the samples of a source.

    Args:
        src: A folder of images (its subfolders are classes if every image is in one), or a pattern
            of such files (``photos/*/*.jpg``); a folder, URL, or pattern of WebDataset tars; a
            ``.csv``, ``.tsv``, or ``.jsonl`` list of path, label, and other columns.
        prefix_keys: Prefix keys with the name of their tar, and its folder if the tars are in
            several; for tars that use the same keys.
        split: The split to list; its labels are numbered by the classes of all splits. ``"none"``
            treats the split folders as classes.
        classes: Class names, in label order. Default: the sorted names in the source.
        skip: Leave out damaged tars from the damage on, and samples of tars that cannot be kept.
        options: fsspec storage options.
        scratch: Local folder for tars that must be unpacked.

    Raises:
        EncodeError: Nothing to encode was found, two samples have the same key, the split does not
            exist or several would be mixed, or a class is not among ``classes``.
        StorageError: The source cannot be listed, or does not answer.
    """
    files = _find_files(src, options)
    splits = {} if split == NO_SPLIT else _split_files(files)
    if split not in (NO_SPLIT, *(splits or (None,))):
        got = "none was chosen" if split is None else f"got {split!r}"
        raise EncodeError(
            f"expected one of the splits of {redact_url(src)} ({', '.join(splits) or 'it has none'}"
            f"), {got}; `--split all` encodes each into its own folder, and `--split {NO_SPLIT}` "
            "treats their folders as classes"
        )
    files = splits.get(split or "", files)
    tars = [file for file in files if is_archive(file.name)]
    skipped: Sequence[Unlayered] = ()
    if tars:
        if len(tars) < len(files):
            raise EncodeError("found both images and tars: select the tars with a pattern", url=src)
        samples, skipped = list_tars(
            tars, prefix_keys=prefix_keys, skip=skip, options=options, scratch=scratch
        )
    else:
        images = list_rows(src, options) if is_list(src) else _label_files(src, files)
        groups = [_label_files(src, own) for own in splits.values()] or [images]
        names = {image.label for own in groups for image in own if isinstance(image.label, str)}
        classes = classes or tuple(sorted(names))
        samples = list(_number_labels(images, classes))
    if not samples and skipped:
        raise EncodeError(f"nothing is left of the source: {skipped[0].reason}", url=src)
    if not samples:
        raise EncodeError(
            "expected images, .tar files, or a .csv, .tsv or .jsonl list in "
            f"{redact_url(src)}, found none"
        )
    return Source(samples, classes, tuple(skipped))


def _find_files(src: str, options: StorageOptions) -> list[FieldRef]:
    """Return the images or tars of a source, named by their paths from a common folder."""
    usable, others = [], []
    for url_name, url, size, version in [] if is_list(src) else _list_files(src, options):
        name = url_name
        if src.startswith(_HTTP):
            # HTML listings contain sort links, and their names are URL-quoted.
            name = "." if "?" in name else urllib.parse.unquote(name)
        extension = posixpath.splitext(name)[1][1:].lower()
        if any(part.startswith(".") for part in name.split("/")):
            continue  # hidden
        if extension in _IMAGES or is_archive(name):
            usable.append(FieldRef(name, url, 0, size, version))
        else:
            others.append(name)
    if others:
        _log.warning(
            "%s: left out %d files that are not images, such as %s",
            redact_url(src),
            len(others),
            redact(others[0], src),
        )
    return usable


def _list_files(src: str, options: StorageOptions) -> list[tuple[str, str, int | None, str]]:
    """Return the files of a folder, pattern or list of URLs: names, URLs, sizes, versions."""
    urls = storage.expand(src)
    if len(urls) > 1 or is_archive(storage.file_name(urls[0])) or storage.is_pattern(urls[0]):
        found: dict[str, storage.Listed] = {}
        for url in urls:
            files = [storage.Listed(url, None, version_of(url))]
            if storage.is_pattern(url):
                files = storage.list_matching(url, options=options)
            found |= {file.name: file for file in files}
        folders = [redact_url(storage.fixed_folder(url), query="") for url in urls]
        start = posixpath.commonprefix(folders).rfind("/") + 1
        return [
            (redact_url(url, query="")[start:], url, size, version)
            for url, size, version in sorted(found.values())
        ]
    folder = urls[0].rstrip("/") or "/"
    try:
        listed = storage.list_files(folder, options=options)
    except StorageError as error:
        if folder.startswith(_HTTP):
            raise StorageError(f"{error}{_HTTP_ADVICE}") from error.__cause__
        raise
    return [(name, storage.join(folder, name), size, version) for name, size, version in listed]


def _label_files(src: str, files: Sequence[FieldRef]) -> list[ListedImage]:
    """Return images with their top folder as class; no classes if any image is in no folder."""
    outside = [file.name for file in files if "/" not in file.name]
    if 0 < len(outside) < len(files):
        _log.warning(
            "%s: no class labels, because %d images, such as %s, are not in a subfolder",
            redact_url(src),
            len(outside),
            outside[0],
        )
    return [ListedImage(file, None if outside else file.name.partition("/")[0]) for file in files]


def _number_labels(images: Sequence[ListedImage], classes: Sequence[str]) -> Iterator[SampleRef]:
    """Yield images as samples, with the number of their class in the field ``cls``."""
    numbers: dict[Label, Label] = {name: number for number, name in enumerate(classes)}
    keys = unique_keys(image.file.name for image in images)
    for key, (file, label, known) in zip(keys, images, strict=True):
        number = numbers.get(label, label)
        if isinstance(number, str):
            raise EncodeError(
                f"expected classes among the given names, got {number!r} in the source"
            )
        labels = () if number is None else ((LABEL_FIELD, str(number).encode()),)
        extension = posixpath.splitext(file.name)[1][1:].lower()
        field = extension if extension in OTHER_IMAGE_EXTENSIONS else "jpg"
        yield SampleRef(key, (file._replace(name=field),), (*labels, *known))


def _split_files(files: Sequence[FieldRef]) -> dict[str, list[FieldRef]]:
    """Return the files of each split, with names relative to it; empty without splits.

    A split is a top-level folder with one of the usual names, or, for tars outside folders, such a
    word in the tar's name. Because a class may be called ``train``, either all files must be in
    splits, or there must be a training set and another split. Tars of a single split need no
    choice, so they are not reported as one.
    """
    splits: dict[str, list[FieldRef]] = {}
    for file in files:
        folder, slash, rest = file.name.partition("/")
        words = (
            [folder] if slash else re.split(r"[-_.]", file.name) if is_archive(file.name) else []
        )
        found = [word for word in words if word.lower() in _SPLITS]
        if len(found) == 1:
            splits.setdefault(found[0], []).append(file._replace(name=rest or file.name))
    kinds = {split.lower() for split in splits}
    is_whole = sum(map(len, splits.values())) == len(files)
    if not (is_whole or (kinds & _TRAINING and kinds & _OTHER_SPLITS)):
        return {}
    if len(splits) == 1 and is_archive(files[0].name):
        return {}
    return dict(sorted(splits.items()))
