"""Sources of samples: image folders, patterns, WebDataset tars, lists of files.

A source is listed once, cheaply. A listed sample has the byte ranges of its fields, so that any
worker can read it.
"""

from __future__ import annotations

import os
import posixpath
import re
import urllib.parse
from collections.abc import Collection, Iterable, Iterator, Sequence

from .. import storage
from ..errors import EncodeError, StorageError
from ..format.names import JPEG_EXTENSIONS, OTHER_IMAGE_EXTENSIONS
from ..redaction import get_logger, redact, redact_url
from .row_lists import ListedRows, is_list, list_rows
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
from .splits import are_splits, find_masks, split_files, split_word, strip_common
from .tars import is_archive, list_tars

_log = get_logger("pcrshard")
_IMAGES = JPEG_EXTENSIONS | OTHER_IMAGE_EXTENSIONS
_HTTP = ("http://", "https://")
_HTTP_ADVICE = (
    "; a web server may not list its folders: name tars with a brace pattern (x-{000..099}.tar), "
    "or images by a .csv list of URLs"
)
_PART = re.compile("part|chunk|batch", re.IGNORECASE)
# Of so many images, one may be in no class folder.
_STRAY = 20
# The value of `split` that treats the split folders as classes.
NO_SPLIT = "none"


def find_splits(src: str, *, options: StorageOptions = None) -> tuple[str, ...]:
    """Return the names of the training, validation, and test sets that a source appears to hold.

    Raises:
        EncodeError: The source is a list with a malformed row.
        StorageError: The source cannot be listed, or does not answer.
    """
    if is_list(src):
        return tuple(_split_rows(list_rows(src, options, no_labels=True).images))
    return tuple(_find_folders(_find_files(src, options)[0], None)[0])


def list_source(
    src: str,
    *,
    prefix_keys: bool = False,
    split: str | None = None,
    classes: tuple[str, ...] = (),
    label: str | None = None,
    no_labels: bool = False,
    skip: bool = False,
    options: StorageOptions = None,
    scratch: str | None = None,
) -> Source:
    """List the samples of a source.

    Args:
        src: A folder of images (its subfolders are classes), or a pattern of such files
            (``photos/*/*.jpg``); a folder, URL, or pattern of WebDataset tars; a ``.csv``,
            ``.tsv``, or ``.jsonl`` list of path, label, and other columns.
        prefix_keys: Prefix keys with the name of their tar, and its folder if the tars are in
            several; for tars that use the same keys.
        split: The split to list; its labels are numbered by the classes of all splits. ``"none"``
            treats the split folders as classes, and folders of masks, too.
        classes: Class names, in label order. Default: the sorted names in the source.
        label: The column of a list that has the labels.
        no_labels: Whether to leave out what folders or columns say of classes.
        skip: Leave out damaged tars from the damage on, samples of tars that cannot be kept, and
            rows without a label.
        options: fsspec storage options.
        scratch: Local folder for tars that must be unpacked.

    Raises:
        EncodeError: Nothing to encode was found, two samples have the same key, the split does not
            exist or several would be mixed, a class is not among ``classes``, or it is not clear
            what the labels are.
        StorageError: The source cannot be listed, or does not answer.
    """
    if is_list(src):
        rows = list_rows(src, options, label=label, no_labels=no_labels, skip=skip)
        return _list_split(src, rows, split, classes)
    if label is not None:
        raise EncodeError(
            f"expected a list of files with a column {label!r} of labels, got {redact_url(src)}; "
            "in other sources, class folders or fields .cls are the labels"
        )
    files, lists = _find_files(src, options)
    splits, files = _find_folders(files, split)
    _check_split(src, split, splits)
    chosen = splits.get(split or "", files)
    tars = [file for file in chosen if is_archive(file.name)]
    if tars:
        if len(tars) < len(chosen):
            raise EncodeError("found both images and tars: select the tars with a pattern", url=src)
        samples, skipped = list_tars(
            tars, prefix_keys=prefix_keys, skip=skip, options=options, scratch=scratch
        )
        return _checked(src, samples, classes, skipped)
    if split != NO_SPLIT and (masks := find_masks(chosen)):
        raise EncodeError(
            f"the folders {' and '.join(masks)} of {redact_url(src)} hold files of the same names, "
            "as images and their masks do: encode one of them, or join them in a tar; "
            f"`--split {NO_SPLIT}` treats them as classes"
        )
    if no_labels:
        return _numbered(src, [ListedImage(file) for file in chosen], (), classes)
    groups = {name: _label_files(src, own) for name, own in (splits or {"": files}).items()}
    images, skipped = groups[split if split and split in splits else ""]
    everywhere = [image for own, _ in groups.values() for image in own]
    _check_lists(src, everywhere, lists)
    empty = sorted(set().union(*(_empty_folders(src, own) for own, _ in groups.values())))
    if empty:
        _log.warning("%s: no image in the class folders %s", redact_url(src), ", ".join(empty))
    names = {image.label for image in everywhere if isinstance(image.label, str)} | set(empty)
    return _numbered(src, images, names, classes, skipped)


