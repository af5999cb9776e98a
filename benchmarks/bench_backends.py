"""Decoding a whole image to RGB by each backend, at several scans: the native core with AVX2 and
portable, with block smoothing and without, and libjpeg-turbo as every wrapper runs it. And what
smoothing costs in batches of random crops to 224 pixels.

Asserts that both native backends give the same pixels, and libjpeg-turbo's where the image is
complete or smoothed. (Near the upper and lower edges versions of libjpeg-turbo differ.)
"""

import glob
import os
import time

import numpy as np
from common import judge, parse_args, photos, print_table, save, show, summary

import pcrshard
from pcrshard import native
from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.jpeg.pixels import decode
from pcrshard.native.pieces import piece_table
from pcrshard.native.pool import Draw, Pool, draw_keys

SCANS = (1, 2, 5, 10, "source")
SMOOTHED = (1, 2, 5, 9)
EVERY = 2  # each second image, to keep a round short
BACKENDS = {
    "native": lambda jpeg: native.decode([jpeg]),
    "native, smoothing": lambda jpeg: native.decode([jpeg], smoothing=True),
    "native, portable": lambda jpeg: native.decode([jpeg], backend="portable"),
    "native, portable, smoothing": lambda jpeg: native.decode(
        [jpeg], smoothing=True, backend="portable"
    ),
    "libjpeg-turbo, smoothing": decode,
}


def load(folder):
    """JPEGs of three-component photographs at each scan, and as they were."""
    source = os.path.join(folder, "photos", "imagenet")
    jpegs = {scan: [] for scan in (*SCANS, *SMOOTHED)}
    for path in sorted(glob.glob(f"{source}/*/*"))[::EVERY]:
        with open(path, "rb") as file:
            jpeg = file.read()
        image = encode_jpeg(jpeg)
        jpegs["source"].append(jpeg)
        for scan in {*SCANS[:-1], *SMOOTHED}:
            jpegs[scan].append(pcrshard.join_scans(image.pieces[0], image.pieces[1:scan]))
    return jpegs


def check(jpeg, is_complete):
    """What is said above."""
    fast, smooth, portable, portable_smooth, reference = (
        backend(jpeg) for backend in BACKENDS.values()
    )
    assert np.array_equal(fast, portable)
    assert np.array_equal(smooth, portable_smooth)
    assert not is_complete or np.array_equal(fast, smooth)
    rows = slice(None) if is_complete else slice(34, -38)
    assert np.array_equal(smooth[rows], reference[rows])


def time_crops(jpegs, rounds):
    """CPU ms per image of random crops to 224 pixels, by scan, without smoothing and with."""
    times = {scan: ([], []) for scan in SMOOTHED}
    count = len(jpegs[1])
    out = np.empty((count, 3, 224, 224), np.uint8)
    how = {
        "layout": "chw",
        "draws": [Draw("random", (0.08, 1.0), (3 / 4, 4 / 3), 0.0)],
        "keys": draw_keys((1,), range(count)),
    }
    for _ in range(rounds):
        for scan, both in times.items():
            table = piece_table([[jpeg] for jpeg in jpegs[scan]])
            for smoothing, own in zip((False, True), both, strict=True):
                begin = time.process_time()
                with Pool(0) as pool:
                    batch = pool.decode(table, [out], smoothing=smoothing, **how)
                    decoded = batch.wait()
                own.append(1000 * (time.process_time() - begin) / count)
                assert decoded.all()
    return times


def judge_crops(times):
    """The table, the figures and the targets of :func:`time_crops`."""
    rows = []
    results = []
    targets = []
    for scan, (plain, smooth) in times.items():
        ratio = summary([b / a for a, b in zip(plain, smooth, strict=True)])
        rows.append([scan, show(summary(plain), 3), show(summary(smooth), 3), show(ratio)])
        figures = {"crop_ms": summary(plain), "smoothed_crop_ms": summary(smooth)}
        results.append({"scan": scan, **figures, "over_plain": ratio})
        if scan in (1, 2):
            what = f"smoothed over plain, crops to 224, scan {scan}"
            targets.append(judge(what, ratio["median"], 1.3, at_most=True))
    header = ["scan", "plain ms", "smoothed ms", "smoothed over plain"]
    print_table("Random crops to 224 pixels, CPU ms per image, median [quartiles]", header, rows)
    return results, targets


def main():
    args = parse_args(__doc__, rounds=5)
    with photos() as folder:
        jpegs = load(folder)
    for scan, images in jpegs.items():
        for jpeg in images[::5]:
            check(jpeg, scan in (10, "source"))
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
    crop_results, targets = judge_crops(time_crops(jpegs, 5 * args.rounds))
    save(args, results + crop_results, targets)


if __name__ == "__main__":
    main()
