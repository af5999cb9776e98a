"""What networks of ImageNet see at each scan.

Each photograph is stored at every scan of two scripts, as it was, and resized once; a network
without any retraining classifies all of them. Rows are appended as each block of photographs ends.
"""

import functools
import os
import time

import numpy as np
import torch

import pcrshard
from pcrshard.fidelity.msssim import Reference
from pcrshard.jpeg.pixels import decode_image

from .. import lites
from .photographs import POINTS, QUALITY, SCANS, SIDE, encoded, photographs, resized, stored

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
ROUNDS = 7


@functools.cache
def _network(name):
    return lites.Classifier(lites.pretrained(name))


def _mark(scores, label):
    """``1`` for the best guess, ``5`` for one of the five best, ``0``."""
    best = scores.topk(5).indices.tolist()
    if best[0] == label:
        return "1"
    return "5" if label in best else "0"


def _see(chosen, key):
    """The marks of some photographs at each point."""
    crop, smoothing = key["crop"], key["smoothing"]
    decoder = pcrshard.ImageDecoder(crop, "center", smoothing=smoothing)
    wanted = [
        point.name
        for point in POINTS
        if (point.unfinished or not smoothing) and (crop not in OTHER_CROPS or point.scan in SOME)
    ]
    marks = dict.fromkeys(wanted, "")
    for photograph in chosen:
        files = stored(photograph.path.read_bytes())
        scores = _network(key["network"])(np.stack([decoder(files[name]) for name in wanted]))
        for name, row in zip(wanted, scores, strict=True):
            marks[name] += _mark(row, photograph.label)
    return marks


def _classify(lab):
    """What is missing of the rows."""
    chosen = photographs(lab)
    blocks = [chosen[start : start + BLOCK] for start in range(0, len(chosen), BLOCK)]
    early = min(len(blocks), EARLY * lab.scale)
    keys = [
        {"network": name, "crop": crop, "smoothing": smoothing, "block": block}
        for number, (name, crop, smoothing) in enumerate(QUICK_CASES if lab.quick else CASES)
        for block in range(len(blocks) if number < MOST else early)
    ]
    for key in lab.missing(keys):
        block, begun = blocks[key["block"]], time.process_time()
        row = {"number": str(lites.fast_type()), "marks": _see(block, key)}
        spent = time.process_time() - begun
        lab.append(key | row | {"first": block[0].path.name, "cpu_seconds": spent})


def _milliseconds(decoder, files):
    """CPU milliseconds to decode a file: the least of some rounds, because others' work makes it
    longer and nothing makes it shorter.
    """
    seconds = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        for file in files:
            decoder(file)
        seconds.append(time.process_time() - begun)
    return 1000 * min(seconds) / len(files)


def _decode_cost(lab):
    """CPU milliseconds to decode, crop and resize a photograph at each point."""
    chosen = photographs(lab)[: 1 if lab.quick else CPU_IMAGES]
    files = [stored(photograph.path.read_bytes()) for photograph in chosen]
    found = {}
    for ending, smoothing in (("", False), (" smooth", True)):
        decoder = pcrshard.ImageDecoder(224, "center", smoothing=smoothing)
        for point in POINTS:
            if point.unfinished or not smoothing:
                jpegs = [file[point.name] for file in files]
                found[point.name + ending] = _milliseconds(decoder, jpegs)
    return {"images": len(files), "milliseconds": found}


def _guesses(lab):
    """The best guess of Lite0 for each photograph at each point, and the mean MS-SSIM of each scan
    against the whole photograph.
    """
    decoder = pcrshard.ImageDecoder(64 if lab.quick else 224, "center")
    chosen = photographs(lab)
    guesses = {point.name: [] for point in POINTS}
    likeness = {point.name: [] for point in SCANS}
    for photograph in chosen:
        files = stored(photograph.path.read_bytes())
        scores = _network("lite0")(np.stack([decoder(files[name]) for name in guesses]))
        for told, guess in zip(guesses.values(), scores.argmax(1).tolist(), strict=True):
            told.append(str(guess))
        reference = Reference(decode_image(files["source full"]))
        for name, values in likeness.items():
            values.append(reference.compare(decode_image(files[name])))
    return {  # on one line of JSON each
        "labels": " ".join(str(photograph.label) for photograph in chosen),
        "guesses": {name: " ".join(told) for name, told in guesses.items()},
        "msssim": {name: float(np.mean(values)) for name, values in likeness.items()},
    }


def _bytes(lab):
    """Mean bytes of a photograph at each point; scans as parts of whole shards, index included."""
    chosen = photographs(lab)
    found = {}
    for point in SCANS:
        index, _ = encoded(lab, chosen, point.store)
        found[point.name] = index.prefix_bytes(point.scan) / index.num_samples
    sources = [photograph.path.read_bytes() for photograph in chosen]
    found["source full"] = sum(map(len, sources)) / len(sources)
    found["resized full"] = sum(len(resized(jpeg)) for jpeg in sources) / len(sources)
    return {"images": len(chosen), "bytes": found}


def _resized(lab):
    """Scans of pictures resized once (``encode --resize-short 256 --reencode-quality 90``): mean
    bytes, CPU milliseconds to decode and crop, and the photographs that each network classifies
    correctly, in their order as ``1`` and ``0``.
    """
    chosen = photographs(lab)
    labels = {photograph.path.stem: photograph.label for photograph in chosen}
    decoder = pcrshard.ImageDecoder(64 if lab.quick else 224, "center")
    found = {}
    for point in SCANS:
        index, paths = encoded(lab, chosen, point.store, SIDE, QUALITY)
        samples = [
            sample
            for path, entry in zip(paths, index.shards, strict=True)
            for sample in pcrshard.Shard(path, entry=entry).samples(point.scan)
        ]
        files = [sample["jpg"] for sample in samples]
        row = {"bytes": index.prefix_bytes(point.scan) / index.num_samples}
        row["milliseconds"] = _milliseconds(decoder, files[:BLOCK])
        wanted = torch.tensor([labels[sample["__key__"]] for sample in samples])
        images = torch.as_tensor(np.stack([decoder(file) for file in files])).split(BLOCK)
        for name in lites.NAMES:
            right = torch.cat([_network(name)(part).argmax(1) for part in images]) == wanted
            row[name] = "".join(map(str, right.int().tolist()))
        found[point.name] = row
        print(f"{point.name}: {row['bytes']:.0f} bytes", flush=True)
    return {"images": len(chosen), "points": found}


# How often float32 guesses the same was measured once, on a processor with bfloat16.
KEPT = ("agreement",)
PARTS = {"cpu": _decode_cost, "guesses": _guesses, "bytes": _bytes, "resized": _resized}


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
