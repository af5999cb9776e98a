"""The demonstration: a small network, trained from scan 2 and from full fidelity."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from ..encoding.encode_dataset import EncodeOptions, encode
from ..encoding.sources import list_source
from ..errors import EncodeError, MissingDependency
from ..fidelity import plots
from ..fidelity.costs import human_bytes, scan_costs, scan_table, table
from ..format.dataset_index import DatasetIndex
from ..format.scan import FULL, Scan
from ..jpeg.image_decoder import ImageDecoder
from ..jpeg.other_formats import compress
from ..jpeg.pixels import Pixels, decode_image
from ..reading.dataset_folder import open_dataset
from ..reading.shard import Shard
from ..training.dataset import PCRDataset
from ..training.loader import PCRLoader
from .parser import Report

_CROP = 256
_INPUT = 64
_BATCH = 32
_MARKER = ".pcrshard-demo"


class Training(NamedTuple):
    """The bytes that a training run read, and its validation accuracy."""

    scan: Scan
    bytes_read: int
    accuracy: float


def run_demo(photos: str | None, out: str, *, epochs: int) -> Report:
    """Run the demonstration.

    Args:
        photos: Folder of JPEGs with one subfolder per class, or of ``train`` and ``val`` with one
            subfolder per class each; by default crops of scikit-learn's two sample photographs.
        out: Target folder: new, empty, or of an earlier demonstration, whose files are replaced.
        epochs: Epochs of each training run.

    Raises:
        EncodeError: The folder holds something else.
        MissingDependency: matplotlib or scikit-learn is not installed.
    """
    folder = Path(out)
    picture = str(folder / "scans.png")
    # What is missing is found before anything is written.
    plots.pyplot_module()
    images = None if photos else _sample_photographs()
    _claim(folder)
    if images is not None:
        _say("Cropping scikit-learn's two sample photographs into a two-class set ...")
        photos = str(folder / "photos")
        _write_crops(images, Path(photos))
    assert photos is not None
    train = _encode_sets(photos, folder)
    costs = scan_costs(train)
    _say(f"Training a small network for {epochs} epochs at scan 2, then at full fidelity ...")
    low, full = trainings = [_train(folder, scan, epochs) for scan in (2, FULL)]

    index, urls = open_dataset(folder / "val")
    jpegs = {
        scan: next(Shard(urls[0]).samples(scan))["jpg"]
        for scan in (1, 2, 3, 5, 6, index.num_groups)
    }
    ladder = [(f"scan {scan}", len(jpeg), decode_image(jpeg)) for scan, jpeg in jpegs.items()]
    title = "One image at each scan, and what a scan costs"
    plots.plot_ladder(ladder, costs, picture, title=title)

    rows = [[scan, human_bytes(size), f"{accuracy:.3f}"] for scan, size, accuracy in trainings]
    lines = [
        f"A job that reads the {train.num_samples} training images ({', '.join(train.classes)}):",
        scan_table(costs),
        f"\nA small network after {epochs} epochs, validated at full fidelity:",
        table(["scan", "bytes read", "accuracy"], rows),
        f"\nScan 2 read {full.bytes_read / low.bytes_read:.1f}x fewer bytes.",
        f"One image at each scan: {picture}",
    ]
    figures = {"trainings": trainings, "scans": costs, "picture": picture}
    return Report(figures, "\n".join(lines))


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _claim(folder: Path) -> None:
    """Refuse a folder with files of the user; mark a new one."""
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder / _MARKER
    if any(folder.iterdir()) and not marker.exists():
        raise EncodeError(
            "expected an empty or a new folder for the demonstration, "
            f"{folder} holds files: use another --out"
        )
    marker.write_text("pcrshard demo replaces what is in this folder.\n")


def _sample_photographs() -> dict[str, Pixels]:
    """china.jpg and flower.jpg, as (H, W, 3) uint8."""
    try:
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise MissingDependency(
            "scikit-learn is not installed: pip install 'pcrshard[train]'"
        ) from error
    found = load_sample_images()
    return {
        Path(name).stem: image for name, image in zip(found.filenames, found.images, strict=True)
    }


def _write_crops(images: dict[str, Pixels], folder: Path) -> None:
    """Random crops, for training from the left and for validation from the right.

    They share no pixel.
    """
    shutil.rmtree(folder, ignore_errors=True)
    rng = np.random.default_rng(0)
    for label, image in images.items():
        border = image.shape[1] - _CROP - 32
        for name, part, count in (
            ("train", image[:, :border], 320),
            ("val", image[:, border:], 80),
        ):
            (folder / name / label).mkdir(parents=True)
            for number in range(count):
                y, x = (rng.integers(0, side - _CROP + 1) for side in part.shape[:2])
                crop = np.ascontiguousarray(part[y : y + _CROP, x : x + _CROP])
                (folder / name / label / f"{number:03d}.jpg").write_bytes(compress(crop, 90))


def _encode_sets(photos: str, out: Path) -> DatasetIndex:
    """Encode training and validation images into ``out/train`` and ``out/val``.

    Returns:
        The index of the training images.
    """
    indexes = []
    for name, (src, options) in _find_sets(photos, out).items():
        target = out / name
        shutil.rmtree(target, ignore_errors=True)
        index = encode(src, target, replace(options, name=name, on_error="skip"))
        _say(f"Encoded {index.num_samples} images into {target}.")
        indexes.append(index)
    return indexes[0]


def _find_sets(photos: str, out: Path) -> dict[str, tuple[str, EncodeOptions]]:
    """The source and the options of the training images, then those of the validation images.

    Of a folder without splits, one image in five validates.
    """
    names = ("train", "val")
    source = list_source(os.path.abspath(photos))
    if source.splits:
        if not {*source.splits} >= {*names}:
            found = ", ".join(source.splits)
            raise EncodeError(f"expected folders train and val, got {found}", url=photos)
        return {name: (photos, EncodeOptions(split=name)) for name in names}
    if len(source.classes) < 2:
        raise EncodeError(
            f"expected at least two classes, one subfolder each, got {len(source.classes)}",
            url=photos,
        )
    rng = random.Random(0)
    rows: dict[str, list[str]] = {name: [] for name in names}
    for sample in source.samples:
        (name,) = rng.choices(names, [4, 1])
        label = sample.key.partition("/")[0]
        rows[name].append(json.dumps({"path": sample.refs[0].url, "label": label}))
    for name, lines in rows.items():
        (out / f"{name}.jsonl").write_text("\n".join(lines))
    options = EncodeOptions(classes=source.classes)
    return {name: (str(out / f"{name}.jsonl"), options) for name in names}


def _loader(folder: Path, scan: Scan, *, shuffle: bool = True) -> PCRLoader:
    decoder = ImageDecoder(_INPUT)
    dataset = PCRDataset(str(folder), scan=scan, decoder=decoder, fields=("jpg", "cls"))
    # One lane in this process reads each shard exactly once in an epoch.
    return PCRLoader(dataset, _BATCH, shuffle=shuffle, drop_last=False, lanes_per_rank=1)


def _train(out: Path, scan: Scan, epochs: int) -> Training:
    torch.manual_seed(0)
    index, _ = open_dataset(out / "train")
    # Three convolutions, each halving the side, and a linear layer.
    layers: list[nn.Module] = []
    for channels, wider in ((3, 16), (16, 32), (32, 64)):
        layers += [
            nn.Conv2d(channels, wider, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(wider),
            nn.ReLU(),
        ]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, index.num_classes)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    loader = _loader(out / "train", scan)
    for _ in range(epochs):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images / 127.5 - 1), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
            optimizer.step()
    return Training(scan, epochs * index.prefix_bytes(scan), _accuracy(model, out / "val"))


@torch.no_grad()
def _accuracy(model: nn.Module, folder: Path) -> float:
    model.eval()
    right = total = 0
    for images, labels in _loader(folder, FULL, shuffle=False):
        right += int((model(images / 127.5 - 1).argmax(1) == labels).sum())
        total += len(labels)
    return right / total
