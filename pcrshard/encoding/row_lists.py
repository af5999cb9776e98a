"""Sources that are lists of files: ``.csv``, ``.tsv`` and ``.jsonl``."""

from __future__ import annotations

import csv
import io
import json
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .. import storage
from ..errors import EncodeError
from ..redaction import redact_url
from .samples import FieldRef, ListedImage, StorageOptions, Unlayered, version_of

_JSON = (".jsonl", ".ndjson")
LISTS = (".csv", ".tsv", *_JSON)
# The key of a row's path, which is no name of a column.
_PATH = "\0path"
Row = dict[str, Any]


def is_list(url: str) -> bool:
    """Return whether a source is a list of files, by its name."""
    return storage.file_name(url).endswith(LISTS)


_DIGITS = re.compile("-?[0-9]+")
# Fits in an int64; a longer one is a name. pandas writes 3.0 if other labels are missing.
_NUMBER = re.compile(r"(?:0|-?[1-9][0-9]{0,17})(?:\.0)?")
_MAX_LIST_BYTES = 1 << 31
# Columns by what other programs call them, in lower case; the first one found is used.
_PATH_COLUMNS = (
    "path", "file_name", "filename", "file", "image", "filepath", "file_path", "image_path",
    "img_path", "image_name", "img_name", "image_file", "img", "image_id", "img_id", "image_url",
    "url", "id",
)  # fmt: skip
_LABEL_COLUMNS = (
    "label", "labels", "class", "class_name", "classname", "class_id", "category", "category_name",
    "category_id", "target", "targets", "label_name", "label_id", "species", "breed", "dx",
    "diagnosis",
)  # fmt: skip
_SPLIT_COLUMNS = ("split", "subset", "set", "partition", "phase")
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
    split = _find(columns, _SPLIT_COLUMNS)
    labels = [row.pop(chosen, None) if chosen else None for row in rows]
    if not storage.file_name(path).endswith(_JSON):
        labels = _read_numbers(labels)
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
    folder = storage.parent(path) if "/" in path else ""
    images, skipped = [], []
    for row, line, found in zip(rows, lines, labels, strict=True):
        name = row.pop(_PATH)
        if kinds and found is None:
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
        file = _file(name, url)
        if not (skip or file.version) and _is_id(url):
            raise EncodeError(
                f"line {line}: expected a path, or the name of a .jpg, .jpeg or .png file beside "
                f"the list, got {name!r}",
                url=path,
            )
        part = str(row.get(split, "")) if split else ""
        known = (("json", json.dumps(row).encode()),) if row else ()
        images.append(ListedImage(file, found, known, part))
    return ListedRows(images, skipped)


def _file(name: str, url: str) -> FieldRef:
    """Return a listed file, also one that is listed by an ID, its name without an extension."""
    version = version_of(url)
    if not version and _is_id(url):
        for extension in _EXTENSIONS:
            if found := version_of(url + extension):
                return FieldRef(name + extension, url + extension, version=found)
    return FieldRef(name, url, version=version)


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


def _find(columns: Iterable[str], names: Sequence[str]) -> str | None:
    """Return the column that has the first of some names, in any case."""
    by_name = {column.lower(): column for column in columns}
    return next((by_name[name] for name in names if name in by_name), None)


def _label_column(
    path: str, rows: Sequence[Row], columns: Iterable[str], asked: str | None
) -> str | None:
    """Return the column of the labels; ``None`` if no column can be one.

    Raises:
        EncodeError: The column that was asked for does not exist, or several may be meant.
    """
    given = [name for name in columns if name != _PATH]
    if asked is not None:
        found = _find(given, (asked.lower(),))
        if found is None:
            raise EncodeError(
                f"expected a column {asked!r}, got {', '.join(given) or 'no other column'}",
                url=path,
            )
        return found
    # Annotations, such as the boxes of a detection list, are no labels, whatever their column.
    given = [name for name in given if not any(type(row.get(name)) in (list, dict) for row in rows)]
    usual = [name for name in _LABEL_COLUMNS if name in map(str.lower, given)]
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
        yield {name: value for name, value in zip(columns, cells, strict=False) if value}


def _check_row(row: Any) -> None:
    """Check that a row has a path to a file, which is then under :data:`_PATH`."""
    if not isinstance(row, dict):
        raise EncodeError("expected a JSON object")
    name = _find(row, _PATH_COLUMNS)
    row[_PATH] = path = row.pop(name, None) if name else None
    if not isinstance(path, str) or posixpath.basename(path) in ("", ".", ".."):
        raise EncodeError(f"expected a path to a file, got {path!r}")


def _read_numbers(labels: list[Any]) -> list[Any]:
    """Convert numeric labels of a table to integers.

    If all labels are digits and some have leading zeros, all stay strings: 007 is a name.
    """
    given = [label for label in labels if label is not None]
    are_digits = all(map(_DIGITS.fullmatch, given))
    if are_digits and not all(map(_NUMBER.fullmatch, given)):
        return labels
    return [
        int(label.removesuffix(".0")) if label and _NUMBER.fullmatch(label) else label
        for label in labels
    ]
