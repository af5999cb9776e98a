"""The files of a store or a stream."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from .. import storage
from ..errors import StorageError
from ..redaction import get_logger

log = get_logger(__name__)
LEFTOVER_SECONDS = 3600.0
_TEMPORARY = re.compile(r"\..*\.(?:tmp|part)")


def memory_bytes() -> int:
    """Return the size of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclasses.dataclass(repr=False)  # options may hold secrets
class Folder:
    """Access to the files of a folder.

    Attributes:
        url: The folder.
        options: fsspec storage options.
        workers: Threads that encode and decode.
        max_bytes: Memory limit for a decoded header.
    """

    url: str
    options: storage.Options = None
    workers: int = 1
    max_bytes: int = 1 << 62

    def __post_init__(self) -> None:
        if not self.url:
            raise ValueError("expected the URL of a folder, got an empty one")

    def join(self, name: str) -> str:
        """Return the URL of a file in the folder."""
        return storage.join(self.url, name)

    def list(self) -> list[str]:
        """Return the names of what is in the folder; empty if the folder does not exist."""
        return storage.list_names(self.url, options=self.options)

    def numbered(self, pattern: re.Pattern[str]) -> dict[str, int]:
        """Return the names of files that match a pattern, and the numbers in them."""
        matches = filter(None, map(pattern.fullmatch, self.list()))
        return {match[0]: int(match[1]) for match in matches}

    def read(self, name: str, start: int, stop: int) -> memoryview:
        """Read the bytes ``[start, stop)`` of a file."""
        return storage.read(self.join(name), start, stop, options=self.options).data

    def read_bytes(self, name: str, max_bytes: int | None = None) -> bytes | None:
        """Read a file; return ``None`` if it does not exist."""
        try:
            return storage.read_bytes(self.join(name), options=self.options, max_bytes=max_bytes)
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def put(self, name: str, parts: Iterable[Any], *, replace: bool = True) -> None:
        """Write a file, which appears complete; see :func:`.storage.atomic_write`."""
        how = {"durable": False, "replace": replace}
        with storage.atomic_write(self.join(name), options=self.options, **how) as file:
            file.writelines(parts)

    def create(self, name: str, data: bytes) -> bool:
        """Create a file; return ``False`` if another process has created it before."""
        try:
            storage.create(self.join(name), data, options=self.options)
        except FileExistsError:
            # The client library may have retried a request whose response was lost.
            return self.read_bytes(name) == data
        return True

    def clean(self, leftovers: Iterable[str] = ()) -> None:
        """Remove temporary and other leftover files that killed writers left over an hour ago."""
        temporary = [name for name in self.list() if _TEMPORARY.fullmatch(name)]
        for name in (*temporary, *leftovers):
            with suppress(StorageError):  # another writer removed it first
                if storage.age_seconds(self.join(name), options=self.options) > LEFTOVER_SECONDS:
                    self.remove([name])

    def remove(self, names: Iterable[str]) -> None:
        """Remove files. If a file cannot be removed, log a warning; a later writer removes it."""
        for name in names:
            try:
                storage.remove(self.join(name), options=self.options)
            except StorageError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    log.warning("a file is left over: %s", error)
