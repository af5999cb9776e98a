"""Sources that are lists of files: ``.csv``, ``.tsv`` and ``.jsonl``."""

from __future__ import annotations

import csv
import itertools
import json
import posixpath
import re
from collections.abc import Iterator, Sequence
from typing import Any

from .. import storage
from ..errors import EncodeError
from ..redaction import redact_url
from .samples import LABEL_FIELD, FieldRef, SampleRef, StorageOptions, unique_keys

LISTS = (".csv", ".tsv", ".jsonl", ".ndjson")
Row = dict[str, Any]
_DIGITS = re.compile("-?[0-9]+")
_NUMBER = re.compile("0|-?[1-9][0-9]*")
_MAX_LIST_BYTES = 1 << 31
_MAX_DIGITS = 18  # fits in an int64
# Column names used by other programs; the first one found is used.
_PATH_COLUMNS = ("path", "file_name", "filename", "file", "image")
_LABEL_COLUMNS = ("label", "class")
_DEFAULT_COLUMNS = ["path", "label", "extra"]


def list_rows(path: str, options: StorageOptions) -> tuple[list[SampleRef], list[str | None]]:
    """Return the samples that a file lists, in its order, and the class name of each.

    The class name is ``None`` for numeric labels, which are stored in the field ``cls``.

    Raises:
        EncodeError: A row is malformed; the message names its line.
        StorageError: The list cannot be read.
    """
    # A local list may be a named pipe, which has no size.
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
    labels = [row.pop("label", None) for row in rows]
    _check_alike(labels, path)
    folder = path.rpartition("/")[0]
    samples = []
    for key, row, label in zip(unique_keys(row["path"] for row in rows), rows, labels, strict=True):
        url = row.pop("path")
        if folder and "://" not in url and not url.startswith("/"):
            url = storage.join(folder, url)
        known = [(LABEL_FIELD, str(label).encode())] if isinstance(label, int) else []
        if row:
            known.append(("json", json.dumps(row).encode()))
        samples.append(SampleRef(key, (FieldRef("jpg", url),), tuple(known)))
    return samples, [label if isinstance(label, str) else None for label in labels]


class _Lines:
    """An iterator over the lines of a list that tracks the current line number."""

    def __init__(self, data: bytes) -> None:
        self._lines = iter(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"))
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self.number += 1
            yield line.removesuffix(b"\r").decode() + "\n"


def _parse(path: str, lines: _Lines) -> Iterator[Row]:
    filled = (line for line in lines if line.strip())
    if path.endswith(".tsv"):
        yield from _table_rows(line[:-1].split("\t") for line in filled)
    elif path.endswith(".csv"):
        yield from _table_rows(_csv_cells(iter(lines)), needs_header=True)
    else:
        for line in filled:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise EncodeError("expected a JSON object")
            yield row


def _csv_cells(lines: Iterator[str]) -> Iterator[list[str]]:
    """Return the rows of a CSV file; semicolons separate cells if the first line has no comma."""
    first = next(lines)
    separator = ";" if ";" in first and "," not in first else ","
    rows = csv.reader(itertools.chain([first], lines), delimiter=separator, strict=True)
    return (cells for cells in rows if any(cells))


def _table_rows(rows: Iterator[list[str]], *, needs_header: bool = False) -> Iterator[Row]:
    """Yield rows with the columns of the header, by default path, label, extra."""
    names: list[str] = []
    for cells in rows:
        if not names:
            names = _column_names(cells, needs_header)
            if names:
                continue
            names = _DEFAULT_COLUMNS
        if len(cells) > len(names) or "\r" in "".join(cells):
            raise ValueError(f"expected the columns {', '.join(names)}, got {len(cells)}")
        row = {name: value for name, value in zip(names, cells, strict=False) if value}
        label = row.get("label", "")
        if _DIGITS.fullmatch(label) and len(label) > _MAX_DIGITS:
            raise ValueError(f"expected a label of at most {_MAX_DIGITS} digits, got {len(label)}")
        yield row


def _column_names(cells: Sequence[str], needs_header: bool) -> list[str]:
    """Return a header's columns, renamed to ``path`` and ``label``; empty for a data row."""
    names = [cell.strip() for cell in cells]
    path = next((name for name in _PATH_COLUMNS if name in names), None)
    label = next((name for name in _LABEL_COLUMNS if name in names), None)
    if path is None:
        if needs_header and "." not in names[0]:
            raise ValueError(
                f"expected a column {', '.join(_PATH_COLUMNS[:-1])} or {_PATH_COLUMNS[-1]}, "
                f"or a path first, got {', '.join(map(redact_url, names))}"
            )
        return []
    renamed = {path: "path", label: "label"}
    return [renamed.get(name, name) for name in names]


def _check_row(row: Row) -> None:
    """Check that a row has a path to a file, and that its label is a number or a name."""
    path = row.get("path")
    if not isinstance(path, str) or posixpath.basename(path) in ("", ".", ".."):
        shown = redact_url(path) if isinstance(path, str) else path
        raise EncodeError(f"expected a path to a file, got {shown!r}")
    label = row.get("label", 0)
    if isinstance(label, bool) or not isinstance(label, int | str):
        raise EncodeError(f"expected a label that is a number or a name, got {label!r}")
    if isinstance(label, int) and abs(label) >= 10**_MAX_DIGITS:
        raise EncodeError(f"expected a label of at most {_MAX_DIGITS} digits, got a longer number")


def _read_numbers(rows: list[Row]) -> None:
    """Convert numeric labels of a table to integers, in place.

    If all labels are digits and some have leading zeros, all stay strings: 007 is a name.
    """
    labeled = [row for row in rows if "label" in row]
    numbers = [row for row in labeled if _NUMBER.fullmatch(row["label"])]
    if len(numbers) == len(labeled) or not all(_DIGITS.fullmatch(row["label"]) for row in labeled):
        for row in numbers:
            row["label"] = int(row["label"])


def _check_alike(labels: Sequence[int | str | None], path: str) -> None:
    names = sorted(label for label in labels if isinstance(label, str))
    numbers = [label for label in labels if isinstance(label, int)]
    if names and numbers:
        raise EncodeError(
            f"expected labels that are all numbers or all names, got {numbers[0]} and {names[0]!r}",
            url=path,
        )
