"""Block smoothing against libjpeg-turbo's own, bit for bit: Pillow never switches it off."""

import contextlib
import io

import numpy as np
import pytest
from oracle import scan_ends, standard_scans
from PIL import Image, features

from pcrshard import native
from pcrshard.errors import FormatError

EOI = b"\xff\xd9"
BACKENDS = ("auto", "portable")


@pytest.fixture(autouse=True)
def _new_enough():
    """Before 3.0.1 libjpeg-turbo took wrong neighbors at the edges."""
    version = features.version("libjpeg_turbo") or "0"
    if tuple(map(int, version.split(".")[:3])) < (3, 0, 1):
        pytest.skip(f"Pillow has libjpeg-turbo {version}, not 3.0.1 or later")


def pillow(jpeg, mode="RGB", scale=1):
    """What Pillow shows of a stream that may end early, at 1/scale of its size."""
    image = Image.open(io.BytesIO(jpeg + EOI))
    if mode == "L" or scale > 1:
        image.draft(mode, (image.width // scale, image.height // scale))
    if image.mode == "CMYK":
        image = image.convert("RGB")
    pixels = np.asarray(image)
    gray = mode == "RGB" and pixels.ndim == 2
    return np.repeat(pixels[..., None], 3, 2) if gray else pixels


def prefixes(jpeg):
    """The stream in the standard script, cut after every scan."""
    whole = native.rescan(jpeg, standard_scans(jpeg)).jpeg
    return [whole[:end] for end in scan_ends(whole)]


def smooth(stream, **options):
    """The pixels, which both backends agree on."""
    fast, plain = (
        native.decode([stream], smoothing=True, backend=backend, **options) for backend in BACKENDS
    )
    assert np.array_equal(fast, plain)
    return fast


def test_every_scan_of_photographs_matches_libjpeg(progressive):
    """Whoever trains on smoothed images sees what every viewer shows of them."""
    for name, _, streams in progressive[::4]:
        for scan, stream in enumerate(streams, 1):
            expected = pillow(stream)
            assert np.array_equal(smooth(stream), expected), (name, scan)
            if scan == 1:
                assert not np.array_equal(native.decode([stream]), expected), name


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0", "gray"])
def test_small_images_match_libjpeg(subsampling):
    """Images of few blocks, where neighbors are missing, are smoothed as libjpeg does it."""
    rng = np.random.default_rng(0)
    for height, width in ((1, 1), (8, 9), (16, 17), (17, 33), (24, 8), (33, 40), (49, 7), (65, 60)):
        pixels = rng.integers(0, 256, (height, width, 3)).cumsum(0).astype(np.uint8)
        image = Image.fromarray(pixels).convert("L" if subsampling == "gray" else "RGB")
        file = io.BytesIO()
        sampled = {} if subsampling == "gray" else {"subsampling": subsampling}
        image.save(file, "JPEG", quality=60, **sampled)
        for scan, stream in enumerate(prefixes(file.getvalue()), 1):
            assert np.array_equal(smooth(stream), pillow(stream)), (height, width, scan)


def test_gray_and_scaled_images_match_libjpeg(progressive):
    """Smoothing happens before the transform, whatever its size, and to the luma alone, too."""
    for name, _, streams in progressive[2::14]:
        for stream in streams[:5:2]:
            luma = smooth(stream, color="gray")[..., 0]
            assert np.array_equal(luma, pillow(stream, "L")), name
            for scale in (2, 4, 8):
                got = smooth(stream, scale=scale)
                assert np.array_equal(got, pillow(stream, scale=scale)), (name, scale)


def test_odd_files_match_libjpeg(odd_files):
    """Whatever of the odd files is decoded has libjpeg's pixels."""
    compared = 0
    for path in odd_files:
        jpeg = path.read_bytes()
        if b"\xff\xc2" in jpeg:  # progressive, perhaps
            with contextlib.suppress(FormatError):
                assert np.array_equal(smooth(jpeg), pillow(jpeg)), path.name
                compared += 1
    assert compared > 20
