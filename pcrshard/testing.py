"""Helpers for tests of this package and of code that uses it: synthetic JPEGs, a file system that counts."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from fsspec.implementations.local import LocalFileSystem

from .errors import MissingDependency
from .pixels import Pixels


def make_pixels(seed: int, height: int, width: int, channels: int = 3) -> Pixels:
    """A smooth random picture, (height, width, channels) uint8, the same for the same arguments."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float64) / max(height, width)
    picture = np.zeros((height, width, channels))
    for _ in range(6):
        fy, fx, phase = rng.uniform(0, 25, 3)
        picture += np.sin(fy * y + fx * x + phase)[..., None] * rng.uniform(-30, 30, channels)
    picture += rng.normal(0, 6, picture.shape)
    return np.clip(picture + 128, 0, 255).astype(np.uint8)


def make_jpeg(seed: int = 0, height: int = 48, width: int = 64, mode: str = "RGB", **options: Any) -> bytes:
    """A synthetic JPEG.

    Args:
        seed: Same seed, same picture.
        height: In pixels.
        width: In pixels.
        mode: ``L``, ``RGB`` or ``CMYK``, as in Pillow.
        options: Pillow's JPEG options: ``quality``, ``subsampling``, ``progressive``, ``restart_marker_blocks``, ``exif``, ...
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependency("Pillow is not installed: pip install 'pcrshard[train]'") from error
    channels = {"L": 1, "RGB": 3, "CMYK": 4}[mode]
    pixels = make_pixels(seed, height, width, channels)
    out = io.BytesIO()
    Image.fromarray(pixels[..., 0] if channels == 1 else pixels, mode).save(out, "JPEG", **options)
    return out.getvalue()


class CountingFS(LocalFileSystem):  # type: ignore[misc]  # fsspec is untyped
    """Local files under ``counting://``, noting every range that is asked for.

    Register with ``fsspec.register_implementation("counting", CountingFS)``.

    Attributes:
        requests: (path, start, stop) of each range, shared by all instances; a stop of ``None`` is the end of the file.
    """

    protocol = "counting"
    requests: list[tuple[str, int | None, int | None]] = []  # noqa: RUF012  # shared on purpose

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("counting://")))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """Read a range and note it."""
        self.requests.append((path, start, end))
        return bytes(super().cat_file(path, start, end, **kwargs))