def _empty_folders(src: str, images: Sequence[ListedImage]) -> set[str]:
    """Return the empty folders beside those of classes, in a local folder."""
    if not os.path.isdir(storage.plain_path(src)) or not images or images[0].label is None:
        return set()
    file = images[0].file
    root = file.url[: -len(file.name)]
    with os.scandir(root) as entries:
        folders = [each for each in entries if each.is_dir() and not each.name.startswith(".")]
    return {folder.name for folder in folders if not os.listdir(folder)}


def _list_split(src: str, rows: ListedRows, split: str | None, classes: tuple[str, ...]) -> Source:
    """Return the samples of a split of a list, or of all of it."""
    splits = {} if split == NO_SPLIT else _split_rows(rows.images)
    _check_split(src, split, splits)
    names = {image.label for image in rows.images if isinstance(image.label, str)}
    return _numbered(src, splits.get(split or "", rows.images), names, classes, rows.skipped)


def _check_split(src: str, split: str | None, splits: Collection[str]) -> None:
    if split not in (NO_SPLIT, *(splits or (None,))):
        got = "none was chosen" if split is None else f"got {split!r}"
        raise EncodeError(
            f"expected one of the splits of {redact_url(src)} ({', '.join(splits) or 'it has none'}"
            f"), {got}; `--split all` encodes each into its own folder, and `--split {NO_SPLIT}` "
            "treats their folders as classes"
        )


def _split_rows(images: Sequence[ListedImage]) -> dict[str, list[ListedImage]]:
    """Return the rows of each split that a list names; empty if it names none."""
    names = sorted({image.split for image in images if image.split})
    if not are_splits(names):
        return {}
    return {name: [image for image in images if image.split == name] for name in names}


def _numbered(
    src: str,
    images: Sequence[ListedImage],
    names: Iterable[str],
    classes: tuple[str, ...],
    skipped: Sequence[Unlayered] = (),
) -> Source:
    """Return images as samples; labels are numbered by the names in all splits."""
    classes = classes or tuple(sorted(names))
    return _checked(src, list(_number_labels(images, classes)), classes, skipped)


def _checked(
    src: str, samples: list[SampleRef], classes: tuple[str, ...], skipped: Sequence[Unlayered]
) -> Source:
    """Return a source that is not empty."""
    if not samples:
        raise EncodeError(
            f"nothing is left of {redact_url(src)}: {skipped[0].reason}"
            if skipped
            else "expected images, .tar files, or a .csv, .tsv or .jsonl list in "
            f"{redact_url(src)}, found none"
        )
    return Source(samples, classes, tuple(skipped))


