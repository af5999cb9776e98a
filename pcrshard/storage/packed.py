"""Compressed files, read once from their beginning."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from .. import zstd
from ..errors import StorageError
from ..memory import Buffer
from .files import open_stream
from .stores import Access

# By the first bytes: names may be wrong.
_OPENERS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
    b"\x28\xb5\x2f\xfd": zstd.open_stream,
}
_ERRORS = (EOFError, OSError, lzma.LZMAError, zstd.StreamError)
_MAGIC_BYTES = 8


def is_packed(start: Buffer) -> bool:
    """Return whether a file that starts with these bytes is compressed."""
    return bytes(start[:_MAGIC_BYTES]).startswith(tuple(_OPENERS))


@contextmanager
def open_unpacked(url: str, *, options: Access = None) -> Iterator[io.BufferedIOBase]:
    """Open a file to be read once from its beginning, without its compression, if it has one.

    Raises:
        StorageError: The file cannot be read, or :class:`Damaged`, now or in the ``with`` block.
    """
    with open_stream(url, options=options) as raw:
        packed = io.BufferedReader(cast("io.RawIOBase", raw), 1 << 20)
        magic = packed.peek(_MAGIC_BYTES)
        opener = next((o for m, o in _OPENERS.items() if magic.startswith(m)), None)
        try:
            yield opener(packed) if opener else packed
        except _ERRORS as error:
            if isinstance(error, OSError) and (
                error.errno is not None or isinstance(error, StorageError)
            ):
                raise  # of the disk, or of the network
            raise Damaged(f"cannot be unpacked: {error}", url=url) from error


class Damaged(StorageError):
    """A compressed file is cut off, or something else."""
