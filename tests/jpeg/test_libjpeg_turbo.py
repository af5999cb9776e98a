"""The libturbojpeg wrapper, with and without the library installed."""

import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from support import hide_libturbojpeg

from pcrshard import EncodeOptions, encode
from pcrshard.errors import CorruptJpeg
from pcrshard.jpeg import libjpeg_turbo
from pcrshard.testing import make_jpeg

# Decodes an image that only libjpeg supports, encodes it, and reports both outcomes.
PROGRAM = """
import json, pathlib, sys
sys.modules.update(dict.fromkeys(sys.argv[2].split(","), None))  # as if it were not installed
import pcrshard
from pcrshard.jpeg.libjpeg_turbo import system
folder = pathlib.Path(sys.argv[1])
out = sys.argv[3]
said = {"system": system()}
for name in ("arithmetic", "cmyk", "plain"):
    jpeg = (folder / f"{name}.jpg").read_bytes()
    for smoothing in (False, True):
        try:
            said[f"{name} {smoothing}"] = pcrshard.decode_image(jpeg, smoothing=smoothing).tolist()
        except pcrshard.PCRError as error:
            said[f"{name} {smoothing}"] = str(error)
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


def run_without(odd_folder, tmp_path, *packages):
    """What the program says on a machine without libturbojpeg and these packages."""
    missing = ",".join(packages) or "nothing"
    command = [sys.executable, "-c", PROGRAM, str(odd_folder), missing, str(tmp_path)]
    done = subprocess.run(hide_libturbojpeg(*command), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def pixels_of(path):
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB")).tolist()


def test_without_the_library_pillow_decodes(odd_folder, tmp_path):
    """Pillow has libjpeg-turbo inside, so that decoding is the same where it is installed."""
    said = run_without(odd_folder, tmp_path)
    for name in ("arithmetic", "cmyk", "plain"):
        for smoothing in (False, True):
            assert said[f"{name} {smoothing}"] == pixels_of(odd_folder / f"{name}.jpg")
    assert "not installed" in said["system"]["libturbojpeg"]
    assert "libturbojpeg" in said["encode"]
    assert "arithmetic" in said["encode"]
    assert said["kept"] == 3


def test_without_both_what_is_missing_is_named(odd_folder, tmp_path):
    """Only what cannot be done stops, with the name of what would do it."""
    said = run_without(odd_folder, tmp_path, "PIL")
    assert said["plain False"] == pixels_of(odd_folder / "plain.jpg")
    assert said["cmyk False"] == pixels_of(odd_folder / "cmyk.jpg")
    for name in ("arithmetic False", "arithmetic True"):
        assert "an arithmetic-coded JPEG needs Pillow" in said[name], name
        assert "or libturbojpeg" in said[name], name
    assert said["kept"] == 3


def test_verify_compares_without_both(synthetic_folder, tmp_path):
    """A dataset is compared with its source on a machine that has nothing but the wheel."""
    encode(str(synthetic_folder), str(tmp_path), EncodeOptions(), workers=1)
    program = "import sys; sys.modules['PIL'] = None; import pcrshard.cli.main as m; exit(m.main())"
    command = [sys.executable, "-c", program, "verify", str(tmp_path)]
    command += ["--against", str(synthetic_folder)]
    done = subprocess.run(hide_libturbojpeg(*command), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_damage_is_told_as_libjpeg_tells_it():
    """What libjpeg would only warn of is an error."""
    jpeg = make_jpeg(2, 200, 200)
    with pytest.raises(CorruptJpeg, match="libjpeg-turbo"):
        libjpeg_turbo.make_progressive(jpeg[: len(jpeg) // 2])


def test_the_transform_keeps_the_pixels(djpeg):
    """It makes of an arithmetic-coded JPEG one that the core reads."""
    jpeg = make_jpeg(2)
    assert djpeg(libjpeg_turbo.make_progressive(jpeg)) == djpeg(jpeg)
    assert "turbojpeg" in libjpeg_turbo.system()["libturbojpeg"]
