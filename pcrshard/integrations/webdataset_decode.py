"""A JPEG handler for WebDataset's ``.decode()``; does not require WebDataset."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import numpy as np

from ..format.names import is_jpeg_field
from ..format.shard_head import MAGIC
from ..jpeg.other_formats import to_picture
from ..jpeg.pixels import SMOOTHING, decode_image

_COLORS: dict[str, Literal["gray", "rgb"]] = {
    "l": "gray",
    "rgb": "rgb",
}


class JpegHandler:
    """A handler for ``.decode()`` that decodes JPEG fields with the native core.

    Other fields go on to WebDataset's own handlers.

    >>> JpegHandler("rgb8")
    JpegHandler('rgb8')

    Args:
        imagespec: As in WebDataset, except that gray is the JPEG's stored luma: ``l8``, ``rgb8``
            give (H, W) and (H, W, 3) uint8; ``l``, ``rgb`` float32 in 0..1; ``torchl8``,
            ``torchrgb8``, ``torchl``, ``torchrgb``, ``torch`` the same as tensors, (H, W) and (3,
            H, W); ``pill``, ``pilrgb``, ``pil`` Pillow images.
        upright: Apply the EXIF orientation, unlike WebDataset's own handlers.
        smoothing: Smooth between blocks of images at a lower scan, like WebDataset's own handlers.
    """

    def __init__(
        self, imagespec: str, *, upright: bool = True, smoothing: bool = SMOOTHING
    ) -> None:
        spec = f"{imagespec}rgb" if imagespec in ("torch", "pil") else imagespec
        name = spec.removeprefix("torch").removeprefix("pil").removesuffix("8")
        if name not in _COLORS:
            raise ValueError(
                f"expected an imagespec like 'rgb8', 'torchrgb', 'pil', 'l8', got {imagespec!r}"
            )
        self.imagespec = imagespec
        self.upright = upright
        self.smoothing = smoothing
        self.color = _COLORS[name]
        self.torch = spec.startswith("torch")
        self.pil = spec.startswith("pil")
        self.floating = not spec.endswith("8")

    def __repr__(self) -> str:
        options = "" if self.upright else ", upright=False"
        options += f", smoothing={self.smoothing}" if self.smoothing != SMOOTHING else ""
        return f"JpegHandler({self.imagespec!r}{options})"

    def __call__(self, key: str, data: bytes) -> Any:
        """Decode ``data`` if the field ``key`` is a JPEG, else return ``None``."""
        if not is_jpeg_field(key.lower()):
            warn_of_shard(key, data)
            return None
        layout: Literal["chw", "hwc"] = "chw" if self.torch else "hwc"
        image = decode_image(
            data,
            color=self.color,
            layout=layout,
            upright=self.upright,
            smoothing=self.smoothing,
        )
        if self.pil:
            return to_picture(image)
        if self.color == "gray":
            image = image.squeeze(0 if self.torch else 2)
        if not self.torch:
            return np.divide(image, np.float32(255), dtype=np.float32) if self.floating else image
        import torch

        tensor = torch.from_numpy(image)
        return tensor.to(torch.float32).div_(255) if self.floating else tensor


def warn_of_shard(field: str, value: Any) -> bool:
    """Warn if a field is the index of a PCR shard that was read as an ordinary tar.

    Returns:
        False: the field is not an image.
    """
    if field.rpartition(".")[2] == "pcr" and bytes(value[: len(MAGIC)]) == MAGIC:
        warnings.warn(
            "a PCR shard is read as a plain tar, whose samples are whole shards: write "
            "WebDataset(urls).pcr_scan(5)",
            stacklevel=2,
        )
    return False
