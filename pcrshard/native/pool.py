"""Door to the threads of the native core: batches of images decoded without the GIL.

A pool belongs to the process that made it: a forked child has none of its threads.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from . import Backend, Color, Image, Layout, Table, _address, _make_request, _shape, _target

try:
    from pcrshard.native._core import ffi, lib
except ImportError:  # built without a compiler
    ffi = lib = None

Boxes = NDArray[np.int32]
Interval = tuple[float, float]

# A library built before this module has no pool.
available: bool = lib is not None and hasattr(lib, "pcr_pool_new")

_CROPS = {
    None: 0,
    "center": 1,
    "random": 2,
}
# Pictures of an image: PCR_MAX_VIEWS of pcr.h.
MAX_VIEWS = 64
# How often a thread that waits looks for signals.
_WAIT_MILLISECONDS = 100


class Draw(NamedTuple):
    """How crops and flips are drawn; see :class:`pcrshard.ImageDecoder`."""

    crop: str | None
    scale: Interval
    ratio: Interval
    flip: float


def draw_boxes(
    state: int,
    ids: NDArray[np.int64],
    sizes: NDArray[np.int32],
    views: Sequence[Draw],
) -> Boxes:
    """Draw the crops and flips of many images, each from a stream of its own.

    They are those of :mod:`pcrshard.jpeg.crops`, bit for bit.

    Args:
        state: That of ``Draws(seed, epoch)``.
        ids: (N,) the last part of each image's key.
        sizes: (N, 2) height and width of each image.
        views: What each image draws, one after the other.

    Returns:
        (N, views, 5) int32: y, x, height, width, flip; four zeros stand for the whole image.
    """
    count = len(ids)
    if sizes.shape != (count, 2):
        raise ValueError(f"expected {count} sizes of height and width, got {sizes.shape}")
    boxes = np.empty((count, len(views), 5), np.int32)
    how = [(_CROPS[view.crop], *view[1:]) for view in views]
    numbers = ffi.from_buffer("int64_t[]", np.ascontiguousarray(ids, np.int64))
    dims = ffi.from_buffer("int32_t[]", np.ascontiguousarray(sizes, np.int32))
    target = ffi.from_buffer("int32_t[]", boxes)
    lib.pcr_draw_boxes(state, numbers, dims, count, ffi.new("pcr_draw[]", how), len(how), target)
    return boxes


class Pool:
    """Threads that decode the images of batches, one image at a time, the oldest batch first.

    They hold no GIL, take no signals, and end with :meth:`close`, with the object, or with the
    interpreter.

    Args:
        threads: How many; with 0, :meth:`Batch.wait` decodes.
        backend: ``portable`` forces the plain C code.
    """

    def __init__(self, threads: int, backend: Backend = "auto") -> None:
        if threads < 0:
            raise ValueError(f"expected a number of threads of at least 0, got {threads}")
        handle = lib.pcr_pool_new(threads, backend == "portable")
        if handle == ffi.NULL:
            raise MemoryError(f"cannot start {threads} threads")
        self.threads = threads
        self._pid = os.getpid()
        self._handle = ffi.gc(handle, lib.pcr_pool_free)
        # What the threads read and write, until it was waited for.
        self._under_way: dict[Any, Any] = {}
        self._stop = weakref.finalize(self, _stop, self._handle, self._under_way)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads; batches that are not decoded yet stay so."""
        self._stop()

    def decode(
        self,
        table: Table,
        outs: Image | Sequence[Image],
        *,
        boxes: Boxes | None = None,
        layout: Layout = "hwc",
        color: Color = "rgb",
        smoothing: bool = False,
        keep: Any = None,
    ) -> Batch:
        """Begin to decode many streams, each to one picture or several.

        The pixels are those of :func:`pcrshard.native.decode`.

        Args:
            table: (N, pieces) of :func:`pcrshard.native.image_table`.
            outs: (N, H, W, 3) or (N, 3, H, W) uint8, one channel for ``gray``; of each of V
                pictures. What is of one image is C-contiguous.
            boxes: (N, V, 5) int32, of :func:`draw_boxes`; (N, 5) will do for one picture.
            layout: Of ``outs``.
            color: ``rgb`` or ``gray``.
            smoothing: As for :func:`pcrshard.native.decode`.
            keep: The buffers that the table points to: they must live while they are decoded.

        Raises:
            ValueError: The shapes do not fit together.
        """
        self._check_process()
        count, num_pieces = table.shape
        arrays = [outs] if isinstance(outs, np.ndarray) else list(outs)
        views = _views(arrays, count, layout, color, smoothing)
        codes = np.empty(count, np.int32)
        pieces = np.ascontiguousarray(table)
        batch = ffi.new(
            "pcr_batch *",
            {
                "pieces": _address(pieces),
                "num_pieces": num_pieces,
                "num_images": count,
                "views": views,
                "num_views": len(arrays),
                "boxes": _checked(boxes, count, len(arrays)),
                "codes": ffi.from_buffer("int32_t[]", codes),
            },
        )
        self._under_way[batch] = (codes, pieces, views, boxes, arrays, keep)
        lib.pcr_pool_add(self._handle, batch)
        return Batch(self, batch, codes)

    def wait(self, batch: Any) -> None:
        """Wait until a batch is decoded; signals are handled meanwhile.

        Raises:
            RuntimeError: The pool was closed, or belongs to another process.
        """
        self._check_process()
        while not lib.pcr_pool_wait(self._handle, batch, _WAIT_MILLISECONDS):
            self._check_process()
        self._under_way.pop(batch, None)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"expected the process {self._pid}, which made the threads, got its child "
                f"{os.getpid()}: begin the iteration there"
            )
        if not self._stop.alive:
            raise RuntimeError("expected a pool of threads that is not closed")


