"""The demonstration: train a small network at scan 2 and at full fidelity."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ..encoding.encode_dataset import EncodeOptions, encode
from ..encoding.sources import find_splits, list_source
from ..errors import EncodeError, MissingDependency
from ..fidelity.contact_sheet import contact_sheet
from ..fidelity.costs import scan_costs
from ..fidelity.msssim import require_opencv
from ..fidelity.plots import figure_class
from ..format.scan import FULL
from ..jpeg.image_decoder import ImageDecoder
from ..jpeg.other_formats import compress
from ..reading.dataset_folder import open_dataset
from ..training.dataset import PCRDataset
from ..training.loader import PCRLoader
from .parser import Report
from .progress import ProgressBar

_CROP = 256
_INPUT = 64
_BATCH = 32


def run_demo(photos: str | None, out: str, *, epochs: int) -> Report:
    """Run the demonstration.

    Args:
        photos: Folder of JPEGs with one subfolder per class, or of ``train`` and ``val`` with one
            subfolder per class each. Defaults to crops of scikit-learn's two sample photographs.
        out: Target folder, new or empty.
        epochs: Epochs of each training run.

    Raises:
        EncodeError: The target folder contains files.
        MissingDependency: matplotlib, OpenCV or scikit-learn is not installed.
    """
    # Detect missing dependencies before writing anything.
    figure_class()
    require_opencv()
    folder = Path(out)
    if folder.exists() and os.listdir(folder):
        raise EncodeError(
            f"expected an empty or new folder for the demonstration, got {out}, which contains "
            "files; use another --out"
        )
    if photos is None:
        photos = os.path.join(out, "photos")
        _write_crops(Path(photos))
    train, val = _encode_sets(os.path.abspath(photos), folder)
    url = str(folder / "train")
    index, _ = open_dataset(url)
    trainings = [
        {
            "scan": scan,
            "bytes_read": epochs * index.prefix_bytes(scan),
            "accuracy": _train(train.at(scan), val, epochs),
        }
        for scan in (2, FULL)
    ]
    picture = str(folder / "scans.png")
    contact_sheet(url, picture, num_images=1)
    return Report({"picture": picture, "scans": scan_costs(index), "trainings": trainings})


def _write_crops(folder: Path) -> None:
    """Write random crops of scikit-learn's photographs, a class for each.

    Training crops are from the left part and validation crops from the right; the two share no
    pixels.
    """
    try:
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise MissingDependency(
            "scikit-learn is not installed: pip install 'pcrshard[demo]'"
        ) from error
    found = load_sample_images()
    rng = np.random.default_rng(0)
    for name, image in zip(found.filenames, found.images, strict=True):
        border = image.shape[1] - _CROP - 32
        for split, part, count in (
            ("train", image[:, :border], 128),
            ("val", image[:, border:], 32),
        ):
            target = folder / split / Path(name).stem
            target.mkdir(parents=True)
            for number in range(count):
                y, x = (rng.integers(0, side - _CROP + 1) for side in part.shape[:2])
                crop = np.ascontiguousarray(part[y : y + _CROP, x : x + _CROP])
                (target / f"{number:03d}.jpg").write_bytes(compress(crop, 90))


def _encode_sets(photos: str, out: Path) -> list[PCRDataset]:
    """Encode the photographs, and open the training and validation sets.

    In a folder without splits, one image in five per class is used for validation.
    """
    splits = ("train", "val") if find_splits(photos) else (None,)
    source = list_source(photos, split=splits[0])
    if len(source.classes) < 2:
        raise EncodeError(
            f"expected at least two classes, one subfolder per class, got {len(source.classes)}",
            url=photos,
        )
    datasets = []
    for split in splits:
        target = str(out / (split or "train"))
        with ProgressBar("encode", "images") as progress:
            options = EncodeOptions(split=split, on_error="skip")
            encode(photos, target, options, progress=progress)
        decoder = ImageDecoder(_INPUT)
        datasets.append(PCRDataset(target, decoder=decoder, fields=("jpg", "cls")))
    return datasets if len(splits) > 1 else datasets[0].split([0.8, 0.2], stratify=True)


def _train(train: PCRDataset, val: PCRDataset, epochs: int) -> float:
    """Train a small network, and return its validation accuracy at full fidelity."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(3))
    # Three convolutions, each halving the side, and a linear layer.
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1)
        model.extend([convolution, nn.BatchNorm2d(outputs), nn.ReLU()])
    model.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, train.num_classes)])
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    # A single lane in this process reads each shard exactly once per epoch.
    loader = PCRLoader(train, _BATCH, drop_last=False, lanes_per_rank=1)
    with ProgressBar("train", "epochs") as progress:
        for epoch in range(epochs):
            for images, labels in loader:
                loss = nn.functional.cross_entropy(model(images.float()), labels)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
                optimizer.step()
            progress(epoch + 1, epochs)
    model.eval()
    with torch.no_grad():
        right = [
            (model(images.float()).argmax(1) == labels).float()
            for images, labels in PCRLoader(val, _BATCH, shuffle=False, drop_last=False)
        ]
    return float(torch.cat(right).mean())
