"""What a batch holds: fields by their extension, pixels as the decoder gives them, missing ones."""

import random

import numpy as np
import pytest
import torch
from numbered import loader_of, numbered, write

from pcrshard import (
    ImageDecoder,
    PCRDataset,
    ScanLevel,
    ShardFormat,
    ShardWriter,
)
from pcrshard.errors import FormatError, ScanUnavailable
from pcrshard.native.pool import draw_key
from pcrshard.testing import make_jpeg

KEPT = {"shuffle": False}


# --- batches


def test_a_batch_is_a_dict(dataset):
    """Fields come by their extension: images uint8 NCHW, classes int64, the rest in lists.

    Classes have names.
    """
    loader = loader_of(dataset, 6, scan=3, decoder=ImageDecoder((20, 24), "center"))
    data = loader.dataset
    assert data.classes == ("cat", "dog")
    assert data.num_samples == 24
    for batch in loader:
        assert set(batch) == {"__key__", "jpg", "cls"}
        assert (batch["jpg"].shape, batch["jpg"].dtype) == ((6, 3, 20, 24), torch.uint8)
        assert (batch["cls"].shape, batch["cls"].dtype) == ((6,), torch.int64)
        names = [data.classes[number] for number in batch["cls"]]
        assert [key.split("/")[0] for key in batch["__key__"]] == names


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (6, 3, 16, 16)),
        ({"layout": "hwc"}, (6, 16, 16, 3)),
        ({"color": "gray"}, (6, 1, 16, 16)),
        ({"color": "gray", "layout": "hwc"}, (6, 16, 16, 1)),
        ({"smoothing": True}, (6, 3, 16, 16)),
    ],
)
def test_pixels_are_the_decoders(dataset, options, shape):
    """A batch holds what the decoder gives for each image alone, gray and CMYK ones too, in every
    layout.
    """
    decoder = ImageDecoder(16, "center", **options)
    for batch in loader_of(dataset, 6, scan=4, decoder=decoder):
        assert batch["jpg"].shape == shape
        for key, pixels in zip(batch["__key__"], batch["jpg"], strict=True):
            assert np.array_equal(pixels, decoder(stored(dataset, key, 4)["jpg"], random.Random(0)))


def stored(folder, key, scan):
    """A sample as stored."""
    sample = PCRDataset(folder, scan=scan)[key]
    return {name: str(value).encode() if name == "cls" else value for name, value in sample.items()}


def test_ragged_images_come_in_a_list(dataset):
    """Without a target size, images keep their own sizes and come in a list."""
    batch = next(iter(loader_of(dataset, 6, decoder=ImageDecoder())))
    for key, pixels in zip(batch["__key__"], batch["jpg"], strict=True):
        number = int(key.split("/")[1])
        assert pixels.shape == (3, 40 + number, 64 - number)


def test_without_a_decoder_images_stay_jpegs(dataset):
    """Without a decoder, a batch holds the JPEG bytes at the scan."""
    batch = next(iter(loader_of(dataset, 6, scan=2)))
    assert batch["jpg"] == [stored(dataset, key, 2)["jpg"] for key in batch["__key__"]]


def test_a_batch_may_be_a_tuple(dataset):
    """``fields`` picks and orders; what is not named is not decoded."""
    calls = []
    decoder = Counting(calls)
    for images, classes, keys in loader_of(
        dataset, 8, decoder=decoder, fields=("jpg", "cls", "__key__")
    ):
        assert (images.shape, classes.shape, len(keys)) == ((8, 3, 8, 8), (8,), 8)
    assert len(calls) == 24
    labels = loader_of(dataset, 8, decoder=decoder, fields=["cls"])
    assert [len(batch) for batch in labels] == [1, 1, 1]
    assert len(calls) == 24


class Counting(ImageDecoder):
    """Counts what it decodes."""

    def __init__(self, calls):
        super().__init__(8, "center")
        object.__setattr__(self, "calls", calls)

    def __call__(self, *args, **options):
        self.calls.append(1)
        return super().__call__(*args, **options)


def test_a_field_that_is_not_there(dataset):
    """A field that no sample has raises an error that names it and the existing fields."""
    with pytest.raises(KeyError, match="'caption' at scan full, it has __key__, jpg, cls"):
        next(iter(loader_of(dataset, 6, fields=("jpg", "caption"))))


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Samples with other fields, some missing; the dataset's order."""
    samples = [
        {
            "__key__": f"s{i}",
            "jpg": make_jpeg(i, 16, 16),
            "meta.json": {"i": i},
            "txt": f"text {i}",
            "count.cls": i,
            "bin": b"raw",
        }
        for i in range(4)
    ]
    for name in ("txt", "count.cls", "meta.json"):
        del samples[1][name]
    del samples[2]["jpg"]
    samples[2]["txt"] = "no image"
    return write(tmp_path_factory.mktemp("odd"), samples, rows=2)


def test_missing_fields_are_none(odd):
    """Where samples lack a field the batch has a list with None there, the others converted as
    always.
    """
    first, second = loader_of(odd, 2, decoder=ImageDecoder(8), **KEPT)
    assert first["meta.json"] == [{"i": 0}, None]
    assert first["txt"] == ["text 0", None]
    assert first["count.cls"] == [0, None]
    assert first["jpg"].shape == (2, 3, 8, 8)
    assert second["jpg"][0] is None
    assert (second["jpg"][1].shape, second["jpg"][1].dtype) == ((3, 8, 8), torch.uint8)
    assert second["count.cls"].tolist() == [2, 3]
    assert second["txt"] == ["no image", "text 3"]
    assert first["bin"] == second["bin"] == [b"raw", b"raw"]


