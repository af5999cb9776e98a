"""Threads of the native core, which decode batches of images without the GIL.

A pool belongs to the process that created it: a forked child has none of its threads.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from . import (
    STORED,
    Backend,
    Color,
    Image,
    PixelLayout,
    Size,
    image_shape,
    make_request,
)
from ._core import ffi, lib
from .pieces import Table

Boxes = NDArray[np.int32]
Interval = tuple[float, float]

_CROPS = (None, "center", "random")  # indexed by the core's codes
# Maximum number of pictures of an image.
MAX_VIEWS: int = lib.PCR_MAX_VIEWS
_MAX_THREADS: int = lib.PCR_MAX_THREADS
# How often a waiting thread checks for signals.
_WAIT_MILLISECONDS = 100
_WORD = 2**64 - 1


class Draw(NamedTuple):
    """Parameters of random crops and flips; see :class:`pcrshard.ImageDecoder`."""

    crop: str | None
    scale: Interval
    ratio: Interval
    flip: float


def draw_key(*parts: int) -> int:
    """Return the random key of a tuple, such as (seed, epoch, sample), for crops and flips.

    ``draw_key(draw_key(seed, epoch), sample)`` differs from ``draw_key(seed, epoch, sample)``; see
    :func:`draw_keys`.
    """
    return functools.reduce(lib.pcr_draw_state, [int(part) & _WORD for part in parts], 0)


def draw_keys(parts: Sequence[int], ids: Iterable[int]) -> list[int]:
    """Return :func:`draw_key` of ``(*parts, id)`` for each id."""
    state = draw_key(*parts)
    return [lib.pcr_draw_state(state, each & _WORD) for each in ids]


def draw_boxes(key: int, size: Size, draws: Sequence[Draw]) -> Boxes:
    """Draw the crop and flip of each picture of an image, in order.

    Args:
        key: From :func:`draw_key`; only the lowest 64 bits are used.
        size: (height, width) of the image.
        draws: Parameters of each picture.

    Returns:
        (V, 5) int32: y, x, height, width, flip; four zeros stand for the whole image.
    """
    boxes = np.empty((len(draws), 5), np.int32)
    out = ffi.from_buffer("int32_t[]", boxes)
    lib.pcr_draw_boxes(key & _WORD, *size, _draws(draws), len(draws), out)
    return boxes


def _draws(draws: Sequence[Draw]) -> Any:
    return ffi.new("pcr_draw[]", [(_CROPS.index(draw.crop), *draw[1:]) for draw in draws])


_threads = threading.local()


def own_pool() -> Pool:
    """Return this thread's pool without threads, which decodes in the calling thread."""
    pool: Pool | None = getattr(_threads, "pool", None)
    if pool is None or not pool.is_own:
        pool = _threads.pool = Pool(0)
    return pool


