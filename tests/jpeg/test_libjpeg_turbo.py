"""The libturbojpeg wrapper, with and without the library installed."""

import json
import random
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from support import hide_libturbojpeg

from pcrshard import ImageDecoder, decode_image
from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.errors import CorruptJpeg, FormatError
from pcrshard.jpeg import libjpeg_turbo
from pcrshard.testing import make_jpeg

# Decodes an image that only libjpeg supports, encodes it, and reports both outcomes.
PROGRAM = """
import json, pathlib, sys
import pcrshard
from pcrshard.jpeg.libjpeg_turbo import system
folder = pathlib.Path(sys.argv[1])
out = sys.argv[2]
said = {"system": system()}
for path in folder.iterdir():
    for smoothing in (False, True):
        pixels = pcrshard.decode_image(path.read_bytes(), smoothing=smoothing)
        said[f"{path.stem} {smoothing}"] = pixels.tolist()
try:
    pcrshard.encode(str(folder), out, workers=1)
except pcrshard.PCRError as error:
    said["encode"] = str(error)
options = pcrshard.EncodeOptions(on_error="keep")
said["kept"] = pcrshard.encode(str(folder), out, options, workers=1).num_samples
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def odd_folder(tmp_path_factory, jpegtran):
    """A folder of an arithmetic-coded, a CMYK and an ordinary JPEG."""
    folder = tmp_path_factory.mktemp("odd")
    plain = make_jpeg(1, 16, 16)
    (folder / "plain.jpg").write_bytes(plain)
    (folder / "arithmetic.jpg").write_bytes(jpegtran(plain, "-arithmetic"))
    (folder / "cmyk.jpg").write_bytes(make_jpeg(1, 16, 16, "CMYK"))
    return folder


def test_without_the_library_pillow_decodes(odd_folder, tmp_path):
    """Pillow has libjpeg-turbo inside, so that decoding is the same where it is installed."""
    command = [sys.executable, "-c", PROGRAM, str(odd_folder), str(tmp_path)]
    done = subprocess.run(hide_libturbojpeg(*command), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    said = json.loads(done.stdout)
    for path in odd_folder.iterdir():
        with Image.open(path) as picture:
            expected = np.asarray(picture.convert("RGB")).tolist()
        assert said[f"{path.stem} False"] == said[f"{path.stem} True"] == expected
    assert "not installed" in said["system"]["libturbojpeg"]
    assert "libturbojpeg" in said["encode"]
    assert "arithmetic" in said["encode"]
    assert said["kept"] == 3


def test_damage_is_told_as_libjpeg_tells_it():
    """What libjpeg would only warn of is an error."""
    jpeg = make_jpeg(2, 200, 200)
    with pytest.raises(CorruptJpeg, match="libjpeg-turbo"):
        libjpeg_turbo.make_huffman(jpeg[: len(jpeg) // 2])


def test_arithmetic_coding_is_read_alike_by_all(jpegtran):
    """Where libjpeg-turbo is installed, decoding takes what encoding takes, of any size, with the
    pixels of the same coefficients, and damage is an error of both, not wrong pixels.
    """
    plain = make_jpeg(3, 600, 700, quality=98)
    large = jpegtran(plain, "-arithmetic", "-copy", "all")
    assert len(large) > 1 << 16
    assert np.array_equal(decode_image(large), decode_image(plain))
    small = jpegtran(make_jpeg(3, 200, 200), "-arithmetic", "-copy", "all")
    rng = random.Random(1)

    def outcome(use, jpeg):
        try:
            use(jpeg)
        except FormatError:
            return "refused"
        return "read"

    for _ in range(60):
        damaged = bytearray(small)
        damaged[rng.randrange(len(small) // 2, len(small) - 2)] ^= 1 << rng.randrange(8)
        damaged = bytes(damaged)
        found = {outcome(use, damaged) for use in (encode_jpeg, decode_image, ImageDecoder(32))}
        assert len(found) == 1


@pytest.mark.parametrize("color", ["rgb", "srgb"])
def test_crops_of_arithmetic_coding_are_those_of_huffman_coding(jpegtran, color):
    """A picture is turned, cropped and resized alike, whatever the coding of its file."""
    exif = Image.Exif()
    exif[0x0112] = 6
    plain = make_jpeg(4, 300, 400, quality=95, exif=exif.tobytes())
    arithmetic = jpegtran(plain, "-arithmetic", "-copy", "all")
    decoder = ImageDecoder(96, "random", flip=0.5, color=color)
    for key in range(8):
        assert np.array_equal(decoder(arithmetic, key), decoder(plain, key))
