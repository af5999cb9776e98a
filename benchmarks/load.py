"""PCRLoader without threads, with threads and with workers, against decoding alone from memory and
stock WebDataset: random crops to 224 pixels at scan 5, uint8 batches of 64, from the page cache.

Then two loops that do something else: one sleeps as an accelerator would, one burns Python, while
the next batch is decoded. Asserts that every way gives the same pixels.
"""

import functools
import os
import time

import numpy as np
import torch
import webdataset as wds
from PIL import Image
from torch.utils.data import DataLoader

from pcrshard import ImageDecoder, PCRDataset, PCRLoader, ShardWriter, open_dataset
from pcrshard.native.pool import Draw, Pool, draw_boxes, draw_key, draw_keys
from pcrshard.training.epoch_order import Geometry, epoch_order

from .harness import Quartiles, cpu, machine_busy, ratios, read

ROUNDS = 5
SCAN, SIZE, BATCH, SHARDS = 5, 224, 64, 8
IMAGE = ImageDecoder(SIZE, "random")
WAYS = {
    "threads=0": {"threads": 0},
    "threads=1": {"threads": 1},
    "threads=2": {"threads": 2},
    "1 worker": {"num_workers": 1},
    "2 workers": {"num_workers": 2},
}
STEP_SECONDS = 0.05


def _stock_crop(sample):
    image = sample["jpg"]
    draw = Draw("random", (0.08, 1.0), (3 / 4, 4 / 3), 0.0)
    key = draw_key(0, 0, int(sample["__key__"]))
    y, x, height, width, _ = draw_boxes(key, (image.height, image.width), [draw])[0].tolist()
    box = (x, y, x + width, y + height)
    small = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)
    return np.asarray(small).transpose(2, 0, 1), sample["cls"]


def _stock(urls, workers):
    """WebDataset as its documentation has it."""
    data = wds.WebDataset(urls, shardshuffle=False).decode("pil").map(_stock_crop).batched(BATCH)
    return sum(
        len(labels) for _, labels in wds.WebLoader(data, batch_size=None, num_workers=workers)
    )


def _staged(shards, threads):
    """WebDataset with the stages of this package."""
    urls = open_dataset(shards)[1]
    data = wds.WebDataset(urls, shardshuffle=False).pcr_scan(SCAN, index=shards)
    data = data.pcr_decode(SIZE, "random", threads=threads).to_tuple("jpg", "cls").batched(BATCH)
    return sum(len(labels) for _, labels in data)


def _random_access(dataset, workers):
    """A shuffling DataLoader over the map-style dataset."""
    loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=workers)
    return sum(len(labels) for _, labels in loader)


def _load(dataset, options):
    return sum(len(labels) for _, labels in PCRLoader(dataset, BATCH, **options))


def _alone(dataset, threads):
    """Decode what lies in memory, in the order and with the crops of the dataset."""
    held = [dataset.shards.open(number).load(SCAN) for number in range(len(dataset.shards.urls))]
    out = np.zeros((BATCH, 3, SIZE, SIZE), np.uint8)
    order = epoch_order(dataset.shard_sizes, Geometry(BATCH))
    plan = []
    for step in range(order.steps):
        ids = order.step(step)
        places = dataset.shards.places(ids)
        table = np.concatenate([held[shard].table([row]) for _, shard, row in places])
        plan.append((table, draw_keys((0, 0), ids.tolist())))

    def run():
        with Pool(threads) as pool:
            for table, keys in plan:
                assert all(IMAGE.begin(pool, table, [out], keys, keep=held).wait())
        return len(plan) * BATCH

    return run


def _measure(run):
    """Return images per second, CPU ms per image, and the machine fraction used by others."""
    begun, spent, busy = time.perf_counter(), cpu(), machine_busy()
    images = run()
    wall, spent = time.perf_counter() - begun, cpu() - spent
    others = max(machine_busy() - busy - spent, 0) / wall / len(os.sched_getaffinity(0))
    return images / wall, 1000 * spent / images, others


def _burn(seconds):
    """Rounds of Python that never lets go of the GIL but when asked."""
    rounds, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        rounds += 1
    return rounds


