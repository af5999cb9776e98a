"""Files of several pictures: the others are found after the first one has another size."""

import io
import struct

import numpy as np
import pytest
from PIL import Image, ImageSequence

from pcrshard import Shard, ShardFormat, ShardWriter, decode_image
from pcrshard.testing import make_jpeg, make_pixels


def frames(jpeg):
    """The pixels of all pictures that Pillow finds."""
    with Image.open(io.BytesIO(jpeg)) as picture:
        return [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(picture)]


def at_full(folder, jpeg):
    with ShardWriter(folder, fmt=ShardFormat("standard")) as writer:
        writer.write({"__key__": "k", "jpg": jpeg})
    return Shard(folder / "data-000000.tar").sample(0)["jpg"]


def made(count):
    pictures = [Image.fromarray(make_pixels(i, 40 + i, 64)) for i in range(count)]
    out = io.BytesIO()
    pictures[0].save(out, "MPO", save_all=True, append_images=pictures[1:], quality=90)
    return out.getvalue()


@pytest.mark.parametrize("count", [2, 3])
def test_every_picture_is_found(tmp_path, count):
    """An exported MPO shows the pictures of its source, though its first one is smaller."""
    jpeg = made(count)
    found = at_full(tmp_path / "pcr", jpeg)
    assert len(found) < len(jpeg)
    expected, shown = frames(jpeg), frames(found)
    assert len(shown) == count
    for one, other in zip(expected, shown, strict=True):
        assert np.array_equal(one, other)


def test_pictures_of_a_camera(data_folder, tmp_path):
    """So does the file of a camera."""
    jpeg = (data_folder / "odd" / "valid-mpo-2frames.jpg").read_bytes()
    expected, shown = frames(jpeg), frames(at_full(tmp_path / "pcr", jpeg))
    assert len(expected) == len(shown) == 2
    for one, other in zip(expected, shown, strict=True):
        assert np.array_equal(one, other)


def test_the_gain_map_of_a_phone(data_folder, tmp_path):
    """The second picture of an Ultra HDR file, which Pillow does not look for, is where the first
    one says.
    """
    found = at_full(tmp_path / "pcr", (data_folder / "odd" / "valid-ultrahdr.jpg").read_bytes())
    start = found.index(b"MPF\0") + 4
    size, offset = struct.unpack_from(">4xII", found, start + 50 + 16)
    gain_map = found[start + offset :][:size]
    assert gain_map.startswith(b"\xff\xd8\xff")
    assert decode_image(gain_map).shape[2] == 3
    assert start + offset + size == len(found)


@pytest.mark.parametrize("damage", ["offset", "directory", "order", "gone"])
def test_a_table_that_does_not_fit_is_left_out(tmp_path, damage):
    """Nothing points outside the file, whatever the source says; the first picture is as it was."""
    jpeg = bytearray(made(3))
    start = jpeg.index(b"MPF\0") + 4
    if damage == "offset":
        place = start + 50 + 2 * 16 + 8  # that of the third picture
        jpeg[place : place + 4] = b"\x7f\xff\xff\xff"
    elif damage == "directory":
        jpeg[start + 4 : start + 8] = b"\xff\xff\xff\xff"
    elif damage == "order":
        jpeg[start : start + 4] = b"XX*\0"
    else:
        jpeg = jpeg[: jpeg.rindex(b"\xff\xd8\xff")]
    found = at_full(tmp_path / "pcr", bytes(jpeg))
    assert b"MPF\0" not in found[:20_000]
    assert np.array_equal(decode_image(found), decode_image(bytes(jpeg)))


def test_plain_jpegs_keep_their_bytes(tmp_path):
    """Trailing bytes that are no pictures change nothing."""
    jpeg = make_jpeg(0) + bytes(1000)
    assert at_full(tmp_path / "pcr", jpeg).endswith(b"\xff\xd9" + bytes(1000))
