"""Sources that are lists of files: ``.csv``, ``.tsv`` and ``.jsonl``."""

from __future__ import annotations

import csv
import io
import json
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

from .. import storage
from ..errors import EncodeError
from ..format.sample_columns import MAX_LABEL_DIGITS
from ..redaction import redact_url
from .samples import FieldRef, ListedImage, StorageOptions, Unlayered, version_of
from .splits import TRAINING, split_word

_JSON = (".jsonl", ".ndjson")
LISTS = (".csv", ".tsv", *_JSON)
# The key of a row's path, which is no name of a column.
_PATH = "\0path"
Row = dict[str, Any]


def is_list(url: str) -> bool:
    """Return whether a source is a list of files, by its name."""
    return storage.file_name(url).endswith(LISTS)


_DIGITS = re.compile("-?[0-9]+")
# A longer one is the name of a class. pandas writes 3.0 if other labels are missing.
_NUMBER = re.compile(rf"(?:0|-?[1-9][0-9]{{0,{MAX_LABEL_DIGITS - 1}}})(?:\.0)?")
_MAX_LIST_BYTES = 1 << 31
_DECIMAL = re.compile(r"-?[0-9]{0,9}\.?[0-9]{1,18}(?:[eE]-?[0-9]{1,2})?")
# Columns by what other programs call them, as letters in lower case; the first one found is used.
_PATH_COLUMNS = (
    "path", "filename", "file", "image", "filepath", "filepaths", "filenames", "imagepath",
    "imgpath", "imagename", "imgname", "imagefile", "img", "imageid", "imgid", "imageurl", "url",
    "id",
)  # fmt: skip
_LABEL_COLUMNS = (
    "label", "labels", "class", "classname", "classid", "category", "categoryname", "categoryid",
    "target", "targets", "labelname", "labelid", "species", "breed", "dx", "diagnosis",
)  # fmt: skip
_SPLIT_COLUMNS = ("split", "subset", "set", "partition", "phase", "dataset")
# The values of a column such as ``is_valid``.
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_DEFAULT_COLUMNS = ["path", "label", "extra"]
_EXTENSIONS = (".jpg", ".jpeg", ".png")
_LONGEST_LABEL = 64


class ListedRows(NamedTuple):
    """The images of a list, and rows that were left out."""

    images: list[ListedImage]
    skipped: list[Unlayered]


def list_rows(
    path: str,
    options: StorageOptions,
    *,
    label: str | None = None,
    no_labels: bool = False,
    skip: bool = False,
) -> ListedRows:
    """Return the images that a file lists, in its order.

    Args:
        path: The list.
        options: fsspec storage options.
        label: The column of labels; by default the one with a usual name.
        no_labels: Whether labels are left out; the column stays among the others.
        skip: Whether rows without a label are left out, instead of an error.

    Raises:
        EncodeError: A row is malformed, the message names its line; or it is not clear which column
            has the labels.
        StorageError: The list cannot be read.
    """
    rows, lines = _read_rows(path, options)
    columns = dict.fromkeys(name for row in rows for name in row)
    chosen = None if no_labels else _label_column(path, rows, columns, label)
    splits = _splits_of(rows, columns)
    labels = [_stripped(row.pop(chosen, None)) if chosen else None for row in rows]
    if storage.file_name(path).endswith(_JSON):
        labels = _check_types(path, lines, labels)
    else:
        labels = _read_numbers(path, chosen, labels, label is not None)
        rows = [{name: cell for name, cell in row.items() if cell is not None} for row in rows]
    folder = storage.parent(path) if "/" in path else ""
    word = split_word(storage.file_name(path))[0].lower()
    below = cache(partial(_images_below, folder or ".", word))
    images, skipped = [], []
    for row, line, found, part in zip(rows, lines, labels, splits, strict=True):
        name = row.pop(_PATH)
        if found is None and chosen:
            reason = f"line {line} of {redact_url(path)} has no label in column {chosen!r}"
            if not skip:
                raise EncodeError(
                    f"{reason} ({name}), as have {labels.count(None)} rows; --on-error skip leaves "
                    "them out, --no-labels leaves out all labels"
                )
            skipped.append(Unlayered("", redact_url(name), reason, "skipped"))
            continue
        url = name
        if folder and "://" not in url and not url.startswith("/"):
            url = storage.join(folder, url)
        try:
            file = _file(name, url, below)
        except EncodeError as error:
            if not skip:
                raise EncodeError(f"line {line}: {error}", url=path) from None
            file = FieldRef(name, url)
        known = (("json", json.dumps(row).encode()),) if row else ()
        images.append(ListedImage(file, found, known, part))
    return ListedRows(images, skipped)


