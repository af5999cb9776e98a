"""Several pictures of one stream: each as if it had been decoded alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pcrshard import native
from pcrshard.native.pictures import decode_views
from pcrshard.testing import make_jpeg

BACKENDS = ("auto", "portable")
Progressive = list[tuple[str, bytes, list[bytes]]]


def random_views(
    rng: np.random.Generator, height: int, width: int
) -> tuple[list[np.ndarray], list[native.Box | None]]:
    """Six crops of an image, of many scales, and arrays for them."""
    outs = [np.empty((3, *rng.integers(1, 80, 2)), np.uint8) for _ in range(6)]
    crops: list[native.Box | None] = [None]
    for _ in range(5):
        y, x = int(rng.integers(0, height)), int(rng.integers(0, width))
        crops.append(
            (y, x, int(rng.integers(1, height - y + 1)), int(rng.integers(1, width - x + 1)))
        )
    return outs, crops


@pytest.mark.parametrize("smoothing", [False, True])
def test_views_are_as_if_decoded_alone(progressive: Progressive, smoothing: bool) -> None:
    """Views of any scan, and of baseline images, have the pixels of single decodes."""
    rng = np.random.default_rng(2)
    for name, source, streams in progressive[::9]:
        header = native.read_header([source])
        for stream in (source, streams[0], streams[4], streams[-1]):
            for backend in BACKENDS:
                outs, crops = random_views(rng, header.height, header.width)
                how = {"layout": "chw", "smoothing": smoothing, "backend": backend}
                decode_views([stream], outs, crops, **how)  # type: ignore[arg-type]
                for out, crop in zip(outs, crops, strict=True):
                    alone = native.decode([stream], crop=crop, size=out.shape[1:], **how)  # type: ignore[arg-type]
                    assert np.array_equal(out, alone), (name, crop, out.shape)


def test_odd_files_have_views(odd_files: list[Path]) -> None:
    """Whatever can be decoded has views, and what cannot is refused as it is alone."""
    decoded = 0
    for path in odd_files:
        jpeg = path.read_bytes()
        outs = [np.empty((24, 32, 3), np.uint8), np.empty((9, 7, 3), np.uint8)]
        try:
            expected = [native.decode([jpeg], size=out.shape[:2]) for out in outs]
        except native.NativeError as error:
            with pytest.raises(native.NativeError) as refusal:
                decode_views([jpeg], outs, [None, None])
            assert str(refusal.value) == str(error), path.name
            continue
        decode_views([jpeg], outs, [None, None])
        assert all(map(np.array_equal, outs, expected)), path.name
        decoded += 1
    assert decoded > 100


def test_what_follows_a_baseline_scan_is_not_looked_at() -> None:
    """Bytes after the last row are as little of a hindrance to views as to a single decode."""
    jpeg = make_jpeg(1, 40, 50)[:-2] + b"\xff\xfe\x00\x09"
    outs = [np.empty((24, 32, 3), np.uint8), np.empty((9, 7, 3), np.uint8)]
    decode_views([jpeg], outs, [None, None])
    for out in outs:
        assert np.array_equal(out, native.decode([jpeg], size=out.shape[:2]))


def test_what_does_not_fit_is_refused() -> None:
    """A crop outside of the image and an array of another type are refused before anything is
    decoded.
    """
    jpeg = make_jpeg(1, 40, 50)
    out = np.zeros((8, 8, 3), np.uint8)
    with pytest.raises(ValueError, match="crop"):
        decode_views([jpeg], [out, out], [None, (0, 0, 41, 5)])
    with pytest.raises(ValueError, match="uint8"):
        decode_views([jpeg], [out.astype(np.int16)], [None])
    with pytest.raises(ValueError, match="at least one view"):
        decode_views([jpeg], [], [])
    assert not out.any()
