"""PCRDataset in one process, in time and CPU time per image: RandomResizedCrop to 224 x 224, scan
5, uint8 batches of 64.

Against (a) decoding alone: the same pieces by the same ImageDecoder, from memory into one batch
that is used again; also with crops that were drawn beforehand, by decode_image; and (b) stock
WebDataset over plain tars of the originals, ``decode("pil")`` and the same crop by Pillow; its
crops are drawn beforehand and its batches stay (N, H, W, 3), which spares it some work. All files
are in the page cache. Rounds are interleaved; ratios are of the same round. Asserts that
PCRDataset's pixels are (a)'s, and that (b)'s are the same pictures.
"""

import itertools
import os
import random
import time

import numpy as np
import torch
import webdataset as wds
from common import jpeg_files, judge, parse_args, photos, print_table, read, save, show, summary
from PIL import Image

from pcrshard import ImageDecoder, PCRDataset, PCRLoader, ShardWriter, decode_image
from pcrshard.jpeg.pixels import image_size
from pcrshard.native.pool import Draw, draw_boxes, draw_key
from pcrshard.training.epoch_order import Geometry, epoch_order

SCAN, SIZE, BATCH = 5, 224, 64
COPIES, SHARDS = 4, 8
IMAGE = ImageDecoder(SIZE, "random")
TARGET_DECODE, TARGET_STOCK = 1.05, 3
CASES = {
    "decoding alone": None,
    "decoding alone, crops given": None,
    "PCRDataset": {},
    "PCRDataset, no shards ahead": {"shards_ahead": 0},
    "PCRDataset, unchecked": {"check": False},
    "PCRDataset, one worker": {"num_workers": 1},
    "stock WebDataset": None,
}