def _file(name: str, url: str, below: Callable[[], dict[str, list[str]]]) -> FieldRef:
    """Return a listed file.

    A local one may be named without an extension, and without the folders in which it is.

    Raises:
        EncodeError: There is no such file, or there are several.
    """
    version = version_of(url)
    if version or not storage.is_local(url):
        return FieldRef(name, url, version=version)
    for extension in _EXTENSIONS if _is_id(url) else ():
        if found := version_of(url + extension):
            return FieldRef(name + extension, url + extension, version=found)
    places = [] if "/" in name else below().get(name, [])
    if len(places) == 1:
        whole = storage.join(url[: len(url) - len(name)], places[0])
        return FieldRef(places[0], whole, version=version_of(whole))
    if places:
        raise EncodeError(
            f"expected one file {name!r}, got {' and '.join(places[:2])}: list their paths"
        )
    if _is_id(url):
        raise EncodeError(
            "expected a path, or the name of a .jpg, .jpeg or .png file beside the list or in "
            f"folders there, got {name!r}"
        )
    return FieldRef(name, url)  # whoever reads it says that it is missing


def _images_below(folder: str, word: str) -> dict[str, list[str]]:
    """Return the paths of images in folders of a local folder, by their names and their stems.

    Args:
        folder: The folder of a list.
        word: The split that the list is called after; if there are images of the same name, those
            in folders of that split are meant.
    """
    found: dict[str, list[str]] = {}
    root = storage.plain_path(folder)
    for path, _, names in sorted(os.walk(root)):
        where = os.path.relpath(path, root)
        for name in names if where != "." else ():
            stem, extension = posixpath.splitext(name)
            if extension.lower() in _EXTENSIONS:
                for known in (name, stem):
                    found.setdefault(known, []).append(posixpath.join(where, name))
    return {
        name: [path for path in paths if split_word(path.split("/")[0])[0].lower() == word] or paths
        for name, paths in found.items()
    }


def _is_id(url: str) -> bool:
    """Return whether a local file is named without an extension."""
    return storage.is_local(url) and not posixpath.splitext(url)[1]


def _read_rows(path: str, options: StorageOptions) -> tuple[list[Row], list[int]]:
    """Return the rows of a list, with the path under :data:`_PATH`, and their lines."""
    data = storage.read_bytes(path, options=options, max_bytes=_MAX_LIST_BYTES)
    name = storage.file_name(path)
    number = 0

    def lines() -> Iterator[str]:
        nonlocal number
        for line in io.BytesIO(data.removeprefix(b"\xef\xbb\xbf")):
            number += 1
            yield line.decode()

    rows, numbers = [], []
    found: Iterator[Row]
    try:
        if name.endswith(_JSON):
            found = map(json.loads, filter(str.strip, lines()))
        else:
            found = _table_rows(lines(), name.endswith(".tsv"))
        for row in found:
            _check_row(row)
            rows.append(row)
            numbers.append(number)
    except (ValueError, RecursionError, csv.Error) as error:
        reason = str(error).replace("\n", " ")
        raise EncodeError(f"line {number}: {reason}", url=path) from error
    return rows, numbers


def _plain(column: str) -> str:
    """Return the name of a column without case, blanks and the like."""
    return re.sub(r"[\W_]+", "", column.lower())


def _stripped(value: Any) -> Any:
    """Return a cell without blanks around it; ``None`` if nothing is left."""
    return value.strip() or None if isinstance(value, str) else value


def _find(columns: Iterable[str], names: Sequence[str]) -> str | None:
    """Return the column that has the first of some names."""
    by_name = {_plain(column): column for column in columns}
    return next((by_name[name] for name in names if name in by_name), None)


def _splits_of(rows: Sequence[Row], columns: Iterable[str]) -> list[str]:
    """Return the split of each row, by a column ``split`` or one such as ``is_valid``; or none."""
    if column := _find(columns, _SPLIT_COLUMNS):
        return [str(row.get(column) or "") for row in rows]
    for column in columns:
        word, rest = split_word(column)
        word = word.lower() if rest in ((), ("is",)) else ""
        values = [_BOOLEANS.get(str(row.get(column)).lower()) for row in rows]
        if word and {*values} == {True, False}:
            other = "train" if word not in TRAINING else "val"
            return [word if value else other for value in values]
    return [""] * len(rows)


def _label_column(
    path: str, rows: Sequence[Row], columns: Iterable[str], asked: str | None
) -> str | None:
    """Return the column of the labels; ``None`` if no column can be one.

    Raises:
        EncodeError: The column that was asked for does not exist, or several may be meant.
    """
    given = [name for name in columns if name != _PATH]
    if asked is not None:
        found = asked if asked in given else _find(given, (_plain(asked),))
        if found is None:
            raise EncodeError(
                f"expected a column {asked!r}, got {', '.join(given) or 'no other column'}",
                url=path,
            )
        return found
    # Annotations, such as the boxes of a detection list, are no labels, whatever their column.
    given = [name for name in given if not any(type(row.get(name)) in (list, dict) for row in rows)]
    usual = [name for name in _LABEL_COLUMNS if name in map(_plain, given)]
    possible = [found for name in usual if (found := _find(given, (name,)))]
    if possible and all(_are_equivalent(rows, possible[0], other) for other in possible[1:]):
        return possible[0]
    if not possible and columns != dict.fromkeys([_PATH, "extra"]):
        split = _find(given, _SPLIT_COLUMNS)
        possible = [name for name in given if name != split and _may_be_label(rows, name)]
    if possible:
        raise EncodeError(
            f"which column has the labels ({', '.join(possible)})? Give --label COLUMN, or "
            "--no-labels",
            url=path,
        )
    return None


