"""``reproduce.py imagenet``: what networks of ImageNet see at each scan; the page is
docs/evidence/imagenet.md.

Each photograph is stored at every scan of two scripts, as it was, and resized once; a network that
nobody has trained again classifies all of them. Rows are appended as blocks of photographs end.
"""

import os
import pathlib
import time

import numpy as np
import torch

import pcrshard

from . import imagenet_coarse, imagenet_page, lites
from .lab import write
from .photographs import photographs, points, shard_bytes, stored, unfinished
from .report import flow, wrap_prose

NAME = "imagenet"
# Four blocks are the photographs of shared/data.
BLOCK = 65
EARLY = 4
# Of other crops than the main one, every other point.
OTHER_CROPS = (160, 288)
SOME = (1, 2, 4, 5, 6, 8, 10)
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
# So many cases see more photographs than those of shared/data.
MOST = 3
QUICK_CASES = (("lite0", 64, False), ("lite0", 64, True))
CPU_IMAGES = 48
ROUNDS = 7


def _key(row):
    return (row["network"], row["crop"], row["smoothing"], row["block"])


def _mark(scores, label):
    """``1`` for the best guess, ``5`` for one of the five best, ``0``."""
    best = scores.topk(5).indices.tolist()
    if best[0] == label:
        return "1"
    return "5" if label in best else "0"


def _see(classify, photograph, crop, smoothing):
    """The mark at each point, by the point's name."""
    decoder = pcrshard.ImageDecoder(crop, "center", smoothing=smoothing)
    wanted = _wanted(crop, smoothing)
    files = stored(photograph.path.read_bytes())
    images = np.stack([decoder(files[point.name], None) for point in wanted])
    scores = classify(images)
    return {
        point.name: _mark(row, photograph.label) for point, row in zip(wanted, scores, strict=True)
    }


def _wanted(crop, smoothing):
    """The points of a case: all at the main crop, every other one at the others."""
    kept = [point for point in points() if not smoothing or unfinished(point)]
    if crop not in OTHER_CROPS:
        return kept
    return [point for point in kept if point.scan in (*SOME, "full")]


def _measure_block(classify, chosen, case, block):
    name, crop, smoothing = case
    begun = time.process_time()
    seen = [_see(classify, photograph, crop, smoothing) for photograph in chosen]
    marks = {point: "".join(each[point] for each in seen) for point in seen[0]}
    head = {"network": name, "crop": crop, "smoothing": smoothing, "block": block}
    how = {"number": str(classify.number), "cpu_seconds": time.process_time() - begun}
    return head | how | {"first": chosen[0].path.name, "marks": marks}


def measure(lab):
    """What is missing of the rows; all cases of one stage before the next, so that a stop leaves
    whole curves: first the photographs of shared/data.
    """
    torch.set_num_threads(len(os.sched_getaffinity(0)) if lab.quick else 1)
    known = {_key(row) for row in lab.rows(NAME)}
    chosen = photographs(lab)
    blocks = [chosen[start : start + BLOCK] for start in range(0, len(chosen), BLOCK)]
    cases = [case for case in (QUICK_CASES if lab.quick else CASES) if lites.available(case[0])]
    networks = {}
    for case, block in _order(cases, len(blocks), EARLY * lab.scale):
        if (*case, block) in known:
            continue
        if case[0] not in networks:
            networks[case[0]] = lites.Classifier(lites.pretrained(case[0]), fused=not lab.quick)
        row = _measure_block(networks[case[0]], blocks[block], case, block)
        lab.append(NAME, row)
        print(f"{case}, block {block}: {row['cpu_seconds']:.0f} CPU s", flush=True)


def _order(cases, count, early):
    """Main cases over all photographs, then the others; each over the first blocks first."""
    early = min(count, early)
    stages = ((cases, range(early)), (cases[:MOST], range(early, count)))
    for some, blocks in stages:
        for case in some:
            for block in blocks:
                yield case, block


def decode_cost(lab):
    """CPU milliseconds to decode, crop and resize a photograph at each point: the least of some
    rounds over all points, because others' work makes it longer and nothing makes it shorter.
    """
    chosen = photographs(lab)[: 1 if lab.quick else CPU_IMAGES]
    files = [stored(photograph.path.read_bytes()) for photograph in chosen]
    rounds = [_decode_round(files) for _ in range(ROUNDS)]
    found = {name: 1000 * min(each[name] for each in rounds) / len(files) for name in rounds[0]}
    return {"images": len(files), "milliseconds": found}


def _decode_round(files):
    """CPU seconds of all files at each point, by the point's name."""
    found = {}
    for smoothing in (False, True):
        decoder = pcrshard.ImageDecoder(224, "center", smoothing=smoothing)
        for point in points():
            if not smoothing or unfinished(point):
                name = f"{point.name}{' smooth' if smoothing else ''}"
                found[name] = _decode_seconds(decoder, files, point.name)
    return found


def _decode_seconds(decoder, files, name):
    begun = time.process_time()
    for file in files:
        decoder(file[name], None)
    return time.process_time() - begun


def agreement(lab):
    """Share of photographs whose best guess is the same in float32 as in the rows' numbers."""
    if lab.quick or lites.fast_type() == torch.float32:
        return None
    chosen = photographs(lab)[:100]
    decoder = pcrshard.ImageDecoder(224, "center")
    images = np.stack([decoder(photograph.path.read_bytes(), None) for photograph in chosen])
    best = [
        lites.Classifier(lites.pretrained("lite0"), number)(images).argmax(1)
        for number in (torch.float32, lites.fast_type())
    ]
    return {"images": len(chosen), "share": float((best[0] == best[1]).float().mean())}


PARTS = {"cpu": decode_cost, "agreement": agreement, "guesses": imagenet_coarse.measure}


def reproduce(lab):
    """Rows and costs that are missing are measured; figures and the page are made anew."""
    if not lab.existing:
        measure(lab)
    parts = {}
    for part, function in PARTS.items():
        report = None if lab.fresh else lab.load(f"{NAME}-{part}")
        if report is None and not lab.existing:
            report = lab.save(f"{NAME}-{part}", function(lab))
        parts[part] = report and report["results"]
    sizes = lab.load(f"{NAME}-bytes")
    counted = len(photographs(lab)) if not lab.existing else None
    if not lab.existing and (sizes is None or sizes["results"]["images"] != counted):
        found = {"images": counted, "bytes": shard_bytes(lab, photographs(lab))}
        sizes = lab.save(f"{NAME}-bytes", found)
    rows = lab.rows(NAME)
    if rows and sizes:
        imagenet_page.draw(lab, rows, parts, sizes["results"])
        page = imagenet_page.text(rows, parts, sizes["results"])
        if parts["guesses"]:
            in_bytes = sizes["results"]["bytes"]
            imagenet_coarse.draw(lab, parts["guesses"], in_bytes)
            page += flow(f"\n{imagenet_coarse.text(parts['guesses'], in_bytes)}")
        write(str(pathlib.Path(lab.out, f"{NAME}.md")), wrap_prose(page))