def write_shards(files, folder):
    """The photographs as SHARDS shards; a sample's id is its position."""
    with ShardWriter(folder, samples_per_shard=-(-len(files) // SHARDS)) as writer:
        for number, file in enumerate(files):
            writer.write({"__key__": f"{number:06d}", "jpg": read(file), "cls": number})


def write_tars(files, folder):
    """The originals as plain tars, by position."""
    os.makedirs(folder)
    urls = [os.path.join(folder, f"{shard:06d}.tar") for shard in range(SHARDS)]
    for shard, url in enumerate(urls):
        with wds.TarWriter(url) as writer:
            for number in range(shard, len(files), SHARDS):
                writer.write(
                    {"__key__": f"{number:06d}", "jpg": read(files[number]), "cls": number}
                )
    return urls


def box_of(jpeg, number):
    """The crop that PCRDataset draws for a sample of the first epoch."""
    draw = Draw("random", (0.08, 1.0), (3 / 4, 4 / 3), 0.0)
    return tuple(draw_boxes(draw_key(0, 0, number), image_size(jpeg), [draw])[0, :4].tolist())


def decoding_alone(plan, decode):
    """Decode what was laid out in memory before; keeps no pixels."""
    out = np.empty((BATCH, 3, SIZE, SIZE), np.uint8)
    out[...] = 0  # the memory is there

    def run(check):
        for batch in plan:
            for row, (pieces, number, box) in zip(out, batch, strict=True):
                decode(pieces, number, box, row)
            check(out)

    return run


def draw_and_decode(pieces, number, _, row):
    IMAGE(pieces, draw_key(0, 0, number), row)


def decode_given(pieces, _, box, row):
    decode_image(pieces, crop=box, size=(SIZE, SIZE), layout="chw", out=row)


def pcr_dataset(loader):
    def run(check):
        loader.set_epoch(0)
        for images, _ in loader:
            check(images.numpy())

    return run


def stock(urls, boxes):
    """WebDataset's own reading and decoding; ``boxes`` by key."""

    def crop(sample):
        y, x, height, width = boxes[sample["__key__"]]
        small = sample["jpg"].resize(
            (SIZE, SIZE), Image.Resampling.BILINEAR, box=(x, y, x + width, y + height)
        )
        return np.asarray(small), sample["cls"], sample["__key__"]

    def run(check):
        pipeline = (
            wds.WebDataset(urls, shardshuffle=False)
            .decode("pil")
            .map(crop)
            .batched(BATCH, partial=False)
        )
        for images, _, keys in pipeline:
            check(images, keys)

    return run


def lay_out(dataset):
    """(pieces, id, box) of every image of every batch of the first epoch, in order, in memory of
    its own.
    """
    prefixes = [
        shard.load(SCAN) for shard in map(dataset.shards.open, range(len(dataset.shards.urls)))
    ]
    order = epoch_order(dataset.shard_sizes, Geometry(BATCH))
    plan = []
    for step in range(order.steps):
        batch = []
        for number in order.step(step).tolist():
            [(_, shard, row)] = dataset.shards.places(np.array([number]))
            pieces = [memoryview(bytes(piece)) for piece in prefixes[shard]._pieces(row)]
            batch.append((pieces, number, box_of(pieces[0], number)))
        plan.append(batch)
    for prefix in prefixes:
        prefix.close()
    return plan


def check_pixels(runs, boxes, files):
    """PCRDataset's pixels are those of decoding alone; stock's are the same pictures."""
    expected = []
    runs["decoding alone"](lambda images: expected.append(images.copy()))
    for name, run in runs.items():
        if name != "stock WebDataset":
            batches = iter(expected)
            run(
                lambda images, batches=batches: np.testing.assert_array_equal(images, next(batches))
            )
            assert next(batches, None) is None
    seen = {}
    runs["stock WebDataset"](lambda images, keys: seen.update(zip(keys, images, strict=True)))
    for key, pixels in itertools.islice(seen.items(), 20):
        same = decode_image(read(files[int(key)]), crop=boxes[key], size=(SIZE, SIZE))
        assert np.abs(same.astype(int) - pixels).mean() < 3, key


def measure(runs, rounds, images):
    """Microseconds per image, (rounds, 2): of CPU, with children, and of the clock; every round
    runs all, in another order.
    """
    times = {name: [] for name in runs}
    rng = random.Random(0)
    for _ in range(rounds):
        for name in rng.sample(list(runs), len(runs)):
            start = cpu(), time.perf_counter()
            runs[name](lambda *_: None)
            spent = cpu() - start[0], time.perf_counter() - start[1]
            times[name].append([seconds / images * 1e6 for seconds in spent])
    return {name: np.array(rows) for name, rows in times.items()}


def cpu():
    spent = os.times()
    return time.process_time() + spent.children_user + spent.children_system


def main():
    args = parse_args(__doc__, rounds=25)
    torch.set_num_threads(1)
    with photos() as folder:
        shards = os.path.join(folder, "shards")
        files = jpeg_files(os.path.join(folder, "photos", "imagenet")) * COPIES
        write_shards(files, shards)
        urls = write_tars(files, os.path.join(folder, "tars"))
        runs, count = {}, len(files) // BATCH * BATCH
        for name, options in CASES.items():
            if options is not None:
                how = {"threads": None if "num_workers" in options else 0} | options
                check = how.pop("check", True)
                fields = ("jpg", "cls")
                dataset = PCRDataset(shards, scan=SCAN, decoder=IMAGE, fields=fields, check=check)
                runs[name] = pcr_dataset(PCRLoader(dataset, BATCH, **how))
        plan = lay_out(dataset)
        runs["decoding alone"] = decoding_alone(plan, draw_and_decode)
        runs["decoding alone, crops given"] = decoding_alone(plan, decode_given)
        boxes = {f"{number:06d}": box_of(read(file), number) for number, file in enumerate(files)}
        runs["stock WebDataset"] = stock(urls, boxes)
        check_pixels(runs, boxes, files)
        times = measure(runs, args.rounds, count)
    rows, lines = [], []
    for name in CASES:
        ratios = times[name] / times["decoding alone"]
        faster = summary((times["stock WebDataset"] / times[name])[:, 0].tolist())
        rows.append({"case": name, "stock_over_it": faster})
        for i, unit in enumerate(("cpu_us", "us")):
            rows[-1] |= {
                unit: summary(times[name][:, i].tolist()),
                f"{unit}_over_decoding": summary(ratios[:, i].tolist()),
            }
        figures = [
            show(rows[-1]["us"], 0),
            show(rows[-1]["us_over_decoding"], 3),
            show(rows[-1]["cpu_us"], 0),
        ]
        lines.append([name, *figures, show(rows[-1]["cpu_us_over_decoding"], 3), show(faster)])
    header = [
        "",
        "us per image",
        "over decoding alone",
        "CPU us per image",
        "over decoding alone",
        "times less CPU than stock",
    ]
    print_table(
        f"{count} photographs, scan {SCAN}, crop to {SIZE} x {SIZE}; median [quartiles]",
        header,
        lines,
    )
    found = {row["case"]: row for row in rows}["PCRDataset"]
    targets = [
        judge(
            "time per image over that of decoding alone",
            found["us_over_decoding"]["median"],
            TARGET_DECODE,
            at_most=True,
        ),
        judge(
            "CPU time of stock WebDataset over it",
            found["stock_over_it"]["median"],
            TARGET_STOCK,
            at_most=False,
        ),
    ]
    save(args, rows, targets)


if __name__ == "__main__":
    main()
