"""EXIF orientation is put into images at scans that do not have EXIF."""

import io

from PIL import Image

from pcrshard import Shard, ShardFormat
from pcrshard.encoding.shard_writer import encode_sample, write_shard
from pcrshard.integrations.huggingface_orientation import orient, orientations_of
from pcrshard.testing import make_jpeg

EXIF = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"


def test_an_image_lies_as_its_camera_said(tmp_path):
    """Pillow finds the orientation of the source at scan 1, and none where there was none."""
    path = str(tmp_path / "a-000000.tar")
    samples = [
        {"__key__": "turned", "jpg": make_jpeg(1, 20, 30, exif=EXIF)},
        {"__key__": "upright", "jpg": make_jpeg(2, 20, 30)},
        {"__key__": "none", "mask.jpg": make_jpeg(3, 20, 30, "L")},
    ]
    write_shard(path, list(map(encode_sample, samples)), ShardFormat())
    with Shard(path).load(1) as prefix:
        columns = orientations_of(prefix)
        assert columns == {"jpg": [6, 0, 0]}
        for row, expected in enumerate((6, None, None)):
            sample = prefix.sample(row)
            orient(sample, row, columns)
            image = Image.open(io.BytesIO(sample.get("jpg") or sample["mask.jpg"]))
            assert image.getexif().get(0x0112) == expected
    with Shard(path).load("full") as prefix:
        assert orientations_of(prefix) == {}
