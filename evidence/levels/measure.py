"""Every image at one scan of a script, or each where a further byte is worth less than a slope.

A row of an image has, after each scan of q95 and of standard: bytes, loss as levels count it,
MS-SSIM, and for photographs of ImageNet the probability that two networks give the right class.
Rows of ``rivals`` have the same of copies by Pillow, at several qualities; rows of ``sizes`` of
what a crop of 224 pixels shows, with the loss that levels count for that size.
"""

import functools
import glob
import io
import os
import pathlib
import re
import time

import numpy as np
import torch
from PIL import Image

from pcrshard import ImageDecoder, decode_image
from pcrshard.encoding.encode_jpeg import measure_scans
from pcrshard.errors import FormatError
from pcrshard.fidelity.msssim import Reference, count_scales
from pcrshard.format.scan_script import Q95, STANDARD
from pcrshard.jpeg.markers import map_jpeg
from pcrshard.jpeg.pixels import fit_scans, make_progressive

from .. import ROOT
from ..lites import Classifier, pretrained
from .figures import ENDS, QUALITIES, Images, by_set

SETS = (
    "imagenet", "flowers", "cars", "pets_progressive", "ham10000", "faces_1024",
    "animal_faces_512",
)  # fmt: skip
SCRIPTS = {"q95": Q95, "standard": STANDARD}
SHORTER = 256
# Megapixels of copies of the largest photographs; 0 leaves them as they are.
MEGAPIXELS = (0.2, 2, 0)
TRAIN_SIZE = 224
ROUNDS = 15


@functools.cache
def networks():
    """Each network with the decoder of what it looks at."""
    sizes = {"lite0": 224, "lite2": 260}
    return {
        name: (Classifier(pretrained(name)), ImageDecoder(size, "center"))
        for name, size in sizes.items()
    }


@functools.cache
def synsets():
    """The number of each class of ImageNet, by the name that photographs' files begin with."""
    with open(os.path.join(ROOT, "evidence", "imagenet", "synsets.txt")) as file:
        return {name: number for number, name in enumerate(file.read().split())}


def prefixes(jpeg, script):
    """The JPEG up to each scan of a script."""
    source = map_jpeg(jpeg)
    progressive = make_progressive(jpeg, source, fit_scans(script.scans, source))
    return [progressive.jpeg[:stop] for stop in progressive.starts[1:]]


def label_of(image):
    """The class of a photograph of ImageNet by its name; None of others."""
    found = re.search(r"n\d{8}", image)
    return found and synsets()[found[0]]


def row_of(image, jpeg):
    """What is measured of an image."""
    label = label_of(image)
    row = {"bytes": len(jpeg)}
    for name, script in SCRIPTS.items():
        parts = prefixes(jpeg, script)
        scans = measure_scans(jpeg, script, 0)
        pictures = [decode_image(part, upright=False) for part in parts]
        reference = Reference(pictures[-1])
        row[name] = {
            "bytes": scans.sizes.astype(int).tolist(),
            "loss": [float(f"{loss:.4g}") for loss in scans.losses],
            "msssim": [round(reference.compare(picture), 5) for picture in pictures],
        }
        if label is not None:
            row[name] |= seen_of(parts, label)
    return row


def seen_of(jpegs, label):
    """What two networks make of some files, for a row."""
    row = {}
    for network, (classify, decoder) in networks().items():
        seen = [np.ascontiguousarray(decoder(jpeg, 0)) for jpeg in jpegs]
        scores = classify(torch.as_tensor(np.stack(seen)))
        row[network] = [round(p, 4) for p in torch.softmax(scores, 1)[:, label].tolist()]
        row[f"{network}_top1"] = (scores.argmax(1) == label).int().tolist()
    return row


def copied(picture, quality):
    """A progressive JPEG with optimal Huffman codes and half of the chroma."""
    target = io.BytesIO()
    picture.save(target, "JPEG", quality=quality, optimize=True, progressive=True)
    return target.getvalue()


def rivals_of(jpeg, label):
    """What copies of a photograph take and show."""
    with Image.open(io.BytesIO(jpeg)) as opened:
        picture = opened.convert("RGB")
    reference = Reference(decode_image(jpeg, upright=False))
    small = picture.copy()
    scale = SHORTER / min(picture.size)
    if scale < 1:
        small = picture.resize([round(scale * side) for side in picture.size], Image.BICUBIC)
    row = {}
    for name, source in {"recompressed": picture, "resized": small}.items():
        files = [copied(source, quality) for quality in QUALITIES[name]]
        row[name] = {"bytes": [*map(len, files)]} | seen_of(files, label)
        if source is picture:
            found = [reference.compare(decode_image(file)) for file in files]
            row[name]["msssim"] = [round(value, 5) for value in found]
    return row


