"""Decoding a whole image to RGB by each backend, at several scans: the native core with AVX2 and
portable, and libjpeg-turbo as every wrapper runs it.

Asserts that both native backends give the same pixels, and libjpeg-turbo's where the image is
complete.
"""

import glob
import os
import time

import numpy as np
from common import parse_args, photos, print_table, save, show, summary

import pcrshard
from pcrshard import native
from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.jpeg.pixels import decode

SCANS = (1, 2, 5, 10, "source")
EVERY = 2  # each second image, to keep a round short
BACKENDS = {
    "native": lambda jpeg: native.decode([jpeg]),
    "native, portable": lambda jpeg: native.decode([jpeg], backend="portable"),
    "libjpeg-turbo, smoothing": decode,
}


def load(folder):
    """JPEGs of three-component photographs at each scan, and as they were."""
    source = os.path.join(folder, "photos", "imagenet")
    jpegs = {scan: [] for scan in SCANS}
    for path in sorted(glob.glob(f"{source}/*/*"))[::EVERY]:
        with open(path, "rb") as file:
            jpeg = file.read()
        image = encode_jpeg(jpeg)
        jpegs["source"].append(jpeg)
        for scan in SCANS[:-1]:
            jpegs[scan].append(pcrshard.join_scans(image.pieces[0], image.pieces[1:scan]))
    return jpegs


def main():
    args = parse_args(__doc__, rounds=5)
    with photos() as folder:
        jpegs = load(folder)
    for scan, images in jpegs.items():
        for jpeg in images[::5]:
            fast, portable, reference = (backend(jpeg) for backend in BACKENDS.values())
            assert np.array_equal(fast, portable)
            assert scan not in (10, "source") or np.array_equal(fast, reference)
    times = {(name, scan): [] for name in BACKENDS for scan in SCANS}
    for _ in range(args.rounds):
        for (name, scan), rounds in times.items():
            begin = time.process_time()
            for jpeg in jpegs[scan]:
                BACKENDS[name](jpeg)
            rounds.append(1000 * (time.process_time() - begin) / len(jpegs[scan]))
    results = [
        {"backend": name, "scan": scan, "ms": summary(rounds)}
        for (name, scan), rounds in times.items()
    ]
    rows = [[name, *(show(summary(times[name, scan])) for scan in SCANS)] for name in BACKENDS]
    title = f"{len(jpegs[1])} images, {native.backend()}, CPU ms per image, median [quartiles]"
    print_table(
        title,
        ["backend", *(f"scan {scan}" if scan != "source" else "source" for scan in SCANS)],
        rows,
    )
    save(args, results, [])


if __name__ == "__main__":
    main()
