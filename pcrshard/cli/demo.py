"""The demonstration: train a small network at scan 2 and at full fidelity."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ..encoding.encode_dataset import EncodeOptions, encode
from ..encoding.sources import list_source
from ..errors import EncodeError, MissingDependency
from ..fidelity.contact_sheet import contact_sheet
from ..fidelity.costs import record_table, scan_costs
from ..fidelity.msssim import require_opencv
from ..fidelity.plots import figure_class
from ..format.scan import FULL
from ..jpeg.image_decoder import ImageDecoder
from ..jpeg.other_formats import Pixels, compress
from ..reading.dataset_folder import open_dataset
from ..training.dataset import PCRDataset
from ..training.loader import PCRLoader
from .parser import Report

_CROP = 256
_INPUT = 64
_BATCH = 32
_MARKER = ".pcrshard-demo"


def run_demo(photos: str | None, out: str, *, epochs: int) -> Report:
    """Run the demonstration.

    Args:
        photos: Folder of JPEGs with one subfolder per class, or of ``train`` and ``val`` with one
            subfolder per class each. Defaults to crops of scikit-learn's two sample photographs.
        out: Target folder. Must be new, empty, or from an earlier demonstration, whose files are
            replaced.
        epochs: Epochs of each training run.

    Raises:
        EncodeError: The target folder contains other files.
        MissingDependency: matplotlib, OpenCV or scikit-learn is not installed.
    """
    folder = Path(out)
    # Detect missing dependencies before writing anything.
    figure_class()
    require_opencv()
    images = _sample_photographs() if photos is None else {}
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder / _MARKER
    if any(folder.iterdir()) and not marker.exists():
        raise EncodeError(
            "expected an empty or new folder for the demonstration, "
            f"got {folder}, which contains other files; use another --out"
        )
    marker.write_text("pcrshard demo replaces what is in this folder.\n")
    if photos is None:
        _say("Cropping scikit-learn's two sample photographs into a two-class set ...")
        photos = str(folder / "photos")
        _write_crops(images, Path(photos))
    train, val = _encode_sets(photos, folder)
    index, _ = open_dataset(folder / "train")
    costs = scan_costs(index)
    _say(f"Training a small network for {epochs} epochs at scan 2, then at full fidelity ...")
    trainings = [
        {
            "scan": scan,
            "bytes_read": epochs * index.prefix_bytes(scan),
            "accuracy": _train(train.at(scan), val, epochs),
        }
        for scan in (2, FULL)
    ]
    saving = index.prefix_bytes(FULL) / index.prefix_bytes(2)
    picture = str(folder / "scans.png")
    contact_sheet(str(folder / "train"), picture, [1, 2, 3, 5, 6], num_images=1)
    lines = [
        f"A job that reads {index.num_samples} images ({', '.join(index.classes)}):",
        record_table(costs),
        f"\nA small network after {epochs} epochs, validated at full fidelity:",
        record_table(trainings),
        f"\nScan 2 read {saving:.1f}x fewer bytes.",
        f"One image at each scan: {picture}",
    ]
    figures = {"trainings": trainings, "scans": costs, "picture": picture}
    return Report(figures, "\n".join(lines))


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _sample_photographs() -> dict[str, Pixels]:
    """Return china.jpg and flower.jpg, each as (H, W, 3) uint8."""
    try:
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise MissingDependency(
            "scikit-learn is not installed: pip install 'pcrshard[demo]'"
        ) from error
    found = load_sample_images()
    return {
        Path(name).stem: image for name, image in zip(found.filenames, found.images, strict=True)
    }


def _write_crops(images: dict[str, Pixels], folder: Path) -> None:
    """Write random crops: training crops from the left part, validation crops from the right.

    The two parts share no pixels.
    """
    shutil.rmtree(folder, ignore_errors=True)
    rng = np.random.default_rng(0)
    for label, image in images.items():
        border = image.shape[1] - _CROP - 32
        for name, part, count in (
            ("train", image[:, :border], 128),
            ("val", image[:, border:], 32),
        ):
            (folder / name / label).mkdir(parents=True)
            for number in range(count):
                y, x = (rng.integers(0, side - _CROP + 1) for side in part.shape[:2])
                crop = np.ascontiguousarray(part[y : y + _CROP, x : x + _CROP])
                (folder / name / label / f"{number:03d}.jpg").write_bytes(compress(crop, 90))


def _encode_sets(photos: str, out: Path) -> list[PCRDataset]:
    """Encode the photographs, and open the training and validation sets.

    In a folder without splits, one image in five per class is used for validation.
    """
    source = list_source(os.path.abspath(photos))
    splits = ("train", "val") if source.splits else (None,)
    if len(source.classes) < 2:
        raise EncodeError(
            f"expected at least two classes, one subfolder per class, got {len(source.classes)}",
            url=photos,
        )
    datasets = []
    for split in splits:
        name = split or "train"
        target = out / name
        shutil.rmtree(target, ignore_errors=True)
        index = encode(photos, target, EncodeOptions(name=name, split=split, on_error="skip"))
        _say(f"Encoded {index.num_samples} images into {target}.")
        decoder = ImageDecoder(_INPUT)
        datasets.append(PCRDataset(str(target), decoder=decoder, fields=("jpg", "cls")))
    return datasets if source.splits else datasets[0].split([0.8, 0.2], stratify=True)


def _train(train: PCRDataset, val: PCRDataset, epochs: int) -> float:
    """Train a small network, and return its validation accuracy at full fidelity."""
    torch.manual_seed(0)
    # Three convolutions, each halving the side, and a linear layer.
    layers: list[nn.Module] = []
    for channels, wider in ((3, 16), (16, 32), (32, 64)):
        layers += [
            nn.Conv2d(channels, wider, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(wider),
            nn.ReLU(),
        ]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, train.num_classes)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    # A single lane in this process reads each shard exactly once per epoch.
    loader = PCRLoader(train, _BATCH, drop_last=False, lanes_per_rank=1)
    for _ in range(epochs):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images / 127.5 - 1), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
            optimizer.step()
    model.eval()
    with torch.no_grad():
        right = [
            (model(images / 127.5 - 1).argmax(1) == labels).float()
            for images, labels in PCRLoader(val, _BATCH, shuffle=False, drop_last=False)
        ]
    return float(torch.cat(right).mean())
