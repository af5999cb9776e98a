"""The demonstration: a small network, trained from scan 2 and from full fidelity."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.random import Generator
from torch import nn

from ..encoding.encode_dataset import EncodeOptions, encode
from ..encoding.samples import Source
from ..encoding.sources import list_source
from ..errors import EncodeError, MissingDependency
from ..fidelity import plots
from ..fidelity.costs import (
    ScanCost,
    human_bytes,
    scan_costs,
    scan_table,
    table,
)
from ..format.dataset_index import DatasetIndex
from ..format.scan import FULL, Scan
from ..jpeg.image_decoder import ImageDecoder
from ..jpeg.other_formats import compress
from ..jpeg.pixels import Pixels, decode_image
from ..reading.dataset_folder import open_dataset
from ..reading.shard import Shard
from ..training.dataset import PCRDataset
from ..training.loader import PCRLoader

_CROP = 256
_INPUT = 64
_BATCH = 32
_MARKER = ".pcrshard-demo"
# A source, and the options to encode it with.
Sets = dict[str, tuple[str, EncodeOptions]]


class Training(NamedTuple):
    """What a training read and reached."""

    scan: Scan
    bytes_read: int
    accuracy: float


def run_demo(
    photos: str | None,
    out: str,
    *,
    epochs: int,
) -> list[Training]:
    """Run the demonstration and print what it finds.

    Args:
        photos: Folder of JPEGs with one sub-folder a class, or of ``train`` and ``val`` with one
            sub-folder a class each; by default crops of scikit-learn's two sample photographs.
        out: Target folder: new, empty, or of an earlier demonstration, whose files are replaced.
        epochs: Epochs of each training.

    Returns:
        The two trainings, scan 2 and full.

    Raises:
        EncodeError: The folder holds something else.
    """
    folder = Path(out)
    _take(folder)
    if photos is None:
        print("Cropping scikit-learn's two sample photographs into a two-class set ...")
        photos = str(folder / "photos")
        _crop_sample_photographs(Path(photos))
    train = _encode_sets(photos, folder)
    costs = scan_costs(train)
    named = ", ".join(train.classes)
    print(f"\nWhat a job reads of the {train.num_samples} training images ({named}):")
    print(scan_table(costs))

    trainings = [_train(folder, scan, epochs) for scan in (2, FULL)]
    print(f"\nTraining a small network for {epochs} epochs, validated at full fidelity:")
    print(_training_table(trainings))

    picture = str(folder / "scans.png")
    _draw(folder, picture, costs)
    low, full = trainings
    print(
        f"\nScan 2 read {full.bytes_read / low.bytes_read:.1f}x fewer bytes. "
        f"One image at each scan: {picture}"
    )
    return trainings


def _training_table(trainings: Sequence[Training]) -> str:
    rows = [[scan, human_bytes(size), f"{accuracy:.3f}"] for scan, size, accuracy in trainings]
    return table(["scan", "bytes read", "accuracy"], rows)


def _take(folder: Path) -> None:
    """Make the target folder ours; what a user has there must not be replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder / _MARKER
    if any(folder.iterdir()) and not marker.exists():
        raise EncodeError(
            "expected an empty or a new folder for the demonstration, "
            f"{folder} holds files: use another --out"
        )
    marker.write_text("pcrshard demo replaces what is in this folder.\n")


def _crop_sample_photographs(folder: Path) -> None:
    """Crops of china.jpg and flower.jpg: training from the left, validation from the right.

    They share no pixel.
    """
    try:
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise MissingDependency(
            "scikit-learn is not installed: pip install 'pcrshard[train]'"
        ) from error
    shutil.rmtree(folder, ignore_errors=True)
    rng = np.random.default_rng(0)
    photographs = load_sample_images()
    for path, image in zip(photographs.filenames, photographs.images, strict=True):
        label = Path(path).stem
        border = image.shape[1] - _CROP - 32
        _write_crops(image[:, :border], folder / "train" / label, 320, rng)
        _write_crops(image[:, border:], folder / "val" / label, 80, rng)


def _write_crops(
    image: Pixels,
    folder: Path,
    count: int,
    rng: Generator,
) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"{number:03d}.jpg").write_bytes(compress(_crop(image, rng), 90))


def _crop(image: Pixels, rng: Generator) -> Pixels:
    y, x = (rng.integers(0, side - _CROP + 1) for side in image.shape[:2])
    return np.ascontiguousarray(image[y : y + _CROP, x : x + _CROP])