def _find_folders(
    files: Sequence[FieldRef], split: str | None
) -> tuple[dict[str, list[FieldRef]], list[FieldRef]]:
    """Return the files of each split, and all files; each named from the folder of its classes."""
    splits = {} if split == NO_SPLIT else split_files(files)
    if not splits:
        _, files = strip_common(files)
        splits = {} if split == NO_SPLIT else split_files(files)
    inner = set().union(*map(split_files, splits.values())) if splits else set()
    if inner and not any(split_word(name)[0] for name in splits):
        raise EncodeError(
            f"the folders {', '.join(splits)} each hold {', '.join(sorted(inner))}, as images and "
            "their masks do: encode one of the folders"
        )
    left_out = len(files) - sum(map(len, splits.values()))
    if splits and left_out:
        inside = {file.url for own in splits.values() for file in own}
        first = next(file.name for file in files if file.url not in inside)
        _log.warning("%d files, such as %s, are in no split: they are left out", left_out, first)
    return {name: strip_common(own)[1] for name, own in splits.items()}, list(files)


def _check_lists(src: str, images: Sequence[ListedImage], lists: Sequence[str]) -> None:
    """Refuse to leave out labels that a list beside the images may hold.

    Raises:
        EncodeError: There is a list, and the images are in no folders, or in numbered parts.
    """
    names = {image.label for image in images}
    # Only the numbers differ: part_1, part_2.
    parts = {re.sub(r"\d+", "", str(name)) for name in names}
    are_parts = len(parts) == 1 and _PART.search(parts.pop())
    if lists and (len(names) == 1 or are_parts):
        raise EncodeError(
            f"{lists[0]} in {redact_url(src)} may hold the labels of the images: encode that list, "
            "or give --no-labels"
        )


def _find_files(src: str, options: StorageOptions) -> tuple[list[FieldRef], list[str]]:
    """Return the images or tars of a source, and the names of lists beside them.

    All are named by their paths from a common folder.
    """
    usable, others = [], []
    for url_name, url, size, version in _list_files(src, options):
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
    return usable, list(filter(is_list, others))


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


def _label_files(src: str, files: Sequence[FieldRef]) -> tuple[list[ListedImage], list[Unlayered]]:
    """Return images with their top folder as class, and those that are left out.

    If almost all are in folders, the others are left out; if none is, there are no classes.

    Raises:
        EncodeError: More than a few are in no folder.
    """
    outside = [file for file in files if "/" not in file.name]
    if len(outside) == len(files):
        return [ListedImage(file) for file in files], []
    if len(outside) > max(1, len(files) // _STRAY):
        raise EncodeError(
            f"expected every image in the folder of its class, {len(outside)} of {len(files)}, "
            f"such as {outside[0].name}, are in none: move them, or give --no-labels",
            url=src,
        )
    if outside:
        _log.warning(
            "%s: left out %d images, such as %s, that are in no class folder",
            redact_url(src),
            len(outside),
            outside[0].name,
        )
    deep = [file.name.split("/")[:2] for file in files if file.name.count("/") > 1]
    if len(deep) == len(files) and len({top for top, _ in deep}) < len(
        {tuple(two) for two in deep}
    ):
        _log.warning(
            "%s: the classes are the top folders, such as %s, though all images are in folders "
            "below, such as %s; encode a list if those are the classes",
            redact_url(src),
            deep[0][0],
            "/".join(deep[0]),
        )
    reason = "in no class folder, though other images are"
    strays = [Unlayered("", redact_url(file.url), reason, "skipped") for file in outside]
    own = [file for file in files if "/" in file.name]
    return [ListedImage(file, file.name.partition("/")[0]) for file in own], strays


def _number_labels(images: Sequence[ListedImage], classes: Sequence[str]) -> Iterator[SampleRef]:
    """Yield images as samples, with the number of their class in the field ``cls``."""
    numbers: dict[Label, Label] = {name: number for number, name in enumerate(classes)}
    keys = unique_keys(image.file.name for image in images)
    for key, (file, label, known, _) in zip(keys, images, strict=True):
        number = numbers.get(label, label)
        if isinstance(number, str):
            raise EncodeError(
                f"expected classes among the given names, got {number!r} in the source"
            )
        labels = () if number is None else ((LABEL_FIELD, str(number).encode()),)
        extension = posixpath.splitext(file.name)[1][1:].lower()
        field = extension if extension in OTHER_IMAGE_EXTENSIONS else "jpg"
        yield SampleRef(key, (file._replace(name=field),), (*labels, *known))
