"""What networks of ImageNet see at each scan.

Each photograph is stored at every scan of two scripts, as it was, and resized once; a network
without any retraining classifies all of them. Rows are appended as each block of photographs ends.
"""

import os
import time

import numpy as np
import torch

import pcrshard
from pcrshard.fidelity.msssim import Reference
from pcrshard.jpeg.pixels import decode_image

from .. import lites
from . import resized
from .photographs import photographs, points, shard_bytes, stored, unfinished

# Four blocks are the photographs of shared/data.
BLOCK = 65
EARLY = 4
# Of other crops than the main one, every other point.
OTHER_CROPS = (160, 288)
SOME = (1, 2, 4, 5, 6, 8, 10, "full")
# (network, crop, smoothing), those first whose figures are read first.
CASES = (
    ("lite0", 224, False),
    ("lite0", 224, True),
    ("lite2", 224, False),
    ("lite0", 160, False),
    ("lite0", 288, False),
    ("lite2", 224, True),
    ("lite2", 160, False),
    ("lite2", 288, False),
    ("lite0", 160, True),
    ("lite0", 288, True),
    ("lite2", 160, True),
    ("lite2", 288, True),
)
# The leading cases use more photographs than those of shared/data.
MOST = 3
QUICK_CASES = (("lite0", 64, False), ("lite0", 64, True))
CPU_IMAGES = 48


def _mark(scores, label):
    """``1`` for the best guess, ``5`` for one of the five best, ``0``."""
    best = scores.topk(5).indices.tolist()
    if best[0] == label:
        return "1"
    return "5" if label in best else "0"


def _see(classify, photograph, crop, smoothing):
    """The mark at each point, by the point's name."""
    decoder = pcrshard.ImageDecoder(crop, "center", smoothing=smoothing)
    wanted = [
        point
        for point in points()
        if (not smoothing or unfinished(point)) and (crop not in OTHER_CROPS or point.scan in SOME)
    ]
    files = stored(photograph.path.read_bytes())
    scores = classify(np.stack([decoder(files[point.name], None) for point in wanted]))
    return {
        point.name: _mark(row, photograph.label) for point, row in zip(wanted, scores, strict=True)
    }


def _measure_block(classify, chosen, key):
    begun = time.process_time()
    seen = [_see(classify, photograph, key["crop"], key["smoothing"]) for photograph in chosen]
    return {
        "number": str(lites.fast_type()),
        "cpu_seconds": time.process_time() - begun,
        "first": chosen[0].path.name,
        "marks": {point: "".join(each[point] for each in seen) for point in seen[0]},
    }


def _classify(lab):
    """What is missing of the rows."""
    chosen = photographs(lab)
    blocks = [chosen[start : start + BLOCK] for start in range(0, len(chosen), BLOCK)]
    cases = [case for case in (QUICK_CASES if lab.quick else CASES) if lites.available(case[0])]
    early = min(len(blocks), EARLY * lab.scale)
    keys = [
        {"network": name, "crop": crop, "smoothing": smoothing, "block": block}
        for number, (name, crop, smoothing) in enumerate(cases)
        for block in range(len(blocks) if number < MOST else early)
    ]
    networks = {}
    for key in lab.missing(keys):
        name = key["network"]
        if name not in networks:
            networks[name] = lites.Classifier(lites.pretrained(name))
        lab.append(key | _measure_block(networks[name], blocks[key["block"]], key))


def _decode_cost(lab):
    """CPU milliseconds to decode, crop and resize a photograph at each point."""
    chosen = photographs(lab)[: 1 if lab.quick else CPU_IMAGES]
    files = [stored(photograph.path.read_bytes()) for photograph in chosen]
    found = {}
    for smoothing in (False, True):
        decoder = pcrshard.ImageDecoder(224, "center", smoothing=smoothing)
        for point in points():
            if not smoothing or unfinished(point):
                name = f"{point.name}{' smooth' if smoothing else ''}"
                found[name] = resized.milliseconds(decoder, [file[point.name] for file in files])
    return {"images": len(files), "milliseconds": found}


def _guesses(lab):
    """The best guess of Lite0 for each photograph at each point, and the mean MS-SSIM of each scan
    against the whole photograph.
    """
    decoder = pcrshard.ImageDecoder(64 if lab.quick else 224, "center")
    classify = lites.Classifier(lites.pretrained("lite0"))
    chosen = photographs(lab)
    names = [point.name for point in points()]
    scans = [point.name for point in points() if point.scan != "full"]
    guesses, likeness = [], []
    for photograph in chosen:
        files = stored(photograph.path.read_bytes())
        images = np.stack([decoder(files[name], None) for name in names])
        guesses.append(classify(images).argmax(1).tolist())
        reference = Reference(decode_image(files["source full"]))
        likeness.append([reference.compare(decode_image(files[name])) for name in scans])
    # On one line of JSON each.
    told = {
        name: " ".join(map(str, column))
        for name, column in zip(names, zip(*guesses, strict=True), strict=True)
    }
    means = np.mean(likeness, axis=0).tolist()
    return {
        "labels": " ".join(str(photograph.label) for photograph in chosen),
        "guesses": told,
        "msssim": dict(zip(scans, means, strict=True)),
    }


def _bytes(lab):
    return {"images": len(photographs(lab)), "bytes": shard_bytes(lab, photographs(lab))}


# How often float32 guesses the same was measured once, on a processor with bfloat16.
KEPT = ("agreement",)
PARTS = {
    "cpu": _decode_cost,
    "guesses": _guesses,
    "bytes": _bytes,
    "resized": resized.measure,
}


def measure(lab, parts=()):
    """Rows and costs that are missing."""
    torch.set_num_threads(len(os.sched_getaffinity(0)) if lab.quick else 1)
    if not parts:
        _classify(lab)
        sizes = lab.load("bytes")
        if sizes is not None and sizes["images"] != len(photographs(lab)):
            lab.forget(["bytes"])
    for part in parts or PARTS:
        lab.measured(part, lambda part=part: PARTS[part](lab))