def test_missing_fields_of_a_tuple_are_an_error(odd):
    """A tuple promises its fields; the sample that lacks one is named."""
    with pytest.raises(KeyError, match=r"s1.*'txt'"):
        list(loader_of(odd, 2, fields=("txt",), **KEPT))


@pytest.mark.parametrize("seed", range(2))
def test_datasets_of_other_fields_mix(tmp_path, folder, seed):
    """In a batch of samples with one image and with two, every image is its own, and the images of
    one sample have the same crop.
    """
    samples = [
        {"__key__": f"s{i}", "jpg": make_jpeg(i, 16, 16), "mask.jpg": make_jpeg(i + 50, 16, 16)}
        for i in range(6)
    ]
    urls = [folder, write(tmp_path / "masks", samples, rows=3)]
    decoder = ImageDecoder(8, "random", flip=0.5)
    data = loader_of(
        urls,
        6,
        decoder=decoder,
        seed=seed,
        weights=(1, 1),
        num_samples=12,
        lanes_per_rank=1,
    )
    seen = 0
    for batch in data:
        for i, key in enumerate(batch["__key__"]):
            is_pair = key[0] == "s"
            sample = stored(urls[is_pair], key, "full")
            draws = draw_key(seed, 0, int(key[1:]) + 60 * is_pair)
            for field in ("jpg", "mask.jpg"):
                found = batch.get(field, [None] * 6)[i]
                assert (found is None) == (field not in sample)
                assert found is None or np.array_equal(found, decoder(sample[field], draws))
                seen += found is not None
    assert seen == 6 + 2 * 6


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cls", b"seven"),
        ("cls", b"9223372036854775808"),
        ("cls", b"9" * 100_000),
        ("a.index", b""),
        ("json", b"[" * 100_000),
        ("txt", b"\xff"),
    ],
    ids=lambda value: repr(value[:12]),
)
def test_a_value_that_cannot_be_converted_names_its_sample(tmp_path, name, value):
    """An unconvertible field of a crafted shard raises our error with the sample's key."""
    samples = numbered(2)
    for sample in samples:
        sample.pop("cls")
        sample[name] = value
    with pytest.raises(FormatError, match="key=k000"):
        list(loader_of(write(tmp_path, samples), 2, **KEPT))


def mixed_folder(folder, **late):
    """Four samples: an image, a list of views, an array."""
    with ShardWriter(
        folder, samples_per_shard=2, fmt=ShardFormat("standard", deferred=late)
    ) as writer:
        for i in range(4):
            sample = {"__key__": f"k{i}", "cls": i, "bin": b"array", "jpg": make_jpeg(i, 20, 30)}
            if i:
                sample["views.jpg"] = [make_jpeg(j, 16, 16) for j in range(i)]
            writer.write(sample)
    return str(folder)


def test_late_fields_follow_the_scan(tmp_path):
    """A late field is in the batches from its scan on; a lower one is refused before anything is
    read, with field and scan named, and so is a level that is set lower.
    """
    folder = mixed_folder(tmp_path / "pcr", bin=5)
    fields = ("cls", "bin")
    batch = next(iter(loader_of(folder, 4, scan=5, fields=fields, **KEPT)))
    assert batch[1] == [b"array"] * 4
    with pytest.raises(ScanUnavailable, match="field 'bin' begins at scan 5, got 2"):
        PCRDataset(folder, scan=2, fields=fields)
    with pytest.raises(ScanUnavailable, match="field 'jpg' begins at scan 1, got 0"):
        PCRDataset(folder, scan=0, fields=("jpg", "cls"))
    level = ScanLevel(6)
    PCRDataset(folder, scan=level, fields=fields)
    with pytest.raises(ScanUnavailable, match="field 'bin' begins at scan 5, got 4"):
        level.value = 4


def test_lists_of_images_are_lists_of_tensors(tmp_path):
    """Each sample has its views, decoded to one size, in their order, however many they are."""
    folder = mixed_folder(tmp_path / "pcr")
    batch = next(iter(loader_of(folder, 4, scan=2, decoder=8, **KEPT)))
    assert [len(views) for views in batch["views.jpg"]] == [0, 1, 2, 3]
    assert {tuple(view.shape) for views in batch["views.jpg"] for view in views} == {(3, 8, 8)}
    assert batch["jpg"].shape == (4, 3, 8, 8)


class Normalized(ImageDecoder):
    """A user's decoder, which gives floats."""

    def __call__(self, jpeg, rng=None, out=None):
        return np.float32(super().__call__(jpeg, rng)) / 255


@pytest.mark.parametrize("threads", [0, 2])
def test_a_decoder_of_ones_own_keeps_its_type(dataset, threads):
    """What a subclass returns is stacked as it is, and not cut to the bytes of its base class."""
    plain, floats = (
        next(iter(loader_of(dataset, 4, decoder=kind(16), shuffle=False, threads=threads)))
        for kind in (ImageDecoder, Normalized)
    )
    assert floats["jpg"].dtype == torch.float32
    assert torch.equal(floats["jpg"], plain["jpg"] / 255)