def shrunk(jpeg, megapixels):
    """A copy of quality 95 with this many pixels, or the JPEG itself."""
    if not megapixels:
        return jpeg
    with Image.open(io.BytesIO(jpeg)) as picture:
        scale = (1e6 * megapixels / (picture.width * picture.height)) ** 0.5
        sides = [round(scale * side) for side in picture.size]
        target = io.BytesIO()
        picture.resize(sides, Image.LANCZOS).save(target, "JPEG", quality=95)
    return target.getvalue()


def size_row(jpeg):
    """Bytes after each scan of q95, MS-SSIM of a crop of 224 pixels, and two losses."""
    parts = prefixes(jpeg, Q95)
    decoder = ImageDecoder(TRAIN_SIZE, "center")
    pictures = [np.ascontiguousarray(decoder(part, 0)).transpose(1, 2, 0) for part in parts]
    reference = Reference(pictures[-1])
    general, sized = (measure_scans(jpeg, Q95, size) for size in (0, TRAIN_SIZE))
    return {
        "q95": {
            "bytes": general.sizes.astype(int).tolist(),
            "loss": [float(f"{loss:.4g}") for loss in general.losses],
            "loss224": [float(f"{loss:.4g}") for loss in sized.losses],
            "msssim": [round(reference.compare(picture), 5) for picture in pictures],
        }
    }


def decoding(lab):
    """CPU milliseconds to decode crops of 224 pixels from scans of q95, from levels of as many
    bytes, and from levels of the same mean class probability (of two networks, over all
    photographs), by turns: medians of the rounds, and of their ratios to the scan's.
    """
    folder = lab.unpacked("photos")
    rows = by_set(lab.rows())["imagenet"]
    images, found = Images(rows, "q95"), []
    every = np.arange(len(rows))
    cuts = images.cuts()
    sizes = images.bytes[every, cuts].mean(1)
    chances = images.values("lite0") + images.values("lite2")
    paths = [glob.glob(os.path.join(folder, "imagenet", "*", row["image"]))[0] for row in rows]
    parts = [prefixes(pathlib.Path(path).read_bytes(), Q95) for path in paths[::4]]
    decoder = ImageDecoder(TRAIN_SIZE, "center")
    for end in ENDS["q95"][1::2]:
        as_likely = np.maximum.accumulate(chances[every, cuts].mean(1)[sizes.argsort()])
        same = np.interp(chances[:, end].mean(), as_likely, np.sort(sizes))
        stops = {
            "scan": np.full(len(rows), end),
            "bytes": cuts[np.abs(sizes - images.bytes[:, end].mean()).argmin()],
            "accuracy": cuts[np.abs(sizes - same).argmin()],
        }
        seconds = {name: [] for name in stops}
        for _ in range(ROUNDS):
            for name, stop in stops.items():
                begun = time.process_time()
                for part, last in zip(parts, stop[::4], strict=True):
                    decoder(part[last], 0)
                seconds[name].append(time.process_time() - begun)
        row = {"group": 2 + ENDS["q95"].index(end)}
        for name, stop in stops.items():
            row[name] = {
                "bytes": images.bytes[every, stop].mean(),
                "ms": 1000 * float(np.median(seconds[name])) / len(parts),
                "ratio": float(np.median(np.divide(seconds[name], seconds["scan"]))),
            }
        found.append(row)
    return found


def colors(lab, name):
    """The photographs of a set that have three components and that MS-SSIM can compare."""
    for path in sorted(glob.glob(os.path.join(lab.unpacked("photos"), name, "*", "*"))):
        jpeg = pathlib.Path(path).read_bytes()
        try:
            frame = map_jpeg(jpeg).frame
        except FormatError as error:
            print(f"left out {os.path.basename(path)}: {error}", flush=True)
            continue
        if len(frame.components) == 3 and count_scales(frame.height, frame.width):
            yield os.path.basename(path), jpeg


def measure(lab, parts=()):
    """A row for each color photograph of each set, and the parts that are missing."""
    for name in parts or SETS:
        for image, jpeg in colors(lab, name):
            for key in lab.missing([{"set": name, "image": image}]):
                lab.append(key | row_of(image, jpeg))
    for image, jpeg in colors(lab, "imagenet"):
        for key in lab.missing([{"image": image}], "rivals"):
            lab.append(key | rivals_of(jpeg, label_of(image)), "rivals")
    for name in ("imagenet", "faces_1024", "large"):
        for image, jpeg in colors(lab, name):
            for megapixels in MEGAPIXELS if name == "large" else (0,):
                key = {"set": name, "megapixels": megapixels, "image": image}
                for _ in lab.missing([key], "sizes"):
                    lab.append(key | size_row(shrunk(jpeg, megapixels)), "sizes")
    lab.measured("decoding", lambda: decoding(lab))
