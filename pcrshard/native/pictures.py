"""Door to several pictures of one JPEG: its coefficients are decoded once."""

from __future__ import annotations

from collections.abc import Sequence

from . import Backend, Box, Color, Image, Layout, Pieces, _make_request, _shape, _Stream, _target

try:
    from pcrshard.native._core import ffi, lib
except ImportError:  # built without a compiler
    ffi = lib = None

# A library built before this module has single pictures only.
available: bool = lib is not None and hasattr(lib, "pcr_decode_views")


def decode_views(
    pieces: Pieces,
    outs: Sequence[Image],
    crops: Sequence[Box | None],
    *,
    layout: Layout = "hwc",
    color: Color = "rgb",
    smoothing: bool = False,
    backend: Backend = "auto",
) -> None:
    """Decode several crops of a JPEG, each to a size: :func:`pcrshard.native.decode` of each.

    Args:
        pieces: Bytes-like objects that hold the stream, in order; no EOI is needed.
        outs: Where each goes: (H, W, 3) or (3, H, W) uint8, C-contiguous; one channel for ``gray``.
        crops: (y, x, height, width) of each; ``None`` for the whole image.
        layout: Of ``outs``.
        color: As for :func:`pcrshard.native.decode`.
        smoothing: As for :func:`pcrshard.native.decode`.
        backend: ``portable`` forces the plain C code.

    Raises:
        NativeError: The stream is damaged, or not for this core.
        ValueError: A crop or an array does not fit.
    """
    views = ffi.new("pcr_view[]", len(outs))
    for view, out, crop in zip(views, outs, crops, strict=True):
        size = out.shape[:2] if layout == "hwc" else out.shape[1:3]
        request = _make_request(layout, color, size, crop, smoothing=smoothing)
        view.request = request[0]
        view.out = _target(out, _shape(layout, size, color))
        view.out_size = out.size
    _Stream(pieces, backend).call(lib.pcr_decode_views, views, len(outs))
