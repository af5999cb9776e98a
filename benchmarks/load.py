"""PCRLoader by threads and by workers, against decoding alone from memory and stock WebDataset:
random crops to 224 pixels at scan 5, uint8 batches of 64, from the page cache. Two more loops are
busy while the next batch is decoded: one sleeps as an accelerator would, one runs Python.
"""

import itertools
import os
import time

import numpy as np
import torch
import webdataset as wds
from torch.utils.data import DataLoader

from evidence.peers.images import crop_picture
from pcrshard import ImageDecoder, PCRDataset, PCRLoader, open_dataset
from pcrshard.native.pool import Pool, draw_keys

from .harness import Quartiles, cpu, ratios
from .read import write_shards

ROUNDS = 5
SCAN, SIZE, BATCH, SHARDS = 5, 224, 64, 8
IMAGE = ImageDecoder(SIZE, "random")
WAYS = {f"threads={n}": {"threads": n} for n in (0, 1, 2)}
WAYS |= {f"{n} workers": {"num_workers": n} for n in (1, 2)}
STEP_SECONDS = 0.05


def _count(batches):
    return sum(len(labels) for _, labels in batches)


def _stock_crop(sample):
    return crop_picture(sample["jpg"]).transpose(2, 0, 1), sample["cls"]


def _stock(urls, workers):
    """WebDataset as its documentation has it."""
    data = wds.WebDataset(urls, shardshuffle=False).decode("pil").map(_stock_crop).batched(BATCH)
    return _count(wds.WebLoader(data, batch_size=None, num_workers=workers))


def _staged(shards, threads):
    """WebDataset with the stages of this package."""
    data = wds.WebDataset(open_dataset(shards)[1], shardshuffle=False).pcr_scan(SCAN, index=shards)
    data = data.pcr_decode(SIZE, "random", threads=threads).to_tuple("jpg", "cls")
    return _count(data.batched(BATCH))


def _alone(dataset, threads):
    """Return a function that decodes what lies in memory, with the loader's crops."""
    held = [dataset.shards.open(number).load(SCAN) for number in range(SHARDS)]
    table = np.concatenate([prefix.table(list(range(prefix.index.num_samples))) for prefix in held])
    batches = np.arange(len(table) // BATCH * BATCH).reshape(-1, BATCH)
    keys = draw_keys((0, 0), range(len(table)))
    out = np.zeros((BATCH, 3, SIZE, SIZE), np.uint8)

    def run():
        with Pool(threads) as pool:
            for ids in batches:
                own = [keys[number] for number in ids]
                assert all(IMAGE.begin(pool, table[ids], [out], own, keep=held).wait())
        return batches.size

    return run


def _burn(seconds):
    """Return the number of rounds of Python, which releases the GIL only when asked."""
    end = time.perf_counter() + seconds
    return sum(1 for _ in iter(lambda: time.perf_counter() < end, False))


def _beside(dataset, step, **options):
    """Return the fraction of time that a loop waits, and the fraction of its work lost to decoding.

    A batch takes less than a step, so nothing is decoded during the second half of a step.
    """
    waited, rounds = 0.0, []
    batches = iter(PCRLoader(dataset, BATCH, **options))
    next(itertools.islice(batches, 3, None))  # batches are ahead
    begun = asked = time.perf_counter()
    for _ in batches:
        waited += time.perf_counter() - asked
        rounds.append((step(STEP_SECONDS), step(STEP_SECONDS)))
        asked = time.perf_counter()
    beside, alone = np.sum(rounds, axis=0)
    return waited / (asked - begun), 1 - beside / alone


def run(bench):
    torch.set_num_threads(1)
    with bench.photos() as folder:
        files = bench.files(os.path.join(folder, "photos", "imagenet")) * (64 if bench.quick else 4)
        shards, tars = (os.path.join(folder, name) for name in ("shards", "tars"))
        write_shards(files, shards, SHARDS, tars)
        urls = bench.files(tars)
        dataset = PCRDataset(shards, scan=SCAN, decoder=IMAGE, fields=("jpg", "cls"))
        sums = {
            str([int(images.long().sum()) for images, _ in PCRLoader(dataset, BATCH, **options)])
            for options in WAYS.values()
        }
        assert len(sums) == 1, "every way gives the same batches"
        runs = {n: lambda o=o: _count(PCRLoader(dataset, BATCH, **o)) for n, o in WAYS.items()}
        runs |= {f"decoding, threads={n}": _alone(dataset, n) for n in (0, 2)}
        runs["WebDataset"] = lambda: _stock(urls, 0)
        runs["WebDataset, 2 workers"] = lambda: _stock(urls, 2)
        runs[".pcr_decode(threads=2)"] = lambda: _staged(shards, 2)
        runs["random access"] = lambda: _count(DataLoader(dataset, BATCH, True, num_workers=2))
        images = {name: run_() for name, run_ in runs.items()}
        spent = bench.interleaved(runs, lambda: np.array([time.perf_counter(), cpu()]))
        rates = {n: [images[n] / wall for wall, _ in each] for n, each in spent.items()}
        costs = {n: [1000 * used / images[n] for _, used in each] for n, each in spent.items()}
        rounds = range(bench.rounds)
        sleeping = [_beside(dataset, lambda s: time.sleep(s) or 1, threads=2) for _ in rounds]
        burning = [_beside(dataset, _burn, threads=1) for _ in rounds]
    columns = {"images/s": rates, "CPU ms an image": costs}
    rows = [{"way": n} | {c: Quartiles(v[n]) for c, v in columns.items()} for n in runs]
    bench.show("Scan 5, 224 px, batches of 64", rows)
    for what, figures, first, second, limit in (
        ("CPU over decoding, threads=0", costs, "threads=0", "decoding, threads=0", {"most": 1.1}),
        ("CPU over decoding, threads=2", costs, "threads=2", "decoding, threads=2", {"most": 1.1}),
        ("CPU of .pcr_decode", costs, ".pcr_decode(threads=2)", "threads=2", {"most": 1.08}),
        ("CPU of stock WebDataset", costs, "WebDataset", "threads=0", {"least": 3}),
        ("threads=2 over threads=1", rates, "threads=2", "threads=1", {"least": 1.85}),
        ("threads=2 over 2 workers", rates, "threads=2", "2 workers", {"least": 1.75}),
        ("threads=2 over stock", rates, "threads=2", "WebDataset, 2 workers", {"least": 8}),
    ):
        bench.target(what, ratios(figures[first], figures[second]), **limit)
    bench.target("images/s by random access", Quartiles(rates["random access"]), least=1300)
    bench.target("a loop that sleeps waits", Quartiles(x for x, _ in sleeping), most=0.015)
    bench.target("a loop of Python loses to decoding", Quartiles(x for _, x in burning), most=0.05)
