"""Scan scripts: bytes, MS-SSIM and decoding time of every prefix of every script of conf/scans, set
by set.

A search for scripts has seen some photographs of most sets: those are left out. Asserts that no
script changes the pixels.
"""

import functools
import os
import time

import numpy as np

from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.fidelity.msssim import Reference
from pcrshard.format.scan_script import parse_script
from pcrshard.jpeg.pixels import decode_image

from .harness import ROOT, read

ROUNDS = 3
# Datasets used for script search, and the stride of the photographs used; these are excluded.
SEARCHED = {"imagenet": 16, "cars": 9, "faces_1024": 4, "animal_faces_512": 4, "ham10000": 9}
LIMITS = {0.95: 0.17, 0.965: 0.23, 0.98: 0.335}


def _measure(bench, source, script):
    """(bytes, MS-SSIM, decode seconds) of each prefix of one photograph: (groups, 3)."""
    pixels = decode_image(source)
    reference = Reference(pixels)
    pieces = encode_jpeg(source, script).pieces[:-1]
    prefixes = [[piece for piece in pieces[:k] if piece] for k in range(1, len(pieces) + 1)]
    pictures = [decode_image(prefix) for prefix in prefixes]
    assert np.array_equal(pictures[-1], pixels), f"{script.name} changed the pixels"
    ways = {k: functools.partial(decode_image, prefix) for k, prefix in enumerate(prefixes)}
    seconds = bench.interleaved(ways, time.thread_time)
    values = [reference.compare(picture) for picture in pictures]
    times = [min(seconds[k]) for k in range(len(prefixes))]
    return np.stack([np.cumsum([len(piece) for piece in pieces]), values, times], axis=1)


def _targets(bench, rows):
    """q95 on ImageNet photographs, against standard."""
    points = {
        name: [(row["share"], row["MS-SSIM"]) for row in rows if row["script"] == name]
        for name in ("standard", "q95")
    }
    for wanted, most in LIMITS.items():
        share = min((s for s, quality in points["q95"] if quality >= wanted), default=1.0)
        what = f"source bytes of the first prefix of q95 with MS-SSIM {wanted}"
        bench.target(what, share, most=most)
    shares, qualities = zip(*points["q95"], strict=True)
    for share, quality in points["standard"]:
        if quality >= 0.985:
            ratio = float(np.interp(quality, qualities, shares)) / share
            bench.target(f"bytes of q95 over standard's at {quality:.4f}", ratio, most=1.03)
    whole = shares[-1] / points["standard"][-1][0]
    bench.target("whole files of q95 over standard's", whole, most=1.01)


def run(bench):
    folder = os.path.join(ROOT, "conf", "scans")
    scripts = [
        parse_script(name.removesuffix(".txt"), read(os.path.join(folder, name)).decode())
        for name in sorted(os.listdir(folder))
    ]
    with bench.photos() as photos:
        top = os.path.join(photos, "photos")
        for name in ["imagenet"] if bench.quick else sorted(os.listdir(top)):
            every = SEARCHED.get(name)
            files = bench.files(os.path.join(top, name))
            sources = [read(f) for i, f in enumerate(files) if not every or i % every]
            total, rows = sum(map(len, sources)), []
            for script in scripts:
                sums = sum(_measure(bench, source, script) for source in sources)
                for scan, (size, quality, seconds) in enumerate(sums, 1):
                    row = {"script": script.name, "scan": scan, "share": size / total}
                    row |= {"MS-SSIM": quality / len(sources)}
                    rows.append(row | {"decode ms": 1000 * seconds / len(sources)})
            bench.show(f"{name}: {len(sources)} photographs", rows, ".4g")
            if name == "imagenet":
                _targets(bench, rows)
