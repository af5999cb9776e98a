"""A prefix of a local file, read straight into the samples' bytes; what :mod:`.prefix` does with a buffer in between."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Self

from .. import storage
from ..errors import CorruptJpeg, CorruptPiece, PCRError, StorageError, TruncatedShard
from ..format.scan import FULL, Scan, check_scan
from ..format.shard_index import HEAD_STOP, ShardIndex
from ..jpeg.markers import EOI
from ..jpeg.split import join_pieces
from ..native import scatter
from ..storage.local_file import LocalFile
from .prefix import OnError, Prefix, Sample, Select, Source


def read_images(
    file: LocalFile, index: ShardIndex, scan: Scan, *, check: bool = True
) -> list[bytes | None]:
    """Read the part of a prefix that is behind the index, once.

    Returns:
        The JPEG of each sample and stream; ``None`` where there is none, and where it is damaged.

    Raises:
        TruncatedShard: The file ends early.
        OSError: It cannot be read.
    """
    num_scans = min(check_scan(scan, index.num_groups), index.num_groups)
    crcs = index.crcs if check else [None] * len(index.crcs)
    stop = index.head.prefix_stop(num_scans)
    images = file.scatter(
        HEAD_STOP + index.head.body_bytes,
        stop,
        _groups(index, 0, num_scans),
        ending=EOI,
        crcs=crcs[num_scans - 1],
    )
    if scan == FULL:
        tails = file.scatter(
            stop,
            index.head.prefix_stop(FULL),
            _groups(index, index.num_groups, index.num_groups + 1),
            crcs=crcs[-1],
        )
        for i in index.sizes[-1].ravel().nonzero()[0].tolist():
            images[i] = _with_tail(images[i], tails[i])
    return images


def _with_tail(image: bytes | None, tail: bytes | None) -> bytes | None:
    if image is None or tail is None:
        return None
    try:
        return join_pieces([image[: -len(EOI)]], tail)
    except CorruptJpeg:
        return None


def _groups(index: ShardIndex, first: int, stop: int) -> scatter.Groups:
    """Where the pieces of these rows are."""
    base = min(index.schema.base, stop) if first == 0 else 0
    return scatter.Groups(
        index.sizes[first:stop], index.group_starts[first:stop], base, index.base_offsets
    )


class JoinedSamples:
    """All samples of a prefix as bytes in memory; from :meth:`Shard.load_samples`.

    Args:
        shard: What was read.
        scan: At which scan.
        images: Of :func:`read_images`.

    Attributes:
        num_bytes: Bytes of the prefix, of which the images are nearly all.
    """

    def __init__(self, shard: Source, scan: Scan, images: list[bytes | None]) -> None:
        self.shard, self.scan, self.index, self._images = shard, scan, shard.index, images
        self._rows: list[Sample] = []
        self.num_bytes = self.index.head.prefix_stop(scan)
        self._streams = tuple(field for field, _ in self.index.schema.streams)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back, but for the samples that the caller keeps."""
        self._images.clear()
        self._rows.clear()

    def samples(
        self, *, select: Select | None = None, on_error: OnError | None = None
    ) -> Iterator[Sample]:
        """The samples in order; see :meth:`Prefix.samples`.

        Raises:
            ValueError: This was closed before all were taken.
        """
        count, num_streams = len(self.index.keys), len(self._streams)
        if len(self._images) != count * num_streams:
            raise ValueError("expected to be asked for samples before it was closed")
        names = ("__key__", *self._streams, *self.index.fields)
        fields = self.index.fields.values()
        images = [self._images[i::num_streams] for i in range(num_streams)]
        self._rows = scatter.rows(names, (self.index.keys, *images, *fields), count)
        if select is None and all(self._images) and not any(None in column for column in fields):
            yield from self._rows
        else:
            yield from self._partial_rows(select, on_error)
        if not self._rows:
            raise ValueError("expected to give all samples before it was closed")

    def _partial_rows(self, select: Select | None, on_error: OnError | None) -> Iterator[Sample]:
        for row, sample in enumerate(self._rows):
            try:
                partial = self._partial(row, sample, select)
            except PCRError as error:
                if on_error is None or not on_error(error):
                    raise
                continue
            yield partial

    def _partial(self, row: int, sample: Sample, select: Select | None) -> Sample:
        """A sample without what is absent or not selected."""
        present = (self.index.sizes[0][row] > 0).tolist()
        key = sample["__key__"]
        if any(
            there and sample[field] is None
            for field, there in zip(self._streams, present, strict=True)
        ):
            try:
                return self._again.sample(row, select=select)  # which says what is damaged
            except (StorageError, TruncatedShard) as error:
                raise CorruptPiece(
                    f"damaged; read again to say where: {error}", url=self.shard.url, key=key
                ) from error
        return {
            name: value
            for name, value in sample.items()
            if name == "__key__" or (value is not None and (select is None or select(key, name)))
        }

    @functools.cached_property
    def _again(self) -> Prefix:
        return _OnDisk(self.shard, memoryview(b""), 0, self.scan, contextlib.ExitStack())


class _OnDisk(Prefix):
    """A prefix that is not in memory: the pieces of an image are read when they are asked for."""

    def pieces(self, unit: int) -> list[memoryview]:
        url = self.shard.url
        with storage.open_local(storage.local_path(url) or url, url=url) as file:
            return [
                memoryview(file.read(*ends))
                for ends in zip(self.starts[unit], self.stops[unit], strict=True)
            ]
