"""What is known of the samples of a source before they are read."""

from __future__ import annotations

import itertools
import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .. import storage
from ..format.names import is_metadata
from ..redaction import links_of

StorageOptions = storage.Options


class FieldRef(NamedTuple):
    """Where a field's bytes are: ``[start, stop)`` of a file, to its end if stop is ``None``."""

    name: str
    url: str
    start: int = 0
    stop: int | None = None


class SampleRef(NamedTuple):
    """A sample to encode: fields to read, and fields already known."""

    key: str
    refs: tuple[FieldRef, ...]
    known: tuple[tuple[str, bytes], ...] = ()


class Source(NamedTuple):
    """All samples of a source in a stable order.

    ``classes`` are the names of its labels, ``ignored`` the files that were left out, and
    ``splits`` the training, validation and test sets that it seems to hold, each with what to
    encode for that one.
    """

    samples: list[SampleRef]
    classes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    splits: Mapping[str, str] = {}


def unique_keys(paths: Iterable[str]) -> list[str]:
    """Legal, distinct keys for file names: no dots in the last part, no way out of a folder."""
    keys: dict[str, None] = {}
    for path in paths:
        stem = _legal_key(path)
        numbered = (f"{stem}_{number}" for number in itertools.count(1))
        keys[next(key for key in itertools.chain([stem], numbered) if key not in keys)] = None
    return list(keys)


def _legal_key(path: str) -> str:
    """A legal key for a file's name, or for the path of a URL, never for the rest of it."""
    links = links_of(path)
    remote = [link for link in links if link.scheme] or links
    names = [link.path for link in remote] + [link.host for link in remote] + ["_"]
    local = next(name for name in names if name.strip("/\\\0."))
    parts = [part for part in re.split(r"[/\\\0]", local) if part not in ("", ".", "..")]
    parts[-1] = posixpath.splitext(parts[-1])[0].replace(".", "_") or "_"
    key = "/".join(parts).encode("utf-8", "replace").decode()
    return f"_{key.lstrip('_')}" if is_metadata(f"{key}.jpg") else key
