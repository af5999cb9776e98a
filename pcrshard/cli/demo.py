"""The demonstration: encode photographs, then train a small network from scan 2 and from full fidelity."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

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
from ..integrations.webdataset import JpegHandler, WebDataset, WebLoader
from ..jpeg.pixels import compress, decode_image
from ..reading.dataset_folder import open_dataset
from ..reading.shard import Shard

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


def run_demo(photos: str | None, out: str, *, epochs: int) -> list[Training]:
    """Run the demonstration and print what it finds.

    Args:
        photos: Folder of JPEGs with one sub-folder a class; by default crops of scikit-learn's two sample photographs.
        out: Target folder: new, empty, or of an earlier demonstration, whose files are replaced.
        epochs: Of each training.

    Returns:
        The two trainings, scan 2 and full.

    Raises:
        EncodeError: The folder holds something else.
    """
    _take(out)
    if photos is None:
        print("Cropping scikit-learn's two sample photographs into a two-class set ...")
        photos = _crop_sample_photographs(os.path.join(out, "photos"))
    train, classes = _encode_split(photos, out)
    costs = scan_costs(train)
    print(f"\nWhat a job reads of the {train.num_samples} training images ({', '.join(classes)}):")
    print(scan_table(costs))
    trainings = [_train(out, scan, epochs, len(classes)) for scan in (2, FULL)]
    rows = [
        [t.scan, human_bytes(t.bytes_read), f"{t.images_per_second:.0f}", f"{t.accuracy:.3f}"]
        for t in trainings
    ]
    print(f"\nTraining a small network for {epochs} epochs, validated at full fidelity:")
    print(table(["scan", "bytes read", "images/s", "accuracy"], rows))
    picture = os.path.join(out, "scans.png")
    _draw(out, picture, costs)
    print(
        f"\nScan 2 read {trainings[1].bytes_read / trainings[0].bytes_read:.1f}x fewer bytes. One image at each scan: {picture}"
    )
    return trainings


def _take(out: str) -> None:
    """Make the target folder ours; what a user has there must not be replaced."""
    os.makedirs(out, exist_ok=True)
    marker = os.path.join(out, _MARKER)
    if os.listdir(out) and not os.path.exists(marker):
        raise EncodeError(
            f"expected an empty or a new folder for the demonstration, {out} holds files: use another --out"
        )
    with open(marker, "w", encoding="utf-8") as file:
        file.write("pcrshard demo replaces what is in this folder.\n")


def _crop_sample_photographs(folder: str) -> str:
    """Crops of china.jpg and flower.jpg; training crops left, validation crops right, so that they share no pixel."""
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
        label = os.path.basename(path).partition(".")[0]
        border = image.shape[1] - _CROP - 32
        for part, count, pixels in (
            ("train", 320, image[:, :border]),
            ("val", 80, image[:, border:]),
        ):
            target = os.path.join(folder, label, part)
            os.makedirs(target)
            for i in range(count):
                y, x = (int(rng.integers(0, side - _CROP + 1)) for side in pixels.shape[:2])
                with open(os.path.join(target, f"{i:03d}.jpg"), "wb") as file:
                    file.write(
                        compress(np.ascontiguousarray(pixels[y : y + _CROP, x : x + _CROP]), 90)
                    )
    return folder


def _encode_split(photos: str, out: str) -> tuple[DatasetIndex, tuple[str, ...]]:
    """Encode training and validation images; without train/val sub-folders one image in five is for validation."""
    source = list_source(photos)
    if len(source.classes) < 2:
        raise EncodeError(
            f"expected at least two classes, one sub-folder each, got {len(source.classes)}",
            url=photos,
        )
    rng = random.Random(0)
    rows: dict[str, list[dict[str, Any]]] = {"train": [], "val": []}
    for sample in source.samples:
        part = sample.key.split("/")[1]
        part = part if part in rows else rng.choices(["train", "val"], [4, 1])[0]
        label = source.classes[int(dict(sample.known)["cls"])]
        rows[part].append({"path": os.path.abspath(sample.refs[0].url), "label": label})
    indexes = []
    for part, lines in rows.items():
        dst, path = os.path.join(out, part), os.path.join(out, f"{part}.jsonl")
        shutil.rmtree(dst, ignore_errors=True)
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        started = time.monotonic()
        indexes.append(encode(path, dst, EncodeOptions(name=part, on_error="skip")))
        print(
            f"Encoded {indexes[-1].num_samples} images into {dst} in {time.monotonic() - started:.1f} s."
        )
    return indexes[0], source.classes


def _loader(folder: str, scan: Scan, *, training: bool) -> Any:
    """A stock WebDataset pipeline with ``.pcr_scan(scan)`` added."""
    _, urls = open_dataset(folder)
    shuffled = len(urls) if training else False
    dataset = WebDataset(
        urls, shardshuffle=shuffled, detshuffle=training, empty_check=False
    ).pcr_scan(scan, index=folder)
    if training:
        dataset = dataset.shuffle(500)
    dataset = (
        dataset.decode(JpegHandler("torchrgb8"))
        .to_tuple("jpg", "cls")
        .map_tuple(_shrink, int)
        .batched(32)
    )
    workers = min(_LOADER_WORKERS, len(urls))
    return WebLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=True)


def _shrink(image: torch.Tensor) -> torch.Tensor:
    """(3, H, W) uint8 to (3, 64, 64) float32 around 0."""
    floats = image[None].to(torch.float32) / 127.5 - 1
    return nn.functional.interpolate(floats, (_INPUT, _INPUT), mode="bilinear", antialias=True)[0]


def _train(out: str, scan: Scan, epochs: int, num_classes: int) -> Training:
    torch.manual_seed(0)
    folder = os.path.join(out, "train")
    model = _network(num_classes)
    optimiser = torch.optim.AdamW(model.parameters(), 2e-3)
    loader = _loader(folder, scan, training=True)
    images, seconds = 0, 0.0
    for _ in range(epochs):
        started = time.monotonic()
        for batch, labels in loader:
            loss = nn.functional.cross_entropy(model(batch), labels)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
            optimiser.step()
            images += len(batch)
        seconds += time.monotonic() - started
    bytes_read = epochs * open_dataset(folder)[0].prefix_bytes(scan)
    return Training(scan, bytes_read, images / seconds, _accuracy(model, os.path.join(out, "val")))


def _network(num_classes: int) -> nn.Module:
    def stage(channels: int, wider: int) -> Iterator[nn.Module]:
        yield nn.Conv2d(channels, wider, 3, stride=2, padding=1, bias=False)
        yield nn.BatchNorm2d(wider)
        yield nn.ReLU()

    stages = [layer for pair in ((3, 16), (16, 32), (32, 64)) for layer in stage(*pair)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))


@torch.no_grad()
def _accuracy(model: nn.Module, folder: str) -> float:
    model.eval()
    right = total = 0
    for batch, labels in _loader(folder, FULL, training=False):
        right += int((model(batch).argmax(1) == labels).sum())
        total += len(labels)
    return right / total


def _draw(out: str, picture: str, costs: Any) -> None:
    """One validation image at several scans, above the bars."""
    index, urls = open_dataset(os.path.join(out, "val"))
    images = []
    for scan in (1, 2, 3, 5, 6, index.num_groups):
        jpeg = next(Shard(urls[0]).samples(scan))["jpg"]
        if isinstance(jpeg, bytes):
            images.append((f"scan {scan}", len(jpeg), decode_image(jpeg)))
    plots.plot_ladder(images, costs, picture, title="One image at each scan, and what a scan costs")
