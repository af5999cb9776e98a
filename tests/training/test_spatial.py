"""Masks, boxes and keypoints move with the crop and flip of their picture."""

import io
import itertools
import json

import numpy as np
import pytest
import torch
import webdataset as wds
from numbered import write
from PIL import Image

from pcrshard import Buckets, ImageDecoder, PCRDataset, PCRLoader, View, open_dataset
from pcrshard.errors import FormatError
from pcrshard.jpeg.orientation import with_orientation
from pcrshard.testing import make_jpeg

KINDS = {
    "mask.png": "mask",
    "xyxy.npy": "boxes:xyxy",
    "xywh.json": "boxes:xywh",
    "points.npy": "keypoints",
    "json:objects.bbox": "boxes:cxcywh",
}
CLASSES = [0, 3, 7, 200]
SAMPLES = 24


def npy(values):
    out = io.BytesIO()
    np.save(out, np.asarray(values, np.float32))
    return out.getvalue()


def drawn(number):
    """A picture's size, its mask of four classes as a palette image, and the box of each class."""
    height, width = (60, 80) if number % 2 else (90, 50)
    y, x = height // 2 + number % 5, width // 2 - number % 7
    mask = np.zeros((height, width), np.uint8)
    boxes = [(x, 0, width, y), (0, y, x, height), (x, y, width, height)]
    for value, (left, top, right, bottom) in zip(CLASSES[1:], boxes, strict=True):
        mask[top:bottom, left:right] = value
    return height, width, mask, np.array(boxes, float)


