"""Scan scripts: bytes, MS-SSIM and decoding time of every prefix of every script of conf/scans, set
by set.

A search for scripts has seen some photographs of most sets: those are left out. Asserts that no
script changes the pixels.
"""

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
MOST_BYTES = {0.95: 0.17, 0.965: 0.23, 0.98: 0.335}


def _measure(bench, source, script):
    """(bytes, MS-SSIM, decode seconds) of each prefix of one photograph: (groups, 3)."""
    pixels = decode_image(source)
    reference = Reference(pixels)
    pieces = encode_jpeg(source, script).pieces[:-1]
    rows = []
    for stop in range(1, len(pieces) + 1):
        prefix, seconds = [piece for piece in pieces[:stop] if piece], []
        for _ in range(bench.rounds):
            begun = time.thread_time()
            picture = decode_image(prefix)
            seconds.append(time.thread_time() - begun)
        rows.append((sum(map(len, prefix)), reference.compare(picture), min(seconds)))
    assert np.array_equal(picture, pixels), f"{script.name} changed the pixels"
    return np.array(rows)


def _targets(bench, rows):
    """``q95`` on ImageNet photographs, against ``standard``."""
    standard, q95 = (
        np.array([(row["share"], row["MS-SSIM"]) for row in rows if row["script"] == name]).T
        for name in ("standard", "q95")
    )
    for wanted, most in MOST_BYTES.items():
        share = min(q95[0][q95[1] >= wanted], default=1.0)
        what = f"source bytes of the first prefix of q95 with MS-SSIM {wanted}"
        bench.target(what, share, most=most)
    for share, quality in standard.T[standard[1] >= 0.985]:
        over = np.interp(quality, q95[1], q95[0]) / share
        bench.target(f"bytes of q95 over standard's at {quality:.4f}", over, most=1.03)
    bench.target("whole files of q95 over standard's", q95[0, -1] / standard[0, -1], most=1.01)


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
