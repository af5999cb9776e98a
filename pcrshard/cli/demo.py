"""The demonstration: a small network, trained from scan 2 and from full fidelity."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..encoding.encode_dataset import EncodeOptions, encode
from ..encoding.sources import Source, list_source
from ..errors import EncodeError, MissingDependency
from ..fidelity import plots
from ..fidelity.costs import ScanCost, human_bytes, scan_costs, scan_table, table
from ..format.dataset_index import DatasetIndex
from ..format.scan import FULL, Scan
from ..integrations.webdataset import JpegHandler, WebDataset, WebLoader
from ..jpeg.pixels import Pixels, compress, decode_image
from ..reading.dataset_folder import open_dataset
from ..reading.shard import Shard
from ..training.shard_lists import ShardOrder

_CROP = 256
_INPUT = 64
_LOADER_WORKERS = 2
_MARKER = ".pcrshard-demo"


class Training(NamedTuple):
    """What a training read and reached."""

    scan: Scan
    bytes_read: int
    images_per_second: float
    accuracy: float


def run_demo(
    photos: str | None,
    out: str,
    *,
    epochs: int,
) -> list[Training]:
    """Run the demonstration and print what it finds.

    Args:
        photos: Folder of JPEGs with one sub-folder a class; by default crops of scikit-learn's
            two sample photographs.
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
    train, classes = _encode_split(photos, folder)
    costs = scan_costs(train)
    print(f"\nWhat a job reads of the {train.num_samples} training images ({', '.join(classes)}):")
    print(scan_table(costs))

    trainings = [_train(folder, scan, epochs, len(classes)) for scan in (2, FULL)]
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
    rows = [
        [t.scan, human_bytes(t.bytes_read), f"{t.images_per_second:.0f}", f"{t.accuracy:.3f}"]
        for t in trainings
    ]
    return table(["scan", "bytes read", "images/s", "accuracy"], rows)


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
        label = folder / Path(path).stem
        border = image.shape[1] - _CROP - 32
        _write_crops(image[:, :border], label / "train", 320, rng)
        _write_crops(image[:, border:], label / "val", 80, rng)


def _write_crops(
    image: Pixels,
    folder: Path,
    count: int,
    rng: np.random.Generator,
) -> None:
    folder.mkdir(parents=True)
    height, width, _ = image.shape
    for number in range(count):
        y = rng.integers(0, height - _CROP + 1)
        x = rng.integers(0, width - _CROP + 1)
        crop = np.ascontiguousarray(image[y : y + _CROP, x : x + _CROP])
        (folder / f"{number:03d}.jpg").write_bytes(compress(crop, 90))


def _encode_split(photos: str, out: Path) -> tuple[DatasetIndex, tuple[str, ...]]:
    """Encode training and validation images.

    Returns:
        The index of the training images, and the names of the classes.
    """
    source = list_source(os.path.abspath(photos))
    if len(source.classes) < 2:
        raise EncodeError(
            f"expected at least two classes, one sub-folder each, got {len(source.classes)}",
            url=photos,
        )
    indexes = {}
    for part, rows in _split(source).items():
        dst = out / part
        listed = out / f"{part}.jsonl"
        shutil.rmtree(dst, ignore_errors=True)
        listed.write_text("".join(json.dumps(row) + "\n" for row in rows))
        started = time.monotonic()
        index = encode(listed, dst, EncodeOptions(name=part, on_error="skip"))
        seconds = time.monotonic() - started
        print(f"Encoded {index.num_samples} images into {dst} in {seconds:.1f} s.")
        indexes[part] = index
    return indexes["train"], source.classes


def _split(source: Source) -> dict[str, list[dict[str, str]]]:
    """Rows of two lists: by train/val sub-folders; without them one image in five validates."""
    rng = random.Random(0)
    rows: dict[str, list[dict[str, str]]] = {"train": [], "val": []}
    for sample in source.samples:
        label, part, *_ = sample.key.split("/")
        if part not in rows:
            (part,) = rng.choices(["train", "val"], [4, 1])
        rows[part].append({"path": sample.refs[0].url, "label": label})
    return rows


def _loader(
    folder: Path,
    scan: Scan,
    *,
    training: bool,
) -> Any:
    """A stock WebDataset pipeline with ``.pcr_scan(scan)`` added."""
    _, urls = open_dataset(folder)
    shards = ShardOrder(urls) if training else urls
    dataset = WebDataset(shards, shardshuffle=False, empty_check=False)
    dataset = dataset.pcr_scan(scan, index=str(folder))
    if training:
        dataset = dataset.shuffle(500)
    dataset = dataset.decode(JpegHandler("torchrgb8")).to_tuple("jpg", "cls")
    dataset = dataset.map_tuple(_shrink, int).batched(32)
    workers = min(_LOADER_WORKERS, len(urls))
    return WebLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=True)


def _shrink(image: torch.Tensor) -> torch.Tensor:
    """(3, H, W) uint8 to (3, 64, 64) float32 around 0."""
    floats = image[None].to(torch.float32) / 127.5 - 1
    return nn.functional.interpolate(floats, (_INPUT, _INPUT), mode="bilinear", antialias=True)[0]


def _train(
    out: Path,
    scan: Scan,
    epochs: int,
    num_classes: int,
) -> Training:
    torch.manual_seed(0)
    folder = out / "train"
    model = _network(num_classes)
    optimiser = torch.optim.AdamW(model.parameters(), 2e-3)
    loader = _loader(folder, scan, training=True)
    images = 0
    started = time.monotonic()
    for _ in range(epochs):
        for batch, labels in loader:
            loss = nn.functional.cross_entropy(model(batch), labels)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
            optimiser.step()
            images += len(batch)
    rate = images / (time.monotonic() - started)
    index, _ = open_dataset(folder)
    return Training(scan, epochs * index.prefix_bytes(scan), rate, _accuracy(model, out / "val"))


def _network(num_classes: int) -> nn.Module:
    """Three convolutions, each halving the side, and a linear layer."""
    layers: list[nn.Module] = []
    for channels, wider in ((3, 16), (16, 32), (32, 64)):
        layers.append(nn.Conv2d(channels, wider, 3, stride=2, padding=1, bias=False))
        layers.append(nn.BatchNorm2d(wider))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))


@torch.no_grad()
def _accuracy(model: nn.Module, folder: Path) -> float:
    model.eval()
    right = total = 0
    for batch, labels in _loader(folder, FULL, training=False):
        right += int((model(batch).argmax(1) == labels).sum())
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
    images = []
    for scan in (1, 2, 3, 5, 6, index.num_groups):
        jpeg = next(shard.samples(scan))["jpg"]
        images.append((f"scan {scan}", len(jpeg), decode_image(jpeg)))
    plots.plot_ladder(images, costs, picture, title="One image at each scan, and what a scan costs")
