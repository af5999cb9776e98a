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
from .samples import LABEL_FIELD, FieldRef, SampleRef, StorageOptions, unique_keys

LISTS = (".csv", ".tsv", ".jsonl", ".ndjson")
Row = dict[str, Any]
_DIGITS = re.compile("-?[0-9]+")
# Fits in an int64; a longer one is a name.
_NUMBER = re.compile("0|-?[1-9][0-9]{0,17}")
_MAX_LIST_BYTES = 1 << 31
# Column names used by other programs; the first one found is used.
_PATH_COLUMNS = ("path", "file_name", "filename", "file", "image")
_LABEL_COLUMNS = ("label", "class")
_DEFAULT_COLUMNS = ["path", "label", "extra"]


def list_rows(path: str, options: StorageOptions) -> list[SampleRef]:
    """Return the samples that a file lists, in its order; numeric labels are in the field ``cls``.

    Raises:
        EncodeError: A row is malformed; the message names its line.
        StorageError: The list cannot be read.
    """
    # A local list may be a named pipe, which has no size.
    most = None if storage.is_local(path) else _MAX_LIST_BYTES
    data = storage.read_bytes(path, options=options, max_bytes=most)
    is_json = path.endswith(("jsonl", "ndjson"))
    number = 0

    def lines() -> Iterator[str]:
        nonlocal number
        for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
            number += 1
            yield line.removesuffix(b"\r").decode() + "\n"

    rows = []
    try:
        for row in _json_rows(lines()) if is_json else _table_rows(lines(), path.endswith(".tsv")):
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
    folder = path.rpartition("/")[0]
    samples = []
    for key, row, label in zip(unique_keys(row["path"] for row in rows), rows, labels, strict=True):
        url = row.pop("path")
        if folder and "://" not in url and not url.startswith("/"):
            url = storage.join(folder, url)
        known = [(LABEL_FIELD, str(label).encode())] if isinstance(label, int) else []
        if row:
            known.append(("json", json.dumps(row).encode()))
        name = label if isinstance(label, str) else None
        samples.append(SampleRef(key, (FieldRef("jpg", url),), tuple(known), name))
    return samples


def _json_rows(lines: Iterator[str]) -> Iterator[Row]:
    for line in lines:
        if line.strip():
            row = json.loads(line)
            if not isinstance(row, dict):
                raise EncodeError("expected a JSON object")
            yield row


def _table_rows(lines: Iterator[str], is_tsv: bool) -> Iterator[Row]:
    """Yield rows with the columns of the header, by default path, label, extra."""
    first = next(lines)
    if is_tsv:
        how: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    else:
        # Spreadsheets of some countries separate cells by semicolons.
        how = {"delimiter": ";" if ";" in first and "," not in first else ",", "strict": True}
    names: list[str] = []
    for cells in csv.reader(itertools.chain([first], lines), **how):
        if not any(cells):
            continue
        if not names:
            names = _column_names(cells, needs_header=not is_tsv)
            if names:
                continue
            names = _DEFAULT_COLUMNS
        if len(cells) > len(names):
            raise ValueError(f"expected the columns {', '.join(names)}, got {len(cells)}")
        yield {name: value for name, value in zip(names, cells, strict=False) if value}


def _column_names(cells: Sequence[str], needs_header: bool) -> list[str]:
    """Return a header's columns, renamed to ``path`` and ``label``; empty for a data row."""
    names = [cell.strip() for cell in cells]
    path = next((name for name in _PATH_COLUMNS if name in names), None)
    label = next((name for name in _LABEL_COLUMNS if name in names), None)
    if path is not None:
        renamed = {path: "path", label: "label"}
        return [renamed.get(name, name) for name in names]
    if needs_header and "." not in names[0]:
        raise ValueError(
            f"expected a column {', '.join(_PATH_COLUMNS)}, or a path first, got {', '.join(names)}"
        )
    return []


def _check_row(row: Row) -> None:
    """Check that a row has a path to a file, and that its label is a number or a name."""
    path = row.get("path")
    if not isinstance(path, str) or posixpath.basename(path) in ("", ".", ".."):
        raise EncodeError(f"expected a path to a file, got {path!r}")
    label = row.get("label", 0)
    if isinstance(label, bool) or not isinstance(label, int | str):
        raise EncodeError(f"expected a label that is a number or a name, got {label!r}")


def _read_numbers(labels: list[Any]) -> list[Any]:
    """Convert numeric labels of a table to integers.

    If all labels are digits and some have leading zeros, all stay strings: 007 is a name.
    """
    given = [label for label in labels if label is not None]
    are_digits = all(map(_DIGITS.fullmatch, given))
    if are_digits and not all(map(_NUMBER.fullmatch, given)):
        return labels
    return [int(label) if label and _NUMBER.fullmatch(label) else label for label in labels]
