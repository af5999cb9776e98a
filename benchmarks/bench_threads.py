"""Threads or workers: images per second and CPU time of ``PCRLoader``.

Photographs at scan 5, RandomResizedCrop to 224 with flips, uint8 batches of 32, files in the page
cache. Against decoding alone (the same images, crops and pool of the core, from memory), DataLoader
workers of the same dataset, and stock WebDataset with ``decode("pil")`` in as many workers. Then
two consumers that do something else: one sleeps as an accelerator would, one burns Python, while
the next batch is decoded and again when nothing is left to do. Asserts that every way gives the
same pixels; rounds are interleaved. Only CPU times mean something beside other work: the share of
the machine that others took is printed with each figure.
"""

import os
import time

import numpy as np
import torch
import webdataset as wds
from common import (
    child_cpu,
    jpeg_files,
    judge,
    machine_busy,
    parse_args,
    photos,
    print_table,
    read,
    save,
    summary,
)
from PIL import Image

from pcrshard import ImageDecoder, PCRDataset, PCRLoader, ShardWriter
from pcrshard.native.pool import Draw, Pool, draw_boxes, draw_key, draw_keys
from pcrshard.training.epoch_order import Geometry, epoch_order, worker_batches

SCAN, SIZE, BATCH, SHARDS = 5, 224, 32, 8
IMAGE = ImageDecoder(SIZE, "random", flip=0.5)
WAYS = {
    "threads=0": {"threads": 0},
    "threads=1": {"threads": 1},
    "threads=2": {"threads": 2},
    "1 worker": {"num_workers": 1},
    "2 workers": {"num_workers": 2},
}
STEP_SECONDS = 0.025  # of a consumer that sleeps or burns, twice for each batch


