"""A JPEG handler for WebDataset's ``.decode()``; it needs no WebDataset."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from ..format.names import is_jpeg_field
from ..jpeg.pixels import SMOOTHING, decode_image

_COLORS: dict[str, Literal["gray", "rgb"]] = {
    "l": "gray",
    "rgb": "rgb",
}


class JpegHandler:
    """A handler for ``.decode()``: JPEG fields through the native core or libjpeg-turbo.

    Other fields go on to WebDataset's own handlers.

    >>> JpegHandler("rgb8")
    JpegHandler('rgb8')

    Args:
        imagespec: As in WebDataset, but that gray is the JPEG's own luma: ``l8``, ``rgb8`` give
            (H, W) and (H, W, 3) uint8; ``l``, ``rgb`` float32 in 0..1; ``torchl8``, ``torchrgb8``,
            ``torchl``, ``torchrgb``, ``torch`` the same as tensors, (H, W) and (3, H, W).
        smoothing: Smooth between blocks of unfinished images, as WebDataset's own handlers do.
    """

    def __init__(
        self, imagespec: str, *, upright: bool = True, smoothing: bool = SMOOTHING
    ) -> None:
        spec = "torchrgb" if imagespec == "torch" else imagespec
        name = spec.removeprefix("torch").removesuffix("8")
        if name not in _COLORS:
            raise ValueError(
                f"expected an imagespec like 'rgb8', 'torchrgb', 'l8', got {imagespec!r}"
            )
        self.imagespec = imagespec
        self.upright = upright
        self.smoothing = smoothing
        self.color = _COLORS[name]
        self.torch = spec.startswith("torch")
        self.floating = not spec.endswith("8")

    def __repr__(self) -> str:
        option = f", smoothing={self.smoothing}" if self.smoothing != SMOOTHING else ""
        return f"JpegHandler({self.imagespec!r}{option})"

    def __call__(self, key: str, data: bytes) -> Any:
        """Decode ``data`` if the field ``key`` is a JPEG, else return ``None``."""
        if not is_jpeg_field(key.lower()):
            return None
        layout: Literal["chw", "hwc"] = "chw" if self.torch else "hwc"
        image = decode_image(
            data,
            color=self.color,
            layout=layout,
            upright=self.upright,
            smoothing=self.smoothing,
        )
        if self.color == "gray":
            image = image.squeeze(0 if self.torch else 2)
        if not self.torch:
            return np.divide(image, np.float32(255), dtype=np.float32) if self.floating else image
        import torch

        tensor = torch.from_numpy(image)
        return tensor.to(torch.float32).div_(255) if self.floating else tensor