class Pool:
    """Threads that decode batches image by image, oldest batch first.

    They do not hold the GIL, block signals, and end with :meth:`close`, with the object, or with
    the interpreter.

    Args:
        threads: Number of threads, 4096 at most; with 0, :meth:`Batch.wait` decodes, in one of the
            threads that wait.
        backend: ``portable`` forces the plain C code.

    Raises:
        ValueError: The number of threads is out of range.
        MemoryError: The threads cannot be started.
    """

    def __init__(self, threads: int, backend: Backend = "auto") -> None:
        if not 0 <= threads <= _MAX_THREADS:
            raise ValueError(f"expected 0 to {_MAX_THREADS} threads, got {threads}")
        handle = lib.pcr_pool_new(threads, backend == "portable")
        if handle == ffi.NULL:
            raise MemoryError(f"cannot start {threads} threads")
        self.threads = threads
        self._pid = os.getpid()
        self._handle = ffi.gc(handle, lib.pcr_pool_free)
        # Memory that the threads read and write, kept until the batch is waited for.
        self._under_way: dict[Any, Any] = {}
        self._stop = weakref.finalize(self, _stop, self._handle, self._under_way)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads; unfinished batches stay unfinished."""
        self._stop()

    def decode(
        self,
        table: Table,
        outs: Sequence[Image],
        *,
        layout: PixelLayout = "hwc",
        color: Color = "rgb",
        orientations: int | NDArray[np.uint8] = STORED,
        draws: Sequence[Draw] = (),
        keys: Sequence[int] = (),
        smoothing: bool = False,
        keep: Any = None,
    ) -> Batch:
        """Start decoding many streams, each to one or several pictures, the longest stream first.

        The pixels equal those of :func:`pcrshard.native.decode`.

        Args:
            table: (N, P) addresses and sizes of the P pieces of each image, some perhaps empty;
                see :func:`pcrshard.native.pieces.piece_table`.
            outs: For each of the V pictures of an image (N, H, W, 3) or (N, 3, H, W) uint8, one
                channel for ``gray``. The part of each image is C-contiguous.
            layout: Layout of ``outs``.
            color: ``rgb`` or ``gray``.
            orientations: EXIF orientation to undo, of all images or (N,) uint8 of each; 0 for the
                stream's own.
            draws: Parameters of crops and flips of the V pictures; empty for whole images.
            keys: Random key of each of the N images; see :func:`draw_key`.
            smoothing: As for :func:`pcrshard.native.decode`.
            keep: Buffers that the table points to, kept alive during decoding.

        Raises:
            ValueError: The shapes are inconsistent, or there are no ``outs`` or more than 64.
            RuntimeError: The pool is closed, or belongs to another process.
        """
        self._check_process()
        if not 1 <= len(outs) <= MAX_VIEWS:
            raise ValueError(f"expected 1 to {MAX_VIEWS} pictures of an image, got {len(outs)}")
        count, num_pieces = table.shape
        pieces = np.ascontiguousarray(table)
        each = np.empty(count, np.uint8)
        each[:] = orientations
        codes = np.empty(count, np.int32)
        sizes = np.zeros((count, 2), np.int32)
        held: dict[str, Any] = {
            "pieces": ffi.cast("const pcr_piece *", pieces.ctypes.data),
            "views": _views(outs, count, layout, color, smoothing),
            "codes": ffi.from_buffer("int32_t[]", codes),
            "sizes": ffi.from_buffer("int32_t[]", sizes),
            "orientations": ffi.from_buffer("uint8_t[]", each),
        }
        if count > 1:
            longest_first = np.argsort(pieces["size"].sum(axis=1))[::-1].astype(np.int32)
            held["order"] = ffi.from_buffer("int32_t[]", longest_first)
        boxes = np.zeros((count, len(outs), 5), np.int32)
        if draws:
            if (len(keys), len(draws)) != (count, len(outs)):
                raise ValueError(
                    f"expected {count} keys and {len(outs)} draws, got {len(keys)}, {len(draws)}"
                )
            held["boxes"] = ffi.from_buffer("int32_t[]", boxes)
            held["draws"] = _draws(draws)
            held["states"] = ffi.new("uint64_t[]", [key & _WORD for key in keys])
        batch = ffi.new(
            "pcr_batch *",
            {
                **held,
                "num_pieces": num_pieces,
                "num_images": count,
                "num_views": len(outs),
            },
        )
        self._under_way[batch] = (held, pieces, outs, keep)
        if lib.pcr_pool_add(self._handle, batch):
            del self._under_way[batch]
            raise ValueError("expected pictures, crops and an order that fit the images")
        return Batch(self, batch, codes, sizes, boxes)

    @property
    def is_own(self) -> bool:
        """Whether this process made the pool: not its parent."""
        return os.getpid() == self._pid

    def _check_process(self) -> None:
        if not self.is_own:
            raise RuntimeError(
                f"expected the process {self._pid}, which made the pool, got its child "
                f"{os.getpid()}: begin the iteration there"
            )
        if not self._stop.alive:
            raise RuntimeError("expected a pool of threads that is not closed")


def _views(
    outs: Sequence[Image],
    count: int,
    layout: PixelLayout,
    color: Color,
    smoothing: bool,
) -> Any:
    """Return the pictures to decode of each image, and their destinations."""
    views = ffi.new("pcr_view[]", len(outs))
    for view, out in zip(views, outs, strict=True):
        size = out.shape[1:3] if layout == "hwc" else out.shape[2:4]
        shape = image_shape(layout, size, color)
        is_safe = out.dtype == np.uint8 and out.flags.writeable and out[:1].flags.c_contiguous
        if out.shape != (count, *shape) or not is_safe:
            raise ValueError(
                f"expected {count} writable C-contiguous uint8 pictures of shape {shape}, "
                f"got {out.dtype} of {out.shape}"
            )
        request = make_request(layout, color, size, smoothing=smoothing)
        view.request = request[0]
        view.out = ffi.cast("uint8_t *", out.ctypes.data)
        view.out_size = math.prod(shape)
        view.step = out.strides[0]
    return views


@dataclass(eq=False)
class Batch:
    """A batch of images being decoded, from :meth:`Pool.decode`.

    Attributes:
        sizes: (N, 2) int32, height and width of each oriented image, 0 for images without a header;
            available after :meth:`wait`, like ``boxes``.
        boxes: (N, V, 5) int32, the crop (y, x, height, width) of each picture and whether it is
            flipped; four zeros stand for the whole image.
    """

    _pool: Pool
    _batch: Any
    _codes: NDArray[np.int32]
    sizes: NDArray[np.int32]
    boxes: Boxes
    _decoded: list[bool] | None = None

    def wait(self) -> list[bool]:
        """Wait, and tell which images were decoded; :func:`pcrshard.native.decode` explains.

        Handles signals while it waits.

        Raises:
            RuntimeError: The pool was closed, or belongs to another process.
        """
        pool = self._pool
        while self._decoded is None:
            pool._check_process()
            if lib.pcr_pool_wait(pool._handle, self._batch, _WAIT_MILLISECONDS):
                pool._under_way.pop(self._batch, None)
                self._decoded = (self._codes == 0).tolist()
        return self._decoded


def _stop(handle: Any, under_way: dict[Any, Any]) -> None:
    lib.pcr_pool_stop(handle)
    under_way.clear()  # no longer used by any thread
