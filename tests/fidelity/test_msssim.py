"""MS-SSIM against its definition, and against a library that many use."""

import numpy as np
import pytest
from imported_later import Later

from pcrshard.fidelity.msssim import WEIGHTS, Reference, count_scales
from pcrshard.testing import make_pixels

pytest.importorskip("cv2", reason="OPENCV IS NOT INSTALLED: pip install '.[fidelity]'")
# scikit-learn, for the demonstration, brings SciPy.
ndimage = Later("scipy.ndimage")


def msssim(pixels, reference):
    return Reference(reference).compare(pixels)


def oracle(a, b, weights):
    """MS-SSIM by its definition (Wang et al. 2003) in float64, and nothing of torch in it."""

    def blur(x):
        return ndimage.gaussian_filter(x, 1.5, radius=5, axes=(0, 1))[5:-5, 5:-5]

    a, b, result = a.astype(np.float64), b.astype(np.float64), 1.0
    for i, weight in enumerate(weights):
        ma, mb = blur(a), blur(b)
        value = (2 * (blur(a * b) - ma * mb) + 58.5225) / (
            blur(a * a) - ma * ma + blur(b * b) - mb * mb + 58.5225
        )
        if i == len(weights) - 1:
            value *= (2 * ma * mb + 6.5025) / (ma * ma + mb * mb + 6.5025)
        result *= max(value.mean(), 0) ** (weight / sum(weights))
        a, b = (x[: x.shape[0] // 2 * 2, : x.shape[1] // 2 * 2] for x in (a, b))
        a, b = (x.reshape(x.shape[0] // 2, 2, x.shape[1] // 2, 2, -1).mean((1, 3)) for x in (a, b))
    return result


@pytest.mark.parametrize(
    ("height", "width"),
    [(180, 333), (375, 500), (176, 176), (175, 300), (99, 120), (44, 50), (22, 99), (11, 40)],
)
@pytest.mark.parametrize("noise", [2, 12, 60])
def test_msssim_is_that_of_a_second_implementation(height, width, noise):
    """Also on odd sides, where some libraries pad with zeros, and on small images."""
    reference = make_pixels(1, height, width)
    damage = np.random.default_rng(noise).normal(0, noise, reference.shape)
    pixels = np.clip(reference + damage, 0, 255).astype(np.uint8)
    weights = WEIGHTS[: count_scales(height, width)]
    assert msssim(pixels, reference) == pytest.approx(oracle(pixels, reference, weights), abs=2e-5)


def test_msssim_of_equal_images_is_one():
    """Identity, and symmetry."""
    a, b = make_pixels(1, 200, 200), make_pixels(2, 200, 200)
    reference = Reference(a)
    assert reference.compare(b) == reference.compare(b), "a comparison changes nothing of it"
    assert reference.compare(a.copy()) == 1.0
    assert msssim(a, b) == pytest.approx(msssim(b, a), abs=1e-6)
    assert 0 <= msssim(a, b) < 0.9
    assert msssim(a, 255 - a) == 0, "a negative correlation is zero, not NaN"


def test_large_images_are_compared_in_the_middle():
    """Of a panorama 2048 pixels each way, so that memory stays bounded."""
    a = np.tile(make_pixels(1, 200, 400), (1, 6, 1))
    b = a // 2
    middle = slice(176, 176 + 2048)
    assert msssim(a, b) == msssim(a[:, middle], b[:, middle])
    assert msssim(a, b) != msssim(a[:, :300], b[:, :300])