def _beside(dataset, step, **options):
    """The share of a loop that waits, and of its own work that it loses to decoding: a batch is
    decoded in less than a step, so that in a second step of the same length nothing is.
    """
    waited, rounds, begun = 0.0, [], None
    asked = time.perf_counter()
    for number, _ in enumerate(PCRLoader(dataset, BATCH, **options)):
        if number == 3:  # batches are ahead
            begun = time.perf_counter()
        elif begun:
            waited += time.perf_counter() - asked
            rounds.append((step(STEP_SECONDS), step(STEP_SECONDS)))
        asked = time.perf_counter()
    beside, alone = np.sum(rounds, axis=0)
    return waited / (asked - begun), 1 - beside / alone


def _check(dataset):
    """Every way gives the same batches."""
    sums = [
        [int(images.to(torch.int64).sum()) for images, _ in PCRLoader(dataset, BATCH, **options)]
        for options in WAYS.values()
    ]
    assert all(each == sums[0] for each in sums)


def run(bench):
    torch.set_num_threads(1)
    with bench.photos() as folder:
        files = bench.files(os.path.join(folder, "photos", "imagenet")) * (64 if bench.quick else 4)
        shards, tars = (os.path.join(folder, name) for name in ("shards", "tars"))
        os.makedirs(tars)
        per_shard = -(-len(files) // SHARDS)
        pattern = os.path.join(tars, "%06d.tar")
        with (
            ShardWriter(shards, samples_per_shard=per_shard) as ours,
            wds.ShardWriter(pattern, maxcount=per_shard, verbose=0) as plain,
        ):
            for number, file in enumerate(files):
                sample = {"__key__": f"{number:06d}", "jpg": read(file), "cls": number}
                ours.write(sample)
                plain.write(sample)
        urls = bench.files(tars)
        dataset = PCRDataset(shards, scan=SCAN, decoder=IMAGE, fields=("jpg", "cls"))
        _check(dataset)
        runs = {n: functools.partial(_load, dataset, options) for n, options in WAYS.items()}
        runs |= {f"decoding alone, {n} threads": _alone(dataset, n) for n in (0, 2)}
        runs |= {f"WebDataset, {n} workers": functools.partial(_stock, urls, n) for n in (0, 2)}
        runs[".pcr_decode(threads=2)"] = functools.partial(_staged, shards, 2)
        runs["random access, 2 workers"] = functools.partial(_random_access, dataset, 2)
        found = {name: [] for name in runs}
        beside = {"sleeping": [], "burning": []}
        for _ in range(bench.rounds):
            for name, run_ in runs.items():
                found[name].append(_measure(run_))
            beside["sleeping"].append(_beside(dataset, lambda s: time.sleep(s) or 1, threads=2))
            beside["burning"].append(_beside(dataset, _burn, threads=1))
    columns = {name: list(zip(*rounds, strict=True)) for name, rounds in found.items()}
    names = ("images/s", "CPU ms an image", "of the machine by others")
    rows = [
        {"way": name} | dict(zip(names, map(Quartiles, each), strict=True))
        for name, each in columns.items()
    ]
    bench.show("Scan 5, 224 px, batches of 64", rows)

    def over(first, second, column):
        return ratios(columns[first][column], columns[second][column]).median

    alone = [f"decoding alone, {n} threads" for n in (0, 2)]
    bench.target("CPU over decoding alone, threads=0", over("threads=0", alone[0], 1), most=1.05)
    bench.target("CPU over decoding alone, threads=2", over("threads=2", alone[1], 1), most=1.05)
    least = over("WebDataset, 0 workers", "threads=0", 1)
    bench.target("CPU of stock WebDataset over it", least, least=3)
    bench.target("threads=2 over threads=1", over("threads=2", "threads=1", 0), least=1.9)
    bench.target("threads=2 over 2 workers", over("threads=2", "2 workers", 0), least=1.75)
    staged = over(".pcr_decode(threads=2)", "threads=2", 1)
    bench.target("CPU of .pcr_decode over the loader's", staged, most=1.08)
    random = Quartiles(columns["random access, 2 workers"][0]).median
    bench.target("images/s by random access, 2 workers", random, least=1300)
    stock = over("threads=2", "WebDataset, 2 workers", 0)
    bench.target("threads=2 over stock WebDataset", stock, least=8)
    waited = Quartiles(wait for wait, _ in beside["sleeping"]).median
    bench.target("a loop that sleeps waits", waited, most=0.01)
    lost = Quartiles(lost for _, lost in beside["burning"]).median
    bench.target("a loop of Python loses to decoding", lost, most=0.05)