def _are_equivalent(rows: Sequence[Row], one: str, other: str) -> bool:
    """Return whether two columns number or name the same classes."""
    pairs = {(str(row.get(one)), str(row.get(other))) for row in rows}
    return len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


def _may_be_label(rows: Sequence[Row], column: str) -> bool:
    """Return whether the values of a column are short and often repeated."""
    values = [row.get(column) for row in rows]
    given = [value for value in values if value not in (None, "")]
    short = all(type(v) in (int, str) and len(str(v)) <= _LONGEST_LABEL for v in given)
    return short and 2 <= len(set(given)) <= len(given) // 2


def _table_rows(lines: Iterator[str], is_tsv: bool) -> Iterator[Row]:
    """Yield rows with the columns of the header, by default path, label, extra."""
    how: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if is_tsv else {}
    columns: list[str] = []
    for row in filter(any, csv.reader(lines, strict=True, skipinitialspace=True, **how)):
        cells = list(map(str.strip, row))
        if not columns:
            columns = cells
            if _find(columns, _PATH_COLUMNS):
                continue
            if not is_tsv and "." not in columns[0]:
                raise ValueError(
                    f"expected a column {', '.join(_PATH_COLUMNS[:5])}..., or a path first, "
                    f"got {', '.join(columns)}"
                )
            columns = _DEFAULT_COLUMNS
        if len(cells) > len(columns):
            raise ValueError(f"expected the columns {', '.join(columns)}, got {len(cells)}")
        # Without a header, an empty cell only keeps the place of a column.
        known = zip(columns, map(_stripped, cells), strict=False)
        yield {name: cell for name, cell in known if cell or columns is not _DEFAULT_COLUMNS}


def _check_row(row: Any) -> None:
    """Check that a row has a path to a file, which is then under :data:`_PATH`."""
    if not isinstance(row, dict):
        raise EncodeError("expected a JSON object")
    name = _find((name for name in row if row[name] is not None), _PATH_COLUMNS)
    row[_PATH] = path = row.pop(name, None) if name else None
    if not isinstance(path, str) or posixpath.basename(path) in ("", ".", ".."):
        raise EncodeError(f"expected a path to a file, got {path!r}")


def _check_types(path: str, lines: Sequence[int], labels: list[Any]) -> list[Any]:
    """Return the labels of JSON, all of which are integers or all names; long numbers are names.

    Raises:
        EncodeError: There are other labels.
    """
    for line, found in zip(lines, labels, strict=True):
        if type(found) not in (int, str, type(None)):
            raise EncodeError(
                f"line {line}: expected a label that is a number or a name, got {found!r}", url=path
            )
    kinds = {type(label): label for label in labels if label is not None}
    if len(kinds) > 1:
        raise EncodeError(
            "expected labels that are all numbers or all names, "
            f"got {', '.join(map(repr, kinds.values()))}",
            url=path,
        )
    if int in kinds and any(abs(label or 0) >= 10**MAX_LABEL_DIGITS for label in labels):
        return [None if label is None else str(label) for label in labels]
    return labels


def _read_numbers(path: str, column: str | None, labels: list[Any], asked: bool) -> list[Any]:
    """Return the labels of a table as integers, or all as names.

    If some numbers have leading zeros or fractions, all stay strings: 007 is a name.

    Args:
        path: The list.
        column: The column of the labels.
        labels: The labels, ``None`` for none.
        asked: Whether the user named the column.

    Raises:
        EncodeError: The labels are numbers with fractions, or of some rows numbers and of others
            names.
    """
    given = [label for label in labels if label is not None]
    if not asked and all(map(_DECIMAL.fullmatch, given)) and any(float(n) % 1 for n in given):
        raise EncodeError(
            f"expected whole numbers or names in column {column!r} of labels, got numbers such as "
            f"{next(n for n in given if float(n) % 1)}: --no-labels leaves them among the other "
            f"columns, --label {column} makes each a class",
            url=path,
        )
    are_numbers = [bool(_NUMBER.fullmatch(label)) for label in given]
    if not all(are_numbers) and all(_DIGITS.fullmatch(n) or _DECIMAL.fullmatch(n) for n in given):
        return labels
    if any(are_numbers) and not all(are_numbers):
        raise EncodeError(
            "expected labels that are all numbers or all names, got "
            f"{given[are_numbers.index(True)]!r} and {given[are_numbers.index(False)]!r}",
            url=path,
        )
    return [int(n.removesuffix(".0")) if n and are_numbers[0] else n for n in labels]