def _encode_sets(photos: str, out: Path) -> DatasetIndex:
    """Encode training and validation images into ``out/train`` and ``out/val``.

    Returns:
        The index of the training images.
    """
    sources = _find_sets(photos, out)
    indexes = []
    for name, (src, options) in sources.items():
        target = out / name
        shutil.rmtree(target, ignore_errors=True)
        index = encode(src, target, replace(options, name=name, on_error="skip"))
        print(f"Encoded {index.num_samples} images into {target}.")
        indexes.append(index)
    return indexes[0]


def _find_sets(photos: str, out: Path) -> Sets:
    """The source and the options of the training images, then those of the validation images."""
    source = list_source(os.path.abspath(photos))
    if not source.splits:
        return _draw_sets(source, photos, out)
    names = ("train", "val")
    if not {*source.splits} >= {*names}:
        found = ", ".join(source.splits)
        raise EncodeError(f"expected folders train and val, got {found}", url=photos)
    return {name: (photos, EncodeOptions(split=name)) for name in names}


def _draw_sets(
    source: Source,
    photos: str,
    out: Path,
) -> Sets:
    """Two lists of the images of a folder without splits: one image in five validates."""
    if len(source.classes) < 2:
        raise EncodeError(
            f"expected at least two classes, one sub-folder each, got {len(source.classes)}",
            url=photos,
        )
    rng = random.Random(0)
    rows: dict[str, list[str]] = {"train": [], "val": []}
    for sample in source.samples:
        (name,) = rng.choices(list(rows), [4, 1])
        label = sample.key.partition("/")[0]
        row = {
            "path": sample.refs[0].url,
            "label": label,
        }
        rows[name].append(json.dumps(row))
    sets = {}
    for name, lines in rows.items():
        path = out / f"{name}.jsonl"
        path.write_text("\n".join(lines))
        sets[name] = (str(path), EncodeOptions(classes=source.classes))
    return sets


def _loader(folder: Path, scan: Scan, *, shuffle: bool = True) -> PCRLoader:
    decoder = ImageDecoder(_INPUT)
    dataset = PCRDataset(str(folder), scan=scan, decoder=decoder, fields=("jpg", "cls"))
    # One lane in this process reads each shard exactly once in an epoch.
    return PCRLoader(dataset, _BATCH, shuffle=shuffle, drop_last=False, lanes_per_rank=1)


def _train(
    out: Path,
    scan: Scan,
    epochs: int,
) -> Training:
    torch.manual_seed(0)
    index, _ = open_dataset(out / "train")
    model = _network(index.num_classes)
    optimiser = torch.optim.AdamW(model.parameters(), 2e-3)
    loader = _loader(out / "train", scan)
    for _ in range(epochs):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images / 127.5 - 1), labels)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
            optimiser.step()
    return Training(scan, epochs * index.prefix_bytes(scan), _accuracy(model, out / "val"))


def _network(num_classes: int) -> nn.Module:
    """Three convolutions, each halving the side, and a linear layer."""
    layers: list[nn.Module] = []
    for channels, wider in ((3, 16), (16, 32), (32, 64)):
        layers += [
            nn.Conv2d(
                channels,
                wider,
                3,
                stride=2,
                padding=1,
                bias=False,
            ),
            nn.BatchNorm2d(wider),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))


@torch.no_grad()
def _accuracy(model: nn.Module, folder: Path) -> float:
    model.eval()
    right = total = 0
    for images, labels in _loader(folder, FULL, shuffle=False):
        right += int((model(images / 127.5 - 1).argmax(1) == labels).sum())
        total += len(labels)
    return right / total


def _draw(
    out: Path,
    picture: str,
    costs: Sequence[ScanCost],
) -> None:
    """One validation image at several scans, above the bars."""
    index, urls = open_dataset(out / "val")
    shard = Shard(urls[0])
    images = [_rung(shard, scan) for scan in (1, 2, 3, 5, 6, index.num_groups)]
    plots.plot_ladder(images, costs, picture, title="One image at each scan, and what a scan costs")


def _rung(shard: Shard, scan: Scan) -> tuple[str, int, Pixels]:
    jpeg = next(shard.samples(scan))["jpg"]
    return f"scan {scan}", len(jpeg), decode_image(jpeg)
