"""Lists of files as a source: ``.csv``, ``.tsv`` and ``.jsonl``."""

from __future__ import annotations

import csv
import json
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .. import storage
from ..errors import EncodeError
from ..redaction import redact_url
from .sample_refs import (
    FieldRef,
    SampleRef,
    Source,
    StorageOptions,
    unique_keys,
)

Row = dict[str, Any]
LISTS = (".csv", ".tsv", ".jsonl", ".ndjson")
_DIGITS = re.compile("-?[0-9]+")
_MAX_LIST_BYTES = 1 << 31
_MAX_DIGITS = 18  # fits into int64
_NUMBER = re.compile("0|-?[1-9][0-9]*")
# What other programs call the columns, the first that is there.
_PATH_COLUMNS = ("path", "file_name", "filename", "file", "image")
_LABEL_COLUMNS = ("label", "class")
_DEFAULT_COLUMNS = ["path", "label", "extra"]


class _Lines:
    """The lines of a list as text, and the number of the one that was read last."""

    def __init__(self, data: bytes) -> None:
        self._lines = iter(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"))
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.number += 1
        return line.removesuffix(b"\r").decode()


def list_rows(path: str, options: StorageOptions) -> Source:
    """The samples of a list, in its order.

    Raises:
        EncodeError: A row is not as it should be; the message names its line.
        StorageError: The list cannot be read.
    """
    # A local one may be a pipe, which has no size.
    most = None if storage.is_local(path) else _MAX_LIST_BYTES
    lines = _Lines(storage.read_bytes(path, options=options, max_bytes=most))
    rows = []
    try:
        for row in _parse(path, lines):
            _check_row(row)
            rows.append(row)
    except (ValueError, RecursionError, csv.Error) as error:
        reason = str(error).replace("\n", " ")
        raise EncodeError(f"line {lines.number}: {reason}", url=path) from error
    if not path.endswith(("jsonl", "ndjson")):
        _read_numbers(rows)
    return _rows_to_source(rows, path)


def _parse(path: str, lines: _Lines) -> Iterator[Row]:
    if path.endswith(".csv"):
        return _table_rows(_csv_cells(lines), needs_header=True)
    if path.endswith(".tsv"):
        cells = (line.split("\t") for line in lines if line.strip())
        return _table_rows(cells)
    return (_parse_json(line) for line in lines if line.strip())


def _csv_cells(lines: _Lines) -> Iterator[list[str]]:
    """The rows of a CSV file; separated by semicolons if its first line has no comma."""
    first = next(lines)
    separator = "," if "," in first or ";" not in first else ";"

    def texts() -> Iterator[str]:
        yield f"{first}\n"
        yield from (f"{line}\n" for line in lines)

    return (cells for cells in csv.reader(texts(), delimiter=separator, strict=True) if any(cells))


def _table_rows(rows: Iterator[list[str]], *, needs_header: bool = False) -> Iterator[Row]:
    """Rows of path, label, extra, or of the columns that the first row names."""
    names: list[str] = []
    for cells in rows:
        if not names:
            names = _column_names(cells, needs_header)
            if names:
                continue
            names = _DEFAULT_COLUMNS
        if len(cells) > len(names) or any("\r" in cell for cell in cells):
            raise ValueError(f"expected the columns {', '.join(names)}, got {len(cells)}")
        row = {name: value for name, value in zip(names, cells, strict=False) if value}
        _check_digits(row.get("label", ""))
        yield row


def _column_names(cells: Sequence[str], needs_header: bool) -> list[str]:
    """The names of the columns, if this row is a header; the path is ``path`` in any case."""
    names = [cell.strip() for cell in cells]
    path = _first_of(_PATH_COLUMNS, names)
    if path is None:
        if needs_header and "." not in names[0]:
            raise ValueError(
                f"expected a column {', '.join(_PATH_COLUMNS[:-1])} or {_PATH_COLUMNS[-1]}, "
                f"or a path first, got {', '.join(map(redact_url, names))}"
            )
        return []
    label = _first_of(_LABEL_COLUMNS, names)
    renamed = {
        path: "path",
        label: "label",
    }
    return [renamed.get(name, name) for name in names]


def _first_of(usual: Sequence[str], names: Sequence[str]) -> str | None:
    return next((name for name in usual if name in names), None)


def _check_digits(label: str) -> None:
    if _DIGITS.fullmatch(label) and len(label) > _MAX_DIGITS:
        raise ValueError(f"expected a label of at most {_MAX_DIGITS} digits, got {len(label)}")


def _rows_to_source(rows: list[Row], path: str) -> Source:
    folder = path.rpartition("/")[0]
    classes = _class_names(rows, path)
    numbers = {name: number for number, name in enumerate(classes)}
    samples = []
    for key, row in zip(unique_keys(row["path"] for row in rows), rows, strict=True):
        url = _resolve(folder, row.pop("path"))
        known = tuple(_known_fields(row, numbers))
        samples.append(SampleRef(key, (FieldRef("jpg", url),), known))
    return Source(samples, classes)


def _resolve(folder: str, url: str) -> str:
    """A path as it is meant in a list that lies in a folder."""
    if folder and "://" not in url and not url.startswith("/"):
        return storage.join(folder, url)
    return url


def _known_fields(row: Row, numbers: Mapping[str, int]) -> Iterator[tuple[str, bytes]]:
    """The label of a row by its number, and all else that the row has."""
    if "label" in row:
        label = row.pop("label")
        yield "cls", str(numbers.get(label, label)).encode()
    if row:
        yield "json", json.dumps(row).encode()


def _class_names(rows: list[Row], path: str) -> tuple[str, ...]:
    """The labels, sorted, if they are names; none if they are numbers."""
    labels = {row["label"] for row in rows if "label" in row}
    names = sorted(label for label in labels if isinstance(label, str))
    if names and len(names) != len(labels):
        number = next(label for label in labels if not isinstance(label, str))
        raise EncodeError(
            f"expected labels that are all numbers or all names, got {number} and {names[0]!r}",
            url=path,
        )
    return tuple(names)


def _check_row(row: Row) -> None:
    """Make sure that the row has a path to a file, and that a label is a number or a name."""
    path = row.get("path")
    if not isinstance(path, str) or posixpath.basename(path) in ("", ".", ".."):
        shown = redact_url(path) if isinstance(path, str) else path
        raise EncodeError(f"expected a path to a file, got {shown!r}")
    _check_label(row.get("label", 0))


def _check_label(label: object) -> None:
    if isinstance(label, bool) or not isinstance(label, int | str):
        raise EncodeError(f"expected a label that is a number or a name, got {label!r}")
    if isinstance(label, int) and abs(label) >= 10**_MAX_DIGITS:
        raise EncodeError(f"expected a label of at most {_MAX_DIGITS} digits, got a longer number")


def _parse_json(line: str) -> Row:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise EncodeError("expected a JSON object")
    return row


def _read_numbers(rows: list[Row]) -> None:
    """Turn labels that are written as numbers into numbers.

    Where all are digits and some have leading zeros they stay: 007 is a name.
    """
    labelled = [row for row in rows if "label" in row]
    numbered = [row for row in labelled if _NUMBER.fullmatch(row["label"])]
    if len(numbered) < len(labelled) and all(_DIGITS.fullmatch(row["label"]) for row in labelled):
        return
    for row in numbered:
        row["label"] = int(row["label"])
