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
from pcrshard.jpeg.crops import Draws
from pcrshard.native.pool import Pool

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
    """JPEGs of photographs at each scan, a multiple of a batch, and their heights and widths."""
    paths = sorted(glob.glob(os.path.join(folder, "photos", "imagenet", "*", "*")))[::EVERY]
    images = [encode_jpeg(read(path)) for path in paths[: len(paths) // BATCH * BATCH]]
    jpegs = {
        scan: [pcrshard.join_scans(image.pieces[0], image.pieces[1:scan]) for image in images]
        for scan in SCANS
    }
    headers = [native.read_header([jpeg]) for jpeg in jpegs[1]]
    return jpegs, np.array([(header.height, header.width) for header in headers], np.int32)


def decode(pool, decoder, jpegs, sizes):
    """All batches by one decoder; returns the arrays of the last one."""
    for start in range(0, len(jpegs), BATCH):
        part = jpegs[start : start + BATCH]
        ids = np.arange(start, start + BATCH)
        outs = [np.empty(shape, np.uint8) for shape in decoder.batch_shapes(BATCH)]
        pictures = [out[:, place] for out in outs for place in range(out.shape[1])]
        boxes = decoder.draw_boxes(Draws(SEED, 0).state, ids, sizes[start : start + BATCH])
        table = native.image_table(part, [len(jpeg) for jpeg in part])
        assert pool.decode(table, pictures, boxes=boxes, layout="chw", keep=part).wait().all()
    return outs


def decode_ten_times(pool, decoder, jpegs, sizes):
    """The same pictures, each by a decode of its own."""
    for start in range(0, len(jpegs), BATCH):
        part = jpegs[start : start + BATCH]
        ids = np.arange(start, start + BATCH)
        boxes = decoder.draw_boxes(Draws(SEED, 0).state, ids, sizes[start : start + BATCH])
        table = native.image_table(part, [len(jpeg) for jpeg in part])
        for place, picture in enumerate(decoder.pictures):
            out = np.empty(picture.batch_shape(BATCH), np.uint8)
            own = np.ascontiguousarray(boxes[:, place])
            assert pool.decode(table, out, boxes=own, layout="chw", keep=part).wait().all()


def check(pool, jpegs, sizes):
    """Ten views are ten single calls that draw one after the other."""
    outs = decode(pool, DECODERS["ten views"], jpegs, sizes)
    for place in range(0, BATCH, 7):
        number = len(jpegs) - BATCH + place
        rng = Draws(SEED, 0, number)
        for view, out in zip((LARGE, SMALL), outs, strict=True):
            single = ImageDecoder(view.size, "random", scale=view.scale, flip=0.5)
            for picture in out[place]:
                assert np.array_equal(picture, single(jpegs[number], rng))


def main():
    args = parse_args(__doc__, rounds=7)
    with photos() as folder:
        jpegs, sizes = load(folder)
    jobs = {name: (decode, decoder) for name, decoder in DECODERS.items()}
    jobs["ten decodes"] = (decode_ten_times, DECODERS["ten views"])
    times = {(name, scan): [] for scan in SCANS for name in jobs}
    with Pool(0) as pool:
        for scan in SCANS:
            check(pool, jpegs[scan], sizes)
        for _ in range(args.rounds):
            for (name, scan), rounds in times.items():
                function, decoder = jobs[name]
                begin = time.process_time()
                function(pool, decoder, jpegs[scan], sizes)
                rounds.append(1000 * (time.process_time() - begin) / len(sizes))
    results = []
    for (name, scan), rounds in times.items():
        ones = times["one view of 224", scan]
        ratio = summary([a / b for a, b in zip(rounds, ones, strict=True)])
        results.append({"what": name, "scan": scan, "ms": summary(rounds), "over_one": ratio})
    rows = [[row["what"], row["scan"], show(row["ms"]), show(row["over_one"])] for row in results]
    title = f"{len(sizes)} images, {native.backend()}, CPU ms per image, median [quartiles]"
    print_table(title, ["pictures", "scan", "ms", "over one view"], rows)
    ten = next(row for row in results if (row["what"], row["scan"]) == ("ten views", 5))
    what = "ten views over one view of 224, scan 5"
    save(args, results, [judge(what, ten["over_one"]["median"], 2.6, at_most=True)])


if __name__ == "__main__":
    main()
