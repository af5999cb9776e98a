"""Ten views of each image, as DINO takes them, against one view and against ten decodes; CPU time
per image of batches of 32 at several scans.

Two views of 224 pixels of 0.25 to 1 of the area, eight of 96 of 0.05 to 0.25, without threads.
Asserts that the pixels of ten views are those of ten single calls.
"""

import glob
import os
import time

import numpy as np
from common import judge, parse_args, photos, print_table, read, save, show, summary

import pcrshard
from pcrshard import ImageDecoder, View, native
from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.native.pieces import piece_table
from pcrshard.native.pool import Pool, draw_keys

SCANS = (1, 2, 5, 10)
BATCH = 32
EVERY = 3  # each third image, to keep a round short
SEED = 7
LARGE = View(224, 2, scale=(0.25, 1))
SMALL = View(96, 8, scale=(0.05, 0.25))
DECODERS = {
    "one view of 224": ImageDecoder(views=[View(224, scale=LARGE.scale)], flip=0.5),
    "ten views": ImageDecoder(views=[LARGE, SMALL], flip=0.5),
}


def load(folder):
    """JPEGs of photographs at each scan, a multiple of a batch."""
    paths = sorted(glob.glob(os.path.join(folder, "photos", "imagenet", "*", "*")))[::EVERY]
    images = [encode_jpeg(read(path)) for path in paths[: len(paths) // BATCH * BATCH]]
    return {
        scan: [pcrshard.join_scans(image.pieces[0], image.pieces[1:scan]) for image in images]
        for scan in SCANS
    }


def decode(pool, decoder, jpegs):
    """All batches by one decoder; returns the arrays of the last one."""
    for start in range(0, len(jpegs), BATCH):
        part = jpegs[start : start + BATCH]
        keys = draw_keys((SEED, 0), range(start, start + BATCH))
        outs = [np.empty(shape, np.uint8) for shape in decoder.batch_shapes(BATCH)]
        table = piece_table([[jpeg] for jpeg in part])
        assert all(decoder.begin(pool, table, outs, keys, keep=part).wait())
    return outs


def decode_ten_times(pool, decoder, jpegs):
    """The same pictures, each by a decode of its own."""
    for start in range(0, len(jpegs), BATCH):
        part = jpegs[start : start + BATCH]
        table = piece_table([[jpeg] for jpeg in part])
        for place, view in enumerate([each for each in decoder.views for _ in range(each.count)]):
            single = ImageDecoder(view.size, "random", scale=view.scale, flip=0.5)
            keys = draw_keys((SEED, place), range(start, start + BATCH))
            outs = [np.empty(shape, np.uint8) for shape in single.batch_shapes(BATCH)]
            assert all(single.begin(pool, table, outs, keys, keep=part).wait())


def check(pool, jpegs):
    """Ten views of a batch are those of each image alone."""
    decoder = DECODERS["ten views"]
    outs = decode(pool, decoder, jpegs)
    numbers = range(len(jpegs) - BATCH, len(jpegs))
    for place, key in enumerate(draw_keys((SEED, 0), numbers)):
        for out, alone in zip(outs, decoder(jpegs[numbers[place]], key), strict=True):
            assert np.array_equal(out[place], alone)


def main():
    args = parse_args(__doc__, rounds=7)
    with photos() as folder:
        jpegs = load(folder)
    jobs = {name: (decode, decoder) for name, decoder in DECODERS.items()}
    jobs["ten decodes"] = (decode_ten_times, DECODERS["ten views"])
    times = {(name, scan): [] for scan in SCANS for name in jobs}
    with Pool(0) as pool:
        for scan in SCANS:
            check(pool, jpegs[scan])
        for _ in range(args.rounds):
            for (name, scan), rounds in times.items():
                function, decoder = jobs[name]
                begin = time.process_time()
                function(pool, decoder, jpegs[scan])
                rounds.append(1000 * (time.process_time() - begin) / len(jpegs[1]))
    results = []
    for (name, scan), rounds in times.items():
        ones = times["one view of 224", scan]
        ratio = summary([a / b for a, b in zip(rounds, ones, strict=True)])
        results.append({"what": name, "scan": scan, "ms": summary(rounds), "over_one": ratio})
    rows = [[row["what"], row["scan"], show(row["ms"]), show(row["over_one"])] for row in results]
    title = f"{len(jpegs[1])} images, {native.backend()}, CPU ms per image, median [quartiles]"
    print_table(title, ["pictures", "scan", "ms", "over one view"], rows)
    ten = next(row for row in results if (row["what"], row["scan"]) == ("ten views", 5))
    what = "ten views over one view of 224, scan 5"
    save(args, results, [judge(what, ten["over_one"]["median"], 2.6, at_most=True)])


if __name__ == "__main__":
    main()
