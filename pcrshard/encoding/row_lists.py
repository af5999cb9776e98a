"""Sources that are lists of files: ``.csv``, ``.tsv`` and ``.jsonl``."""

from __future__ import annotations

import csv
import io
import json
import posixpath
import re
from collections.abc import Iterator
from typing import Any

from .. import storage
from ..errors import EncodeError
from .samples import FieldRef, ListedImage, StorageOptions, version_of

LISTS = (".csv", ".tsv", ".jsonl", ".ndjson")
Row = dict[str, Any]


def is_list(url: str) -> bool:
    """Return whether a source is a list of files, by its name."""
    return storage.file_name(url).endswith(LISTS)


_DIGITS = re.compile("-?[0-9]+")
# Fits in an int64; a longer one is a name. pandas writes 3.0 if other labels are missing.
_NUMBER = re.compile(r"(?:0|-?[1-9][0-9]{0,17})(?:\.0)?")
_MAX_LIST_BYTES = 1 << 31
# Column names used by other programs; the first one found is used.
_PATH_COLUMNS = ("path", "file_name", "filename", "file", "image")
_LABEL_COLUMNS = ("label", "class")
_DEFAULT_COLUMNS = ["path", "label", "extra"]


def list_rows(path: str, options: StorageOptions) -> list[ListedImage]:
    """Return the images that a file lists, in its order.

    Raises:
        EncodeError: A row is malformed; the message names its line.
        StorageError: The list cannot be read.
    """
    data = storage.read_bytes(path, options=options, max_bytes=_MAX_LIST_BYTES)
    list_name = storage.file_name(path)
    is_json = list_name.endswith(("jsonl", "ndjson"))
    number = 0

    def lines() -> Iterator[str]:
        nonlocal number
        for line in io.BytesIO(data.removeprefix(b"\xef\xbb\xbf")):
            number += 1
            yield line.decode()

    rows = []
    found: Iterator[Row]
    try:
        if is_json:
            found = map(json.loads, filter(str.strip, lines()))
        else:
            found = _table_rows(lines(), list_name.endswith(".tsv"))
        for row in found:
            _check_row(row)
            rows.append(row)
    except (ValueError, RecursionError, csv.Error) as error:
        reason = str(error).replace("\n", " ")
        raise EncodeError(f"line {number}: {reason}", url=path) from error
    labels = [row.pop("label", None) for row in rows]
    if not is_json:
        labels = _read_numbers(labels)
    kinds = {type(label): label for label in labels if label is not None}
    if len(kinds) > 1:
        raise EncodeError(
            "expected labels that are all numbers or all names, "
            f"got {', '.join(map(repr, kinds.values()))}",
            url=path,
        )
    folder = storage.parent(path) if "/" in path else ""
    images = []
    for row, label in zip(rows, labels, strict=True):
        name = url = row.pop("path")
        if folder and "://" not in url and not url.startswith("/"):
            url = storage.join(folder, url)
        known = (("json", json.dumps(row).encode()),) if row else ()
        images.append(ListedImage(FieldRef(name, url, version=version_of(url)), label, known))
    return images


def _table_rows(lines: Iterator[str], is_tsv: bool) -> Iterator[Row]:
    """Yield rows with the columns of the header, by default path, label, extra."""
    how: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if is_tsv else {}
    columns: list[str] = []
    for row in filter(any, csv.reader(lines, strict=True, skipinitialspace=True, **how)):
        cells = list(map(str.strip, row))
        if not columns:
            columns = cells
            label = next((name for name in _LABEL_COLUMNS if name in columns), None)
            if not set(_PATH_COLUMNS).isdisjoint(columns):
                columns = ["label" if name == label else name for name in columns]
                continue
            if not is_tsv and "." not in columns[0]:
                raise ValueError(
                    f"expected a column {', '.join(_PATH_COLUMNS)}, or a path first, "
                    f"got {', '.join(columns)}"
                )
            columns = _DEFAULT_COLUMNS
        if len(cells) > len(columns):
            raise ValueError(f"expected the columns {', '.join(columns)}, got {len(cells)}")
        yield {name: value for name, value in zip(columns, cells, strict=False) if value}


def _check_row(row: Any) -> None:
    """Check that a row has a path to a file, and that its label is a number or a name.

    The path is then under ``path``.
    """
    if not isinstance(row, dict):
        raise EncodeError("expected a JSON object")
    name = next((name for name in _PATH_COLUMNS if name in row), None)
    row["path"] = path = row.pop(name, None)
    if not isinstance(path, str) or posixpath.basename(path) in ("", ".", ".."):
        raise EncodeError(f"expected a path to a file, got {path!r}")
    if type(label := row.get("label", 0)) not in (int, str):
        raise EncodeError(f"expected a label that is a number or a name, got {label!r}")


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
