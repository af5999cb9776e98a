"""Sources of samples: image folders, patterns, WebDataset tars, lists of files.

A source is listed once, cheaply. A listed sample has the byte ranges of its fields, so that any
worker can read it.
"""

from __future__ import annotations

import os
import posixpath
import re
import urllib.parse
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .. import storage
from ..errors import EncodeError, StorageError
from ..format.names import OTHER_IMAGE_EXTENSIONS
from ..redaction import get_logger, redact, redact_url
from .folders import ImageFiles, list_local, list_named
from .row_lists import ListedRows, is_list, list_rows
from .sample_table import Known, SampleTable, are_distinct_hashes
from .samples import (
    LABEL_FIELD,
    FieldRef,
    Label,
    ListedImage,
    SampleRef,
    Source,
    StorageOptions,
    Unlayered,
    legal_keys,
    unique_keys,
    version_of,
)
from .splits import are_splits, find_masks, split_files, split_word, strip_common
from .tars import is_archive, list_tars
from .wids import is_wids, read_wids

_log = get_logger("pcrshard")
_HTTP = ("http://", "https://")
_HTTP_ADVICE = (
    "; a web server may not list its folders: name tars with a brace pattern (x-{000..099}.tar), "
    "or images by a .csv list of URLs"
)
# Files of each folder that are compared, and the most folders that are compared.
_COMPARED = 1000
_MOST_TOPS = 8
_PART = re.compile("part|chunk|batch", re.IGNORECASE)
# One image in this many may be outside all class folders.
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
    return tuple(_find_splits(_units(_find_files(src, options)), None)[0])


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
            (``photos/*/*.jpg``); a folder, URL, pattern, or wids index (``.json``) of WebDataset
            tars; a ``.csv``, ``.tsv``, or ``.jsonl`` list of path, label, and other columns.
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
    files = _find_files(src, options)
    splits, units = _find_splits(_units(files), split)
    _check_split(src, split, splits)
    chosen = splits.get(split or "", units)
    if tars := [unit for unit in chosen if is_archive(unit.name)]:
        if len(tars) < len(chosen):
            raise EncodeError("found both images and tars: select the tars with a pattern", url=src)
        samples, skipped = list_tars(
            tars, prefix_keys=prefix_keys, skip=skip, options=options, scratch=scratch
        )
        return _checked(src, samples, classes, skipped)
    if split != NO_SPLIT and (masks := find_masks(_some_files(files, chosen))):
        raise EncodeError(
            f"the folders {' and '.join(masks)} of {redact_url(src)} hold files of the same names, "
            "as images and their masks do: encode one of them, or join them in a tar; "
            f"`--split {NO_SPLIT}` treats them as classes"
        )
    if no_labels:
        folders = [LabeledFolder(unit.name, int(unit.url), None) for unit in chosen]
        return _checked(src, _table_of(files, folders, classes), classes, ())
    groups = {name: _label(src, files, own) for name, own in (splits or {"": units}).items()}
    empty = sorted(set().union(*(_empty_folders(src, files, own) for own, _ in groups.values())))
    if empty:
        _log.warning("%s: no image in the class folders %s", redact_url(src), ", ".join(empty))
    labels = _drop_single(src, groups) if not (classes or empty) else _labels(groups)
    folders, skipped = groups[split if split and split in splits else ""]
    _check_lists(src, labels, files.lists)
    classes = classes or tuple(sorted(map(str, labels.union(empty) - {None})))
    return _checked(src, _table_of(files, folders, classes), classes, skipped)


def list_tar_files(src: str, split: str | None, options: StorageOptions) -> list[FieldRef]:
    """Return the tars of a source, whole files named by their paths.

    Raises:
        EncodeError: There are none, or others are among them, or the split does not exist.
        StorageError: The source cannot be listed.
    """
    # Indexes lie beside the tars.
    units = _units(_find_files(src, options, warn=False))
    splits, chosen = _find_splits(units, split)
    _check_split(src, split, splits)
    found = splits.get(split or "", chosen)
    tars = [unit for unit in found if is_archive(unit.name)]
    if not tars:
        raise EncodeError(f"expected .tar files in {redact_url(src)}, found none")
    if len(tars) < len(found):
        raise EncodeError("found both images and tars: select the tars with a pattern", url=src)
    return tars


class LabeledFolder(NamedTuple):
    """A folder of images.

    Attributes:
        name: Its path from the folder of the classes, with ``/*`` at the end.
        number: Its number among those that were listed.
        label: The class of its images.
    """

    name: str
    number: int
    label: str | None


# The folders of a split, and images that are left out.
_Group = tuple[list[LabeledFolder], list[Unlayered]]


def _units(files: ImageFiles) -> list[FieldRef]:
    """Return what splits and classes are decided by: each tar, and the folders of images.

    A folder is ``NAME/*``; its URL is its number, and its end the number of its images.
    """
    folders = enumerate(files.folders)
    units = [FieldRef(f"{name}*", str(i), 0, len(rows)) for i, (name, _, _, rows) in folders]
    return files.archives + units


def _count(units: Iterable[FieldRef]) -> int:
    """Return the number of images and tars."""
    return sum(1 if is_archive(unit.name) else unit.stop or 0 for unit in units)


def _some_files(files: ImageFiles, units: Sequence[FieldRef]) -> list[FieldRef]:
    """Return the first images of each folder, by which folders are compared."""
    tops: dict[str, int] = {}
    found = []
    for unit in units:
        top = unit.name.partition("/")[0]
        rows = files.folders[int(unit.url)].rows[: max(0, _COMPARED - tops.get(top, 0))]
        found += [FieldRef(unit.name[:-1] + files.name(row), "") for row in rows]
        tops[top] = tops.get(top, 0) + (unit.stop or 0)
        if len(tops) > _MOST_TOPS:
            return []
    return found


def _empty_folders(src: str, files: ImageFiles, folders: Sequence[LabeledFolder]) -> set[str]:
    """Return the empty folders beside those of classes, in a local folder."""
    if not os.path.isdir(storage.plain_path(src)) or not folders or folders[0].label is None:
        return set()
    first = folders[0]
    path = storage.plain_path(files.folders[first.number].url)
    root = path[: len(path) - len(first.name) + 1] or "."
    with os.scandir(root) as entries:
        found = [each for each in entries if each.is_dir() and not each.name.startswith(".")]
    return {folder.name for folder in found if not os.listdir(folder)}


def _table_of(
    files: ImageFiles, folders: Sequence[LabeledFolder], classes: Sequence[str]
) -> SampleTable:
    """Return the images of folders as samples, with the number of their class in ``cls``.

    Raises:
        EncodeError: A folder is no class of ``classes``.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    table = SampleTable(files)
    hashes = array("q")
    fields: dict[str, int] = {}
    for name, number, label in folders:
        known: Known = ()
        if label is not None:
            if label not in numbers:
                raise _no_class(label)
            known = ((LABEL_FIELD, str(numbers[label]).encode()),)
        rows = files.folders[number].rows
        names = list(map(files.name, rows))
        for row, file, key in zip(rows, names, legal_keys(name[:-1], names), strict=True):
            extension = file.rpartition(".")[2].lower()
            field = extension if extension in OTHER_IMAGE_EXTENSIONS else "jpg"
            where = (fields.setdefault(field, len(fields)), row, 0, files.size(row))
            table.append(key, (where,), known)
            hashes.append(hash(key))
    table.fields = list(fields)
    if not are_distinct_hashes(hashes):
        table.make_keys_distinct()
    return table


def _no_class(name: str) -> EncodeError:
    return EncodeError(f"expected classes among the given names, got {name!r} in the source")


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
    return _checked(src, SampleTable.of(_number_labels(images, classes)), classes, skipped)


def _checked(
    src: str, samples: Sequence[SampleRef], classes: tuple[str, ...], skipped: Sequence[Unlayered]
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


def _find_splits(
    units: Sequence[FieldRef], split: str | None
) -> tuple[dict[str, list[FieldRef]], list[FieldRef]]:
    """Return the units of each split, and all units; each named from the folder of its classes."""
    splits = {} if split == NO_SPLIT else split_files(units)
    if not splits:
        units = strip_common(units)
        splits = {} if split == NO_SPLIT else split_files(units)
    inner = set().union(*map(split_files, splits.values())) if splits else set()
    if inner and not any(split_word(name)[0] for name in splits):
        raise EncodeError(
            f"the folders {', '.join(splits)} each hold {', '.join(sorted(inner))}: if they are "
            "images and their masks, encode one of the folders; if they are classes, encode a "
            f"pattern, such as '*/{min(inner)}/*.jpg'"
        )
    inside = {unit.url for own in splits.values() for unit in own}
    if splits and (left := [unit for unit in units if unit.url not in inside]):
        _log.warning(
            "%d files, in %s, are in no split: they are left out", _count(left), left[0].name
        )
    return {name: strip_common(own) for name, own in splits.items()}, list(units)


def _check_lists(src: str, labels: Collection[str | None], lists: Sequence[str]) -> None:
    """Refuse to leave out labels that a list beside the images may hold.

    Raises:
        EncodeError: There is a list, and the images are in no folders, or in numbered parts.
    """
    # Only the numbers differ: part_1, part_2.
    parts = {re.sub(r"\d+", "", str(name)) for name in labels}
    are_parts = len(parts) == 1 and _PART.search(parts.pop())
    if lists and (len(labels) == 1 or are_parts):
        raise EncodeError(
            f"{', '.join(lists[:3])} in {redact_url(src)} may hold the labels of the images: "
            "encode that list, or give --no-labels"
        )


def _find_files(src: str, options: StorageOptions, *, warn: bool = True) -> ImageFiles:
    """Return the images, tars and lists of a source, by their paths from a common folder."""
    urls = list(read_wids(src, options)) if is_wids(src) else storage.expand(src)
    if len(urls) == 1 and storage.is_local(urls[0]) and os.path.isdir(storage.plain_path(urls[0])):
        found = list_local(urls[0])
    else:
        found = list_named(_list_files(urls, options))
    if found.num_others and warn:
        _log.warning(
            "%s: left out %d files that are not images, such as %s",
            redact_url(src),
            found.num_others,
            redact(found.first_other, src),
        )
    return found


def _list_files(
    urls: Sequence[str], options: StorageOptions
) -> Iterator[tuple[str, storage.Listed]]:
    """Yield the files of a folder, pattern or list of URLs: their paths, then them by URL."""
    if len(urls) > 1 or is_archive(storage.file_name(urls[0])) or storage.is_pattern(urls[0]):
        found: dict[str, storage.Listed] = {}
        for url in urls:
            files = [storage.Listed(url, None, version_of(url))]
            if storage.is_pattern(url):
                files = storage.list_matching(url, options=options)
            found |= {file.name: file for file in files}
        folders = [redact_url(storage.fixed_folder(url), query="") for url in urls]
        start = posixpath.commonprefix(folders).rfind("/") + 1
        for url, file in found.items():
            yield _unquoted(url, redact_url(url, query="")[start:]), file
        return
    folder = urls[0].rstrip("/") or "/"
    try:
        listed = storage.list_files(folder, options=options)
    except StorageError as error:
        if folder.startswith(_HTTP):
            raise StorageError(f"{error}{_HTTP_ADVICE}") from error.__cause__
        raise
    for file in listed:
        yield _unquoted(folder, file.name), file._replace(name=storage.join(folder, file.name))


def _unquoted(url: str, name: str) -> str:
    """Return the name of a file; the links of an HTML listing are quoted, some sort it."""
    if not url.startswith(_HTTP):
        return name
    return "." if "?" in name else urllib.parse.unquote(name)


def _label(src: str, files: ImageFiles, units: Sequence[FieldRef]) -> _Group:
    """Return folders with their top folder as class, and images that are left out.

    If almost all images are in folders, the others are left out; if none is, there are no classes.

    Raises:
        EncodeError: More than a few are in no folder.
    """
    outside = [unit for unit in units if "/" not in unit.name]
    if len(outside) == len(units):
        return [LabeledFolder(unit.name, int(unit.url), None) for unit in units], []
    strays = [row for unit in outside for row in files.folders[int(unit.url)].rows]
    if strays:
        first = files.name(strays[0])
        total = _count(units)
        if len(strays) > max(1, total // _STRAY):
            raise EncodeError(
                f"expected every image in the folder of its class, {len(strays)} of {total}, such "
                f"as {first}, are in none: move them, or give --no-labels",
                url=src,
            )
        _log.warning(
            "%s: left out %d images, such as %s, that are in no class folder",
            redact_url(src),
            len(strays),
            first,
        )
    own = [unit for unit in units if "/" in unit.name]
    deep = {tuple(unit.name.split("/")[:2]) for unit in own if unit.name.count("/") > 1}
    if len({top for top, _ in deep}) < len(deep) and all(u.name.count("/") > 1 for u in own):
        _log.warning(
            "%s: the classes are the top folders, such as %s, though all images are in folders "
            "below, such as %s; encode a list if those are the classes",
            redact_url(src),
            min(deep)[0],
            "/".join(min(deep)),
        )
    reason = "in no class folder, though other images are"
    skipped = [Unlayered("", redact_url(files.file(i)[0]), reason, "skipped") for i in strays]
    folders = [LabeledFolder(u.name, int(u.url), u.name.partition("/")[0]) for u in own]
    return folders, skipped


def _labels(groups: Mapping[str, _Group]) -> set[str | None]:
    return {folder.label for own, _ in groups.values() for folder in own}


def _drop_single(src: str, groups: dict[str, _Group]) -> set[str | None]:
    """Take the label from splits whose images are in one folder that is no class of other splits.

    Returns: The labels that are left.
    """
    several = _labels({name: each for name, each in groups.items() if len(_labels({"": each})) > 1})
    for name, (own, skipped) in groups.items():
        labels = _labels({"": (own, skipped)})
        if len(labels) != 1 or labels <= several | {None}:
            continue
        _log.warning(
            "%s: all images%s are in one folder, %s, which is not taken for a class; --classes "
            "FILE makes it one",
            redact_url(src),
            f" of {name}" * bool(name),
            *labels,
        )
        groups[name] = [folder._replace(label=None) for folder in own], skipped
    return _labels(groups)


def _number_labels(images: Sequence[ListedImage], classes: Sequence[str]) -> Iterator[SampleRef]:
    """Yield images as samples, with the number of their class in the field ``cls``."""
    numbers: dict[Label, Label] = {name: number for number, name in enumerate(classes)}
    keys = unique_keys(image.file.name for image in images)
    for key, (file, label, known, _) in zip(keys, images, strict=True):
        number = numbers.get(label, label)
        if isinstance(number, str):
            raise _no_class(number)
        labels = () if number is None else ((LABEL_FIELD, str(number).encode()),)
        extension = posixpath.splitext(file.name)[1][1:].lower()
        field = extension if extension in OTHER_IMAGE_EXTENSIONS else "jpg"
        yield SampleRef(key, (file._replace(name=field),), (*labels, *known))