def _views(
    outs: Sequence[Image],
    count: int,
    layout: Layout,
    color: Color,
    smoothing: bool,
) -> Any:
    """What is decoded of each image, and where to."""
    if not 1 <= len(outs) <= MAX_VIEWS:
        raise ValueError(f"expected 1 to {MAX_VIEWS} pictures of each image, got {len(outs)}")
    views = ffi.new("pcr_view[]", len(outs))
    for view, out in zip(views, outs, strict=True):
        size = out.shape[1:3] if layout == "hwc" else out.shape[2:4]
        shape = _shape(layout, size, color)
        if out.shape != (count, *shape):
            raise ValueError(f"expected {count} pictures of shape {shape}, got {out.shape}")
        if count:
            _target(out[0], shape)
        view.request = _make_request(layout, color, size, smoothing=smoothing)[0]
        view.out = ffi.cast("uint8_t *", out.ctypes.data)
        view.out_size = math.prod(shape)
        view.step = out.strides[0]
    return views


def _checked(
    boxes: Boxes | None,
    count: int,
    num_views: int,
) -> Any:
    if boxes is None:
        return ffi.NULL
    shapes = [(count, num_views, 5), *([(count, 5)] if num_views == 1 else [])]
    if boxes.shape not in shapes or boxes.dtype != np.int32 or not boxes.flags.c_contiguous:
        raise ValueError(
            f"expected {count * num_views} boxes of 5 int32, one after the other, "
            f"got {boxes.dtype} of {boxes.shape}"
        )
    return ffi.from_buffer("int32_t[]", boxes)


class Batch:
    """Images that are being decoded; from :meth:`Pool.decode`."""

    def __init__(
        self,
        pool: Pool,
        batch: Any,
        codes: NDArray[np.int32],
    ) -> None:
        self._pool = pool
        self._batch = batch
        self._codes = codes

    def wait(self) -> NDArray[np.bool_]:
        """(N,) bool: which were decoded; :func:`pcrshard.native.decode` says what is wrong."""
        self._pool.wait(self._batch)
        return ~self._codes.astype(bool)


def _stop(handle: Any, under_way: dict[Any, Any]) -> None:
    lib.pcr_pool_stop(handle)
    under_way.clear()  # no thread uses it any more
