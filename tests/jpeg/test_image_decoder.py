"""Decode, crop and resize in one go."""

import pickle
import random

import numpy as np
import pytest
import torch
import webdataset as wds
from support import pieces

import pcrshard
from pcrshard import ImageDecoder, Shard, decode_image
from pcrshard.errors import CorruptJpeg, CorruptPiece
from pcrshard.jpeg.pixels import decode
from pcrshard.testing import make_jpeg

JPEG = make_jpeg(4, 150, 200, quality=90, progressive=True)


@pytest.mark.parametrize("color", ["rgb", "gray"])
@pytest.mark.parametrize("layout", ["hwc", "chw"])
def test_a_whole_image_is_libjpegs(color, layout):
    """Without crop and size the pixels are the reference decoder's."""
    expected = decode(JPEG, color)
    expected = expected if layout == "hwc" else expected.transpose(2, 0, 1)
    assert np.array_equal(decode_image(JPEG, color=color, layout=layout), expected)
    out = np.zeros(expected.shape, np.uint8)
    decode_image([JPEG[:100], memoryview(JPEG)[100:]], color=color, layout=layout, out=out)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize(
    ("crop", "error"),
    [((0, 0, 0, 5), ValueError), ((100, 0, 51, 5), ValueError), ((-1, 0, 5, 5), ValueError)],
)
def test_crops_outside_are_refused(crop, error):
    """A crop that is not within the image is a ValueError."""
    with pytest.raises(error):
        decode_image(JPEG, crop=crop)


def test_the_same_seed_gives_the_same_crops():
    """A seed decides crops; a number is a seed, too."""
    decoder = ImageDecoder(32, "random")
    first, again = ([decoder(JPEG, rng) for _ in range(2)] for rng in map(random.Random, (3, 3)))
    assert np.array_equal(first, again)
    assert not np.array_equal(*first)
    assert np.array_equal(decoder(JPEG, 7), decoder(JPEG, 7))


def test_an_evaluation_needs_no_seed():
    """Where nothing is drawn no random number is taken; else they are Python's own."""
    state = random.getstate()
    assert ImageDecoder(224, "center")(JPEG).shape == (3, 224, 224)
    assert random.getstate() == state
    first = ImageDecoder(32, "random")(JPEG)
    random.setstate(state)
    assert np.array_equal(ImageDecoder(32, "random")(JPEG), first)


@pytest.mark.parametrize(
    "wrong", [{"crop": "middle"}, {"layout": "nchw"}, {"size": 0}, {"color": "cmyk"}]
)
def test_wrong_options_are_refused(wrong):
    """A typing error is refused before the first image."""
    with pytest.raises(ValueError, match="expected"):
        ImageDecoder(**wrong)


def test_the_reader_decodes_pieces(shard_urls):
    """Shard.samples can hand out arrays, decoded from the scattered pieces, equal to those of the
    joined JPEG.
    """
    joined = {s["__key__"]: s["jpg"] for s in Shard(shard_urls[0]).samples(5)}
    decoder = ImageDecoder(24, "center")
    for sample in Shard(shard_urls[0]).samples(5, decode=decoder):
        assert np.array_equal(sample["jpg"], decoder(joined[sample["__key__"]]))
        assert sample["cls"] in (b"0", b"1")


def test_damage_is_found_before_it_is_decoded(shard_urls, tmp_path):
    """A damaged piece is a CorruptPiece for a decoding reader, too."""
    data = bytearray(open(shard_urls[0], "rb").read())
    data[int(pieces(Shard(shard_urls[0])).starts[1, 0, 0])] ^= 1
    path = tmp_path / "data-000000.tar"
    path.write_bytes(data)
    with pytest.raises(CorruptPiece, match="scan=2"):
        list(Shard(str(path)).samples(5, decode=ImageDecoder(8)))


def test_in_a_webdataset_pipeline(shard_urls):
    """pcr_decode gives batches of uint8 images, in workers, with seeded crops and labels."""
    ds = (
        wds.WebDataset(shard_urls, shardshuffle=False)
        .pcr_scan(2)
        .pcr_decode(16, "random", seed=5)
        .decode(partial=True)
        .to_tuple("jpg", "cls")
    )
    first, second = (np.stack([image for image, _ in ds]) for _ in range(2))
    assert first.shape == (24, 3, 16, 16)
    assert np.array_equal(first, second)
    pickle.loads(pickle.dumps(ds))
    loader = wds.WebLoader(ds.batched(4), batch_size=None, num_workers=2)
    batches = list(loader)
    assert sum(len(labels) for _, labels in batches) == 24
    assert all(torch.as_tensor(images).dtype == torch.uint8 for images, _ in batches)


def test_the_handler_decides_about_damage():
    """A sample that does not decode goes to the handler."""
    samples = [{"__key__": "a", "jpg": b"\xff\xd8 garbage"}, {"__key__": "b", "jpg": JPEG}]
    assert [s["__key__"] for s in pcrshard.pcr_decode(8, handler=lambda error: True)(samples)] == [
        "b"
    ]
    with pytest.raises(CorruptJpeg):
        list(pcrshard.pcr_decode(8)(samples))


@pytest.mark.parametrize("size", [24, np.int64(24), (24, 24), [24, np.int32(24)]])
def test_a_size_is_one_or_two_whole_numbers(size):
    """Of Python, NumPy or a configuration file."""
    assert ImageDecoder(size).shape == (24, 24)


@pytest.mark.parametrize("size", ["224", True, 2.5, (1, 2, 3), (5,), (2, "2")])
def test_another_size_is_refused_at_once(size):
    """With what was expected, and not by the first image."""
    with pytest.raises(TypeError, match="expected size to be a size such as 224"):
        ImageDecoder(size)
