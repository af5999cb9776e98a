"""Batches that threads decode: the same as without, whatever a sample holds, and never written to
while somebody has them.
"""

import gc
import shutil
import traceback

import numpy as np
import pytest
import torch
from numbered import ids, loader_of
from PIL import Image
from support import damage, pieces, saved

from pcrshard import (
    EncodeOptions,
    ImageDecoder,
    PCRDataset,
    Shard,
    ShardWriter,
    View,
    encode,
)
from pcrshard.errors import CorruptPiece
from pcrshard.jpeg.views import Geometry
from pcrshard.native.pool import draw_key
from pcrshard.testing import make_jpeg

SAMPLES, ROWS = 48, 6
OPTIONS = {"seed": 5}
RANDOM = {"crop": "random", "flip": 0.5}


def png(number):
    """A small picture that is no JPEG."""
    return saved(Image.fromarray(np.full((20, 30, 3), number, np.uint8)), "PNG")


def jpeg(number):
    return make_jpeg(number, 20 + number % 3, 24 + number % 5)


MAKERS = {
    "images": lambda i: {"jpg": jpeg(i)},
    "pairs": lambda i: {"left.jpg": jpeg(i), "right.jpg": jpeg(i + 100), "txt": f"{i}"},
    "some missing": lambda i: {"jpg": jpeg(i)} if i % 5 else {"cls": i},
    "JPEGs and PNGs": lambda i: (
        {"mask.png": png(i)} | ({"jpg": jpeg(i)} if i % 5 else {"png": png(i)})
    ),
    "PNGs beside": lambda i: {"left.png": png(i)} | ({"jpg": jpeg(i)} if i % 2 else {}),
    "lists": lambda i: {"views.jpg": [jpeg(i + k) for k in range(i % 3)], "jpg": jpeg(i)},
}
# Files that cannot be layered are kept.
FILES = {
    "some kept": lambda i: ("jpg", png(i) if i % 7 == 3 else jpeg(i)),
    "no JPEG": lambda i: ("png", png(i)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A dataset of each kind."""
    made = {}
    for name, make in FILES.items():
        made[name] = str(tmp_path_factory.mktemp("kept"))
        source = tmp_path_factory.mktemp("files")
        for i in range(SAMPLES):
            extension, data = make(i)
            (source / f"{i:03d}.{extension}").write_bytes(data)
        how = EncodeOptions(on_error="keep", samples_per_shard=ROWS)
        encode(source, made[name], how, workers=1)
    for name, make in MAKERS.items():
        made[name] = str(tmp_path_factory.mktemp("kind"))
        with ShardWriter(made[name], samples_per_shard=ROWS) as writer:
            for i in range(SAMPLES):
                writer.write({"__key__": f"k{i:03d}", "cls": i, **make(i)})
    return made


def plain(value):
    """A batch as lists and bytes, which can be compared."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return tuple(value.shape), bytes(np.ascontiguousarray(value))
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return list(map(plain, value)) if isinstance(value, list | tuple) else value


def batches(folder, threads, epochs=1, **options):
    """Return all batches of these epochs, decoded by this number of threads."""
    choices = {"scan": 3, "decoder": ImageDecoder(16, **RANDOM)} | options
    loader = loader_of(folder, 5, threads=threads, **OPTIONS, **choices)
    return [plain(batch) for _ in range(epochs) for batch in loader]


def alone(folder, draws=RANDOM, **options):
    """The same, image by image: by a subclass that the core does not know."""

    class Own(ImageDecoder):
        pass

    return batches(folder, 0, decoder=Own(16, **draws), **options)


@pytest.mark.parametrize("kind", [*MAKERS, *FILES])
def test_threads_change_nothing(folders, kind):
    """Whatever samples hold, a batch is the same with threads, without, and image by image."""
    # Random crops of a picture leave no picture beside it as it is.
    draws = {"crop": "center"} if "PNGs" in kind else RANDOM
    expected = alone(folders[kind], draws, epochs=2)
    assert len(expected) == 2 * (SAMPLES // 5)
    for threads in (0, 1, 3):
        decoder = ImageDecoder(16, **draws)
        assert batches(folders[kind], threads, epochs=2, decoder=decoder) == expected


def test_a_batch_that_is_kept_is_not_written_to(folders):
    """Memory is reused only after the last reference to its batch is gone."""
    how = {"threads": 2, "prefetch": 3} | OPTIONS
    loader = loader_of(folders["images"], 4, scan=2, decoder=16, fields=("jpg",), **how)
    expected = [images.clone() for (images,) in loader]
    loader.set_epoch(0)
    kept = []
    rows = []
    for images, *_ in loader:
        rows.append(images[1])
        kept.append(images)
    del images
    kept[3:] = []
    for _ in range(2):
        for _batch in loader:
            pass
    assert all(torch.equal(a, b) for a, b in zip(kept, expected, strict=False))
    assert all(torch.equal(row, whole[1]) for row, whole in zip(rows, expected, strict=True))


def test_memory_is_used_again(folders):
    """A loop that keeps no batches reuses the memory of a few batches."""
    how = {"threads": 2, "prefetch": 2} | OPTIONS
    loader = loader_of(folders["images"], 4, scan=2, decoder=64, fields=("jpg",), **how)
    gc.collect()  # earlier tests' memory is not given back in between
    places = [images.data_ptr() for _ in range(4) for (images,) in loader]
    assert len(places) == 48
    assert len(set(places)) <= 12


@pytest.mark.parametrize(
    "how", [{"threads": 0}, {"threads": 2, "prefetch": 4}, {"num_workers": 1}], ids=str
)
def test_an_error_comes_with_its_batch(folders, tmp_path, how):
    """A damaged image raises an error with shard, key and scan, after all batches before it; what
    runs ahead is no reason to lose them, and a lower scan is unharmed.
    """
    shutil.copytree(folders["images"], tmp_path, dirs_exist_ok=True)
    path = tmp_path / "data-000004.tar"
    damage(path, int(pieces(Shard(path)).starts[1, 2, 0]))
    kept = {"shuffle": False, "decoder": 16} | how
    expected = ids(loader_of(tmp_path, 4, scan=1, **kept))
    assert len(expected) == SAMPLES // 4
    loader = loader_of(tmp_path, 4, scan=2, **kept)
    seen = []
    with pytest.raises(CorruptPiece, match=r"data-000004\.tar.*k026.*scan=2") as caught:
        seen.extend(batch["cls"].tolist() for batch in loader)
    # Otherwise torch takes five seconds to end the workers of a loader that is garbage.
    traceback.clear_frames(caught.tb)
    assert seen == expected[:6]
    assert loader.state_dict()["segments"][-1][-1] == 6


# --- views and geometry

VIEWS = [View(24, 2, scale=(0.25, 1)), View((9, 12), 3, scale=(0.05, 0.25))]


def by_hand(folder, decoder, batch, name="jpg"):
    """What the decoder gives for each image of a batch alone, from the same draws."""
    dataset = PCRDataset(folder, scan=3)
    ids = {f"k{i:03d}": i for i in range(SAMPLES)}
    return [
        decoder(dataset[key][name], draw_key(OPTIONS["seed"], 0, ids[key]))
        for key in batch["__key__"]
    ]


@pytest.mark.parametrize(
    "how",
    [
        {"threads": 0},
        {"threads": 2},
        {"num_workers": 1},
    ],
)
def test_views_of_a_batch_are_those_of_each_image(folders, how):
    """However batches are made, there is a tensor of each view, equal to single calls, and its
    geometry.
    """
    decoder = ImageDecoder(views=VIEWS, flip=0.5, return_geometry=True, smoothing=True)
    loader = loader_of(folders["images"], 8, scan=3, decoder=decoder, **OPTIONS, **how)
    batch = next(iter(loader))
    pixels, geometry = batch["jpg"]
    assert [tuple(view.shape) for view in pixels] == [(8, 2, 3, 24, 24), (8, 3, 3, 9, 12)]
    assert [type(view) for view in geometry] == [Geometry, Geometry]
    for place, alone in enumerate(by_hand(folders["images"], decoder, batch)):
        for view in range(2):
            assert np.array_equal(pixels[view][place], alone.pixels[view])
            for got, expected in zip(geometry[view], alone.geometry[view], strict=True):
                assert np.array_equal(got[place], expected)


def test_a_png_is_an_image_where_there_is_no_jpeg(folders):
    """In tars that mix JPEGs and PNGs, a sample's image is decoded and its mask is not, in batches
    of both, too.
    """
    dataset = PCRDataset(folders["JPEGs and PNGs"], scan=3, decoder=16)
    for place, name in ((5, "png"), (6, "jpg")):
        assert dataset[place][name].shape == (3, 16, 16)
        assert dataset[place]["mask.png"] == png(place)
    how = {"scan": 3, "decoder": 16, "shuffle": False}
    batch = next(iter(loader_of(folders["JPEGs and PNGs"], 7, **how)))
    assert batch["mask.png"] == [png(place) for place in range(7)]
    # Where some samples have a JPEG beside it, it is no image in any of them.
    beside = next(iter(loader_of(folders["PNGs beside"], 2, **how)))["left.png"]
    assert beside == [png(0), png(1)]


@pytest.mark.parametrize("kind", ["some kept", "no JPEG", "lists", "some missing", "pairs"])
@pytest.mark.parametrize("views", [(), VIEWS])
def test_every_kind_of_sample_has_views_and_geometry(folders, kind, views):
    """Threads give the same batches of kept files, lists, missing images and pairs."""
    options = {"views": views} if views else {"size": 16, "crop": "random"}
    decoder = ImageDecoder(flip=0.5, return_geometry=True, **options)
    batches = []
    for threads in (0, 2):
        how = {"threads": threads} | OPTIONS
        batches.append(list(loader_of(folders[kind], 8, scan=2, decoder=decoder, **how)))
    assert list(map(plain, batches[0])) == list(map(plain, batches[1]))


def test_a_batch_of_pictures_is_a_picture(folders):
    """With geometry, a field of a batch has pixels and where they are from, in tuples, too."""
    decoder = ImageDecoder(16, "random", return_geometry=True)
    loader = loader_of(folders["images"], 8, decoder=decoder, fields=("jpg", "cls"), **OPTIONS)
    picture, classes = next(iter(loader))
    assert picture.pixels.shape == (8, 3, 16, 16)
    assert picture.geometry.crop.shape == (8, 4)
    assert classes.shape == (8,)


@pytest.mark.parametrize("options", [{"threads": 2}, {"num_workers": 1}])
def test_sizes_may_change_from_epoch_to_epoch(folders, options):
    """Progressive resizing: a decoder that is set between epochs decodes the next one."""
    loader = loader_of(folders["images"], 8, decoder=4, fields=("jpg",), **OPTIONS, **options)
    for size in (8, 12):
        loader.dataset.decoder = ImageDecoder(size, "random")
        assert {images.shape for (images,) in loader} == {(8, 3, size, size)}