def sample(number):
    height, width, mask, boxes = drawn(number)
    picture = Image.fromarray(mask, "L").convert("P")
    picture.putdata(mask.ravel().tolist())
    out = io.BytesIO()
    picture.save(out, "PNG")
    sides = boxes[:, 2:] - boxes[:, :2]
    return {
        "__key__": f"k{number:03d}",
        "jpg": (
            # Stored on its side.
            with_orientation(make_jpeg(number, width, height), 6)
            if number % 4 == 3
            else make_jpeg(number, height, width)
        ),
        "mask.png": out.getvalue(),
        "xyxy.npy": npy(boxes),
        "xywh.json": np.concatenate([boxes[:, :2], sides], axis=1).tolist(),
        "points.npy": npy([[*box[:2], 2] for box in boxes]),
        "json": {
            "objects": [
                {"bbox": [*(box[:2] + side / 2), *side], "id": number}
                for box, side in zip(boxes, sides, strict=True)
            ]
        },
        "cls": number,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures of two shapes, each with four classes in its mask and a box of three of them."""
    samples = list(map(sample, range(SAMPLES)))
    for each in samples:
        each["json"] = json.dumps(each["json"]).encode()
        each["xywh.json"] = json.dumps(each["xywh.json"]).encode()
    return write(tmp_path_factory.mktemp("spatial"), samples, 6, kinds=KINDS)


def corners(kind, boxes):
    """Boxes as left, top, right, bottom."""
    boxes = np.asarray(boxes, float)
    if kind == "boxes:cxcywh":
        boxes = np.concatenate([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, 2:]], axis=1)
    if kind != "boxes:xyxy":
        boxes = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    return boxes


def check(mask, found):
    """The mask has only drawn classes, and each box is that of its class in the mask."""
    mask = np.asarray(mask)
    assert set(np.unique(mask)) <= set(CLASSES)
    overlaps = []
    for kind, boxes in found.items():
        for value, (left, top, right, bottom) in zip(
            CLASSES[1:], corners(kind, boxes), strict=True
        ):
            rows, columns = np.nonzero(mask == value)
            if len(rows) < 30:
                continue
            own = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
            inner = max(0, min(right, own[2]) - max(left, own[0])) * max(
                0, min(bottom, own[3]) - max(top, own[1])
            )
            areas = (right - left) * (bottom - top) + (own[2] - own[0]) * (own[3] - own[1])
            overlaps.append(inner / (areas - inner))
    return overlaps


def boxes_of(batch, place):
    return {
        "boxes:xyxy": batch["xyxy.npy"][place],
        "boxes:xywh": batch["xywh.json"][place],
        "boxes:cxcywh": [each["bbox"] for each in batch["json"][place]["objects"]],
    }


@pytest.mark.parametrize(
    ("decoder", "options"),
    [
        (ImageDecoder(96, "random", flip=0.5), {}),
        (ImageDecoder((64, 128), "center", flip=1.0), {"threads": 2}),
        (ImageDecoder(), {}),
        (ImageDecoder(crop="random", flip=0.5), {"num_workers": 1}),
        (ImageDecoder(flip=0.5), {"buckets": Buckets(area=96 * 96, multiple=32)}),
    ],
    ids=["random", "center", "whole", "own size", "buckets"],
)
def test_everything_moves_with_the_picture(folder, decoder, options):
    """Through crops, flips, sizes and buckets, boxes and masks agree: a mean IoU of 0.98, and masks
    hold only drawn classes; samples by number and batches have the same shapes.
    """
    overlaps = []
    for batch in PCRLoader(PCRDataset(folder, decoder=decoder), 4, **options):
        for place in range(4):
            mask, pixels = batch["mask.png"][place], batch["jpg"][place]
            assert mask.shape == pixels.shape[1:]
            overlaps += check(mask, boxes_of(batch, place))
            visible = batch["points.npy"][place]
            assert visible.shape == (3, 3)
            inside = (visible[:, :2] >= 0).all(1) & (visible[:, 0] < mask.shape[1])
            assert not visible[~inside, 2].any()
        if decoder.is_sized:
            assert batch["mask.png"].dtype == torch.uint8
    assert np.mean(overlaps) > 0.98
    single = PCRDataset(folder, decoder=decoder)[5]
    assert single["mask.png"].shape == single["jpg"].shape[1:]
    assert isinstance(single["xyxy.npy"], torch.Tensor)


@pytest.mark.parametrize(
    "decoder",
    [ImageDecoder(96, "random", flip=0.5), ImageDecoder(crop="random", flip=0.5)],
    ids=["random", "own size"],
)
@pytest.mark.parametrize("threads", [0, 2])
def test_everything_moves_in_webdataset_pipelines(folder, decoder, threads):
    """With index=, .pcr_decode moves masks, boxes and keypoints as PCRLoader does; without it they
    stay bytes, and a mask without a kind is refused.
    """
    _, urls = open_dataset(folder)
    shards = wds.WebDataset(urls, shardshuffle=False).pcr_scan("full", index=folder)
    overlaps = []
    for sample in shards.pcr_decode(decoder, threads=threads):
        assert sample["mask.png"].shape == sample["jpg"].shape[1:]
        one = {name: [value] for name, value in sample.items()}
        overlaps += check(sample["mask.png"], boxes_of(one, 0))
        assert sample["points.npy"].shape == (3, 3)
        assert isinstance(sample["cls"], bytes)
    assert len(overlaps) > SAMPLES
    assert np.mean(overlaps) > 0.98
    stored = wds.WebDataset(urls, shardshuffle=False).pcr_scan("full")
    assert isinstance(next(iter(stored.pcr_decode(decoder)))["mask.png"], bytes)
    views = stored.pcr_decode(ImageDecoder(views=[View(16, 2), View(8)]), index=folder)
    masks = next(iter(views))["mask.png"]
    assert [[mask.shape for mask in view] for view in masks] == [[(16, 16)] * 2, [(8, 8)]]


def test_pipelines_refuse_what_crops_would_leave_behind(folder, tmp_path):
    """With an index, .pcr_decode also refuses a random crop beside a mask of undeclared kind."""
    write(tmp_path, [{"__key__": "a", "jpg": make_jpeg(1), "mask.png": sample(1)["mask.png"]}])
    decoder = ImageDecoder(16, "random")
    with pytest.raises(ValueError, match="to have a kind"):
        wds.WebDataset(["x.tar"]).pcr_scan(2, index=tmp_path).pcr_decode(decoder)
    wds.WebDataset(["x.tar"]).pcr_scan(2, index=tmp_path).pcr_decode(ImageDecoder(16))


def test_the_crop_is_that_of_the_picture(folder):
    """Masks and boxes have the crop that ``return_geometry`` reports, which leaves them as stored,
    for a ``transform=`` of the user's own.
    """
    how = {"size": 32, "crop": "random", "flip": 0.5}
    own = next(iter(PCRLoader(PCRDataset(folder, decoder=ImageDecoder(**how)), 8)))
    raw = ImageDecoder(**how, return_geometry=True)
    stored = next(iter(PCRLoader(PCRDataset(folder, decoder=raw), 8)))
    _, where = stored["jpg"]
    assert torch.equal(own["cls"], stored["cls"])
    for place, number in enumerate(own["cls"].tolist()):
        _, _, mask, boxes = drawn(number)
        assert np.array_equal(stored["xyxy.npy"][place], boxes)
        y, x, height, width = where.crop[place].tolist()
        rows = y + (np.arange(32) + 0.5) * height / 32
        columns = x + (np.arange(32) + 0.5) * width / 32
        cropped = mask[rows.astype(int)][:, columns.astype(int)]
        if where.flipped[place]:
            cropped = cropped[:, ::-1]
        assert np.array_equal(own["mask.png"][place], cropped)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"threads": 0}])
def test_every_view_has_its_own_masks_and_boxes(folder, options):
    """Each picture of each view has the mask and boxes of its crop, in batches and by number."""
    decoder = ImageDecoder(views=[View(48, 2), View(24, 3, scale=(0.3, 0.9))], flip=0.5)
    overlaps = []
    for batch in PCRLoader(PCRDataset(folder, decoder=decoder), 4, **options):
        for view, pictures in enumerate(batch["jpg"]):
            for place, picture in itertools.product(range(4), range(pictures.shape[1])):
                mask = batch["mask.png"][place][view][picture]
                assert mask.shape == pictures.shape[-2:]
                own = {
                    name: [batch[name][place][view][picture]]
                    for name in ("xyxy.npy", "xywh.json", "json")
                }
                overlaps += check(mask, boxes_of(own, 0))
    assert np.mean(overlaps) > 0.95  # a crop of 24 pixels has a box of few
    single = PCRDataset(folder, decoder=decoder)[5]
    assert [len(view) for view in single["mask.png"]] == [2, 3]


def test_boxes_of_which_little_is_left_have_no_area(folder):
    """With min_visible, a box keeps its place in the list and loses its area."""
    how = {"size": 32, "crop": "random", "scale": (0.1, 0.4)}
    raw = PCRDataset(folder, decoder=ImageDecoder(**how, return_geometry=True))
    plain = PCRDataset(folder, decoder=ImageDecoder(**how))
    strict = PCRDataset(folder, decoder=ImageDecoder(**how, min_visible=0.5))
    shares = []
    for one, all_, some in zip(*(PCRLoader(each, 8) for each in (raw, plain, strict)), strict=True):
        for place in range(8):
            _, _, height, width = one["jpg"].geometry.crop[place].tolist()
            sides = one["xyxy.npy"][place][:, 2:] - one["xyxy.npy"][place][:, :2]
            whole = sides.prod(1) * (32 / height) * (32 / width)
            left = all_["xyxy.npy"][place]
            share = (left[:, 2:] - left[:, :2]).prod(1) / whole
            kept = share >= 0.5
            assert torch.equal(some["xyxy.npy"][place][kept], left[kept])
            assert not some["xyxy.npy"][place][~kept].any()
            shares += kept.tolist()
    assert {True, False} == set(shares)
    with pytest.raises(ValueError, match="min_visible from 0 to 1"):
        ImageDecoder(8, min_visible=1.5)


@pytest.mark.parametrize("name", ["mask.png", "boxes.json", "seg.bin", "key_points.bbox.npy"])
def test_a_random_crop_that_leaves_a_mask_behind_is_refused(tmp_path, name):
    """Before anything is read; every way out that the message names works."""
    data = npy([[1, 2, 3, 4]]) if name.endswith("npy") else b"[[1, 2, 3, 4]]"
    samples = [{"__key__": "a", "jpg": make_jpeg(1), name: data, "cls": 1}]
    folder = write(tmp_path / "loose", samples)
    PCRDataset(folder, decoder=ImageDecoder(8))
    for decoder in (ImageDecoder(8, "random"), ImageDecoder(flip=0.5)):
        with pytest.raises(ValueError, match=rf"{name}.*--kind.*fields=.*return_geometry"):
            PCRDataset(folder, decoder=decoder)
    dataset = PCRDataset(folder)
    dataset.decoder = ImageDecoder(8, "random")
    with pytest.raises(ValueError, match="--kind"):
        dataset[0]
    PCRDataset(folder, decoder=ImageDecoder(8, "random"), fields=("jpg", "cls"))[0]
    PCRDataset(folder, decoder=ImageDecoder(8, "random", return_geometry=True))[0]


def test_what_cannot_move_is_refused(folder, tmp_path):
    """A mask of another size, numbers that are no boxes, stored pixels: clear errors."""
    with pytest.raises(ValueError, match="expected an upright decoder"):
        PCRDataset(folder, decoder=ImageDecoder(8, upright=False))[0]
    wrong = sample(0) | {"mask.png": sample(1)["mask.png"]}
    bad = {name: wrong[name] for name in ("__key__", "jpg", "mask.png")}
    dataset = PCRDataset(
        write(tmp_path / "mask", [bad], kinds={"mask.png": "mask"}), decoder=ImageDecoder(8)
    )
    with pytest.raises(FormatError, match=r"expected a mask of the picture's size \(90, 50\)"):
        dataset[0]
    bad = {"__key__": "a", "jpg": make_jpeg(1), "xyxy.npy": npy([[1, 2, 3]])}
    dataset = PCRDataset(
        write(tmp_path / "box", [bad], kinds={"xyxy.npy": "boxes:xyxy"}), decoder=ImageDecoder(8)
    )
    with pytest.raises(FormatError, match="expected 4 numbers of each box"):
        dataset[0]
