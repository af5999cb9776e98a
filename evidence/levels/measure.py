"""Every image at one scan of a script, or each where a further byte is worth less than a slope.

A row of an image has, after each scan of q95 and of standard: bytes, loss as levels count it,
MS-SSIM, and for photographs of ImageNet the probability that two networks give the right class.
"""

import functools
import glob
import os
import re

import numpy as np
import torch

from pcrshard import ImageDecoder, decode_image
from pcrshard.encoding.encode_jpeg import measure_scans
from pcrshard.errors import FormatError
from pcrshard.fidelity.msssim import Reference, count_scales
from pcrshard.format.scan_script import Q95, STANDARD
from pcrshard.jpeg.markers import map_jpeg
from pcrshard.jpeg.pixels import fit_scans, make_progressive

from .. import ROOT
from ..lites import Classifier, pretrained

SETS = (
    "imagenet", "flowers", "cars", "pets_progressive", "ham10000", "faces_1024",
    "animal_faces_512",
)  # fmt: skip
SCRIPTS = {"q95": Q95, "standard": STANDARD}


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


def row_of(path):
    """What is measured of an image."""
    with open(path, "rb") as file:
        jpeg = file.read()
    found = re.search(r"n\d{8}", os.path.basename(path))
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
        if found is None:
            continue
        label = synsets()[found[0]]
        for network, (classify, decoder) in networks().items():
            seen = [np.ascontiguousarray(decoder(part, 0)) for part in parts]
            scores = classify(torch.as_tensor(np.stack(seen)))
            row[name][network] = [round(p, 4) for p in torch.softmax(scores, 1)[:, label].tolist()]
            row[name][f"{network}_top1"] = (scores.argmax(1) == label).int().tolist()
    return row


def measure(lab, parts=()):
    """A row for each color photograph of each set that MS-SSIM can compare."""
    folder = lab.unpacked("photos")
    for name in parts or SETS:
        for path in sorted(glob.glob(os.path.join(folder, name, "*", "*"))):
            key = {"set": name, "image": os.path.basename(path)}
            if [*lab.missing([key])]:
                try:
                    with open(path, "rb") as file:
                        frame = map_jpeg(file.read()).frame
                    if len(frame.components) == 3 and count_scales(frame.height, frame.width):
                        lab.append(key | row_of(path))
                except FormatError as error:
                    print(path, error)