def write_dataset(files, folder, copies=8):
    with ShardWriter(folder, samples_per_shard=-(-len(files) * copies // SHARDS)) as writer:
        for number in range(len(files) * copies):
            data = read(files[number % len(files)])
            writer.write({"__key__": f"{number:06d}", "jpg": data, "cls": number})


def write_tars(files, folder):
    """The originals as plain tars."""
    os.makedirs(folder)
    urls = [os.path.join(folder, f"{shard:06d}.tar") for shard in range(SHARDS)]
    for shard, url in enumerate(urls):
        with wds.TarWriter(url) as writer:
            for number in range(shard, len(files), SHARDS):
                data = read(files[number])
                writer.write({"__key__": f"{number:06d}", "jpg": data, "cls": number})
    return urls


def pil_crop(sample):
    image = sample["jpg"]
    key = draw_key(0, 0, int(sample["__key__"]))
    draw = Draw("random", (0.08, 1.0), (3 / 4, 4 / 3), 0.0)
    y, x, height, width, _ = draw_boxes(key, (image.height, image.width), [draw])[0].tolist()
    small = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=(x, y, x + width, y + height))
    return np.asarray(small).transpose(2, 0, 1), sample["cls"]


def stock(urls):
    """WebDataset as its documentation has it, in two workers."""

    def run():
        torch.set_num_threads(1)
        data = wds.WebDataset(urls, shardshuffle=False).decode("pil").map(pil_crop).batched(BATCH)
        loader = wds.WebLoader(data, batch_size=None, num_workers=2)
        return sum(len(labels) for _, labels in loader)

    return run


def loading(dataset, options):
    def run():
        return sum(len(labels) for _, labels in PCRLoader(dataset, BATCH, **options))

    return run


def alone(dataset, threads):
    """Decoding of what lies in memory, in the order and with the crops of the dataset."""
    held = [dataset.shards.open(number).load(SCAN) for number in range(SHARDS)]
    out = np.zeros((3, BATCH, 3, SIZE, SIZE), np.uint8)
    plan = []
    order = epoch_order(dataset.shard_sizes, Geometry(BATCH))
    for ids in worker_batches(order):
        places = list(dataset.shards.places(ids))
        table = np.concatenate([held[shard].table([row]) for _, shard, row in places])
        plan.append((table, draw_keys((0, 0), ids.tolist())))

    def run():
        with Pool(threads) as pool:
            begun = []
            for number, (table, keys) in enumerate(plan):
                target = out[number % 3]
                begun.append(IMAGE.begin(pool, table, [target], keys, keep=held))
                if len(begun) == 3:
                    assert all(begun.pop(0).wait())
            assert all(all(batch.wait()) for batch in begun)
        return len(plan) * BATCH

    return run


def measure(run):
    """Images a second, CPU milliseconds an image, and the share of the machine others took."""
    begun = (time.perf_counter(), time.process_time() + child_cpu(), machine_busy())
    images = run()
    wall = time.perf_counter() - begun[0]
    cpu = time.process_time() + child_cpu() - begun[1]
    others = max(machine_busy() - begun[2] - cpu, 0) / wall / len(os.sched_getaffinity(0))
    return {"images_per_second": images / wall, "cpu_ms": cpu / images * 1e3, "others": others}


def burn(seconds):
    """Python that never lets go of the GIL but when asked: how many rounds it makes."""
    rounds = 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        rounds += 1
    return rounds


def paced(dataset, options, step):
    """A loop whose steps take a given time: the share of it waited, and the share of its own work
    that it lost to decoding.

    A batch is decoded in less than a step: in a second step of the same length nothing is.
    """
    waited = 0.0
    rounds = []
    begun = asked = time.perf_counter()
    for number, _batch in enumerate(PCRLoader(dataset, BATCH, **options)):
        if number > 3:  # the ring is full
            waited += time.perf_counter() - asked
        else:
            begun = time.perf_counter()
        rounds.append((step(STEP_SECONDS), step(STEP_SECONDS)))
        asked = time.perf_counter()
        if number == 40:
            break
    beside, alone = np.sum(rounds[4:], axis=0)
    return {"waited": waited / (time.perf_counter() - begun), "lost": 1 - beside / alone}


def sleep(seconds):
    time.sleep(seconds)
    return 1


def check_pixels(dataset):
    """Every way gives the same batches."""
    expected = None
    for options in WAYS.values():
        loader = PCRLoader(dataset, BATCH, **options)
        found = [int(images.to(torch.int64).sum()) for images, _ in loader]
        expected = found if expected is None else expected
        assert found == expected, options


def count_segments(dataset):
    """Shared memory that this process maps in the middle of an epoch with threads."""
    batches = iter(PCRLoader(dataset, BATCH, threads=2))
    next(batches)
    with open("/proc/self/maps") as file:
        return sum("/dev/shm/" in line for line in file)


def medians(rounds):
    return {name: summary([each[name] for each in rounds]) for name in rounds[0]}


def judge_all(figures, consumers):
    def median(way, name="images_per_second"):
        return figures[way][name]["median"]

    two = median("threads=2")
    decoding = median("decoding alone, 2 threads", "cpu_ms")
    burning = consumers["burning"]["lost"]["median"]
    return [
        judge("threads=2 over threads=1", two / median("threads=1"), 1.9, at_most=False),
        judge(
            "threads=2 over decoding alone",
            two / median("decoding alone, 2 threads"),
            0.95,
            at_most=False,
        ),
        judge("CPU over decoding", median("threads=2", "cpu_ms") / decoding, 1.05, at_most=True),
        judge("threads=2 over 2 workers", two / median("2 workers"), 1.75, at_most=False),
        judge("over stock WebDataset", two / median("stock WebDataset"), 8, at_most=False),
        judge("sleeping: waited", consumers["sleeping"]["waited"]["median"], 0.01, at_most=True),
        judge("burning: lost, in process", burning, 0.05, at_most=True),
    ]


def main():
    args = parse_args(__doc__, rounds=3)
    torch.set_num_threads(1)
    with photos() as folder:
        files = jpeg_files(os.path.join(folder, "photos"))
        shards = os.path.join(folder, "shards")
        write_dataset(files, shards)
        dataset = PCRDataset(shards, scan=SCAN, decoder=IMAGE, fields=("jpg", "cls"))
        check_pixels(dataset)
        runs = {name: loading(dataset, options) for name, options in WAYS.items()}
        runs |= {f"decoding alone, {n} threads": alone(dataset, n) for n in (1, 2)}
        runs["stock WebDataset"] = stock(write_tars(files, os.path.join(folder, "tars")))
        figures = {name: [] for name in runs}
        cases = {
            "sleeping": (WAYS["threads=2"], sleep),
            "burning": (WAYS["threads=1"], burn),
        }
        consumers = {name: [] for name in cases}
        for _ in range(args.rounds):
            for name, run in runs.items():
                figures[name].append(measure(run))
            for name, (options, step) in cases.items():
                consumers[name].append(paced(dataset, options, step))
        segments = count_segments(dataset)
    figures = {name: medians(rounds) for name, rounds in figures.items()}
    consumers = {name: medians(rounds) for name, rounds in consumers.items()}
    rows = [
        (
            name,
            f"{each['images_per_second']['median']:.0f}",
            f"{each['cpu_ms']['median']:.3f}",
            f"{each['others']['median']:.0%}",
        )
        for name, each in figures.items()
    ]
    header = ("way", "images/s", "CPU ms an image", "of the machine by others")
    print_table("Scan 5, 224 px, batches of 32", header, rows)
    print(f"segments in /dev/shm: {segments}")
    targets = judge_all(figures, consumers)
    save(args, {"ways": figures, "consumers": consumers, "segments": segments}, targets)


if __name__ == "__main__":
    main()
