"""Helpers for tests and benchmarks of this package and of code that uses it.

Synthetic JPEGs, and file systems that count requests or limit bandwidth.
"""

from __future__ import annotations

import fcntl
import io
import os
import struct
import time
from typing import Any

import numpy as np
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from .jpeg.other_formats import Pixels


def make_pixels(
    seed: int,
    height: int,
    width: int,
    channels: int = 3,
) -> Pixels:
    """Return a smooth random picture, (height, width, channels) uint8; deterministic."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float64) / max(height, width)
    picture = np.zeros((height, width, channels))
    for _ in range(6):
        fy, fx, phase = rng.uniform(0, 25, 3)
        picture += np.sin(fy * y + fx * x + phase)[..., None] * rng.uniform(-30, 30, channels)
    picture += rng.normal(0, 6, picture.shape)
    return np.clip(picture + 128, 0, 255).astype(np.uint8)


def make_jpeg(
    seed: int = 0,
    height: int = 48,
    width: int = 64,
    mode: str = "RGB",
    **options: Any,
) -> bytes:
    """Return a synthetic JPEG.

    Args:
        seed: Seed of the picture.
        height: In pixels.
        width: In pixels.
        mode: ``L``, ``RGB`` or ``CMYK``, as in Pillow.
        options: Pillow's JPEG options: ``quality``, ``subsampling``, ``progressive``,
            ``restart_marker_blocks``, ``exif``, ...
    """
    from PIL import Image  # not needed by the file systems below

    channels = {"L": 1, "RGB": 3, "CMYK": 4}[mode]
    pixels = make_pixels(seed, height, width, channels)
    out = io.BytesIO()
    Image.fromarray(pixels[..., 0] if channels == 1 else pixels, mode).save(out, "JPEG", **options)
    return out.getvalue()


class _SchemeFS(LocalFileSystem):  # type: ignore[misc]  # fsspec is untyped
    """Local files under the scheme of a subclass."""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(str(path).removeprefix(f"{cls.protocol}://")))


class CountingFS(_SchemeFS):
    """Local files under ``counting://``, recording every requested range.

    Register with ``fsspec.register_implementation("counting", CountingFS)``.

    Attributes:
        requests: (path, start, stop) of each range, shared by all instances; a stop of ``None``
            means the end of the file.
    """

    protocol = "counting"
    requests: list[tuple[str, int | None, int | None]] = []  # noqa: RUF012  # shared on purpose

    def cat_file(
        self,
        path: str,
        start: int | None = None,
        end: int | None = None,
        **kwargs: Any,
    ) -> bytes:
        """Read a range and record it."""
        self.requests.append((path, start, end))
        return bytes(super().cat_file(path, start, end, **kwargs))


class TokenBucket:
    """A bandwidth limit shared by all processes of a node, as in section 6.6 of the VLDB paper.

    The bucket gains ``rate`` tokens per second; each byte takes one.

    Args:
        rate: Bytes per second.
        state: File that stores the level; processes that use the same file share the bucket.
        burst: Bytes that may pass at once after a pause; by default a tenth of a second's worth.
    """

    _STATE = struct.Struct("<dd")

    def __init__(
        self,
        rate: float,
        state: str,
        burst: float | None = None,
    ) -> None:
        if not rate > 0:
            raise ValueError(f"expected a rate above 0 bytes per second, got {rate!r}")
        self.rate = float(rate)
        self.state = state
        self.burst = rate / 10 if burst is None else burst

    def take(self, count: int) -> float:
        """Take tokens, sleeping until they are available; return the seconds slept."""
        handle = os.open(self.state, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            now = time.monotonic()
            raw = os.pread(handle, self._STATE.size, 0)
            level, then = self._STATE.unpack(raw) if raw else (self.burst, now)
            # The level may fall below zero: a caller that takes more than is available waits, and
            # so does the next one.
            level = min(self.burst, level + (now - then) * self.rate) - count
            os.pwrite(handle, self._STATE.pack(level, now), 0)
        finally:
            os.close(handle)
        pause: float = max(0.0, -level / self.rate)
        time.sleep(pause)
        return pause


class ThrottledFS(_SchemeFS):
    """Local files under ``throttled://``, read as fast as a :class:`TokenBucket` allows.

    Register with ``fsspec.register_implementation("throttled", ThrottledFS)``, and read with the
    storage options ``rate`` and ``state``.

    Args:
        rate: Bytes per second.
        state: The bucket's file.
    """

    protocol = "throttled"
    _CHUNK_BYTES = 1 << 18
    _open = AbstractFileSystem._open  # which reads with cat_file

    def __init__(self, rate: float, state: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.bucket = TokenBucket(rate, state)

    def cat_file(
        self,
        path: str,
        start: int | None = None,
        end: int | None = None,
        **kwargs: Any,
    ) -> bytes:
        """Read a range as fast as the bucket allows."""
        begin, stop = start or 0, self.size(path) if end is None else end
        parts = []
        with open(self._strip_protocol(path), "rb") as file:
            file.seek(begin)
            for first in range(begin, stop, self._CHUNK_BYTES):
                parts.append(file.read(min(self._CHUNK_BYTES, stop - first)))
                self.bucket.take(len(parts[-1]))
        return b"".join(parts)
