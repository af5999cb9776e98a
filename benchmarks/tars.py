"""Plain tars with an index, against stock WebDataset and PCR shards of the same photographs: CPU
time of whole loaders, time to the first batch, bytes to index and to read a subset, and opening
many.

Random crops to 224 pixels, uint8 batches of 32, from the page cache, one process without threads.
WebDataset decodes by Pillow, and by a tuned decoder: simplejpeg, which scales while it decodes, or
without it libjpeg-turbo's scaling by Pillow's ``draft``. Sizes and pixels are asserted.
"""

import glob
import importlib.util
import io
import math
import os
import tarfile
import time

import numpy as np
import torch
import webdataset as wds
from PIL import Image

from evidence.peers.images import SIDE, crop_picture, decode_tuned, draw_box
from pcrshard import ImageDecoder, PCRDataset, PCRLoader, index_tars, open_dataset
from pcrshard.format.dataset_index import DatasetIndex, ShardTable
from pcrshard.reading.plain_tar import find_extents
from pcrshard.reading.shard import Shard

from .harness import cpu, ratios, read
from .read import write_shards

ROUNDS = 7
BATCH, SHARDS, MANY = 32, 8, 10_000
IMAGE = ImageDecoder(SIDE, "random")


def _draft(jpeg):
    """Decode by Pillow at the smallest of libjpeg-turbo's scales that the crop allows."""
    with Image.open(io.BytesIO(jpeg)) as picture:
        width, height = picture.size
        y, x, h, w = draw_box(height, width)
        picture.draft("RGB", (math.ceil(width * SIDE / w), math.ceil(height * SIDE / h)))
        across, down = picture.width / width, picture.height / height
        box = (x * across, y * down, (x + w) * across, (y + h) * down)
        small = picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box)
    return np.asarray(small)


def _tuned():
    return decode_tuned if importlib.util.find_spec("simplejpeg") else _draft


def _stock(urls, decode):
    """WebDataset with a decoder; ``None`` is its own by Pillow, as its documentation has it."""
    data = wds.WebDataset(urls, shardshuffle=False)
    if decode is None:
        data = data.decode("pil").map(lambda each: (crop_picture(each["jpg"]), each["cls"]))
    else:
        data = data.to_tuple("jpg", "cls").map_tuple(decode, int)
    return sum(len(labels) for _, labels in wds.WebLoader(data.batched(BATCH), batch_size=None))


def _loaded(dataset):
    loader = PCRLoader(dataset, BATCH, threads=0, drop_last=False)
    return sum(len(labels) for _, labels in loader)


def _first(folder):
    """Open a dataset and wait for the first batch of an epoch."""
    dataset = PCRDataset(folder, decoder=IMAGE, fields=("jpg", "cls"))
    next(iter(PCRLoader(dataset, BATCH, threads=0)))


def _many(folder, name):
    """Write a dataset index of many shards, all the same."""
    index, _ = open_dataset(folder)
    rows = np.repeat(index.shards.rows[:1], MANY, axis=0)
    names = tuple(f"data-{number:06d}.tar" for number in range(MANY))
    many = DatasetIndex(index.schema, ShardTable(names, rows), tars=index.tars)
    os.makedirs(name)
    with open(os.path.join(name, "pcr.json"), "wb") as file:
        file.write(many.encode())
    return name


def _copy(tars, folder, *, labels, floats=False):
    """Copy tars; with ``floats`` times of writing as WebDataset's writer has them, which take each
    member a header of 1 kB more.
    """
    os.makedirs(folder)
    for path in sorted(glob.glob(f"{tars}/*.tar")):
        copy = f"{folder}/{os.path.basename(path)}"
        with tarfile.open(path) as tar, tarfile.open(copy, "w") as to:
            for info in tar:
                if labels or info.name.endswith(".jpg"):
                    plain = tarfile.TarInfo(info.name)
                    plain.size, plain.mtime = info.size, time.time() if floats else 0
                    to.addfile(plain, tar.extractfile(info))
    return folder


def _indexing(tars, folder):
    """Return the bytes of tars, those read while indexing them, and those of the indexes."""
    before = _read_bytes()
    index_tars(tars, folder)
    listed = _read_bytes() - before
    index, _ = open_dataset(folder)
    total = sum(map(os.path.getsize, glob.glob(f"{tars}/*.tar")))
    return total, listed, sum(entry.index_stop for entry in index.shards)


def _bytes(bench, tars):
    """Count what indexing reads, and what subsets of 2 % would."""
    _indexing(tars, f"{tars}-first")  # imports what it needs
    cases = {}
    for labels, what in ((False, "pictures"), (True, "pictures and labels")):
        for floats, writer in ((False, ""), (True, ", by WebDataset's writer")):
            copy = f"{tars}-{labels}-{floats}"
            cases[what + writer] = _copy(tars, copy, labels=labels, floats=floats)
    found = {name: _indexing(each, f"{each}-counted") for name, each in cases.items()}
    index, urls = open_dataset(f"{tars}-first")
    rng = np.random.default_rng(0)
    taken = wanted = 0
    for url, entry in zip(urls, index.shards, strict=True):
        own = Shard(url, entry=entry).index
        rows = np.flatnonzero(rng.random(own.num_samples) < 0.02)
        taken += find_extents(own, rows).num_bytes
        wanted += len(rows)
    rows = [
        {"tars": name, "bytes": total, "indexing reads": listed / total, "index": size / total}
        for name, (total, listed, size) in found.items()
    ]
    bench.show("Bytes of indexing, of the tars", rows)
    total, _, size = found["pictures and labels"]
    part = wanted / index.num_samples
    bench.show("Bytes of a subset", [{"samples": part, "bytes": (taken + size) / total}])
    total, listed, size = found["pictures"]
    bench.target("bytes of indexing pictures", listed / total, most=0.01)
    if not bench.quick:
        bench.target("bytes of a subset, over its samples", (taken + size) / total / part, most=2.5)


def _read_bytes():
    """Bytes that this process asked files for."""
    with open("/proc/self/io") as file:
        return int(next(line for line in file if line.startswith("rchar:")).split()[1])


def run(bench):
    torch.set_num_threads(1)
    with bench.photos() as folder:
        files = bench.files(os.path.join(folder, "photos", "imagenet"))
        files = [path for path in files if b"\xff\xc0" in read(path)[:4096]]  # baseline
        assert files
        repeated = files * (16 if bench.quick else 4)
        shards, tars = (os.path.join(folder, name) for name in ("shards", "tars"))
        write_shards(repeated, shards, SHARDS, tars)
        index_tars(tars)
        urls = sorted(glob.glob(f"{tars}/*.tar"))
        of = {"decoder": IMAGE, "fields": ("jpg", "cls")}
        plain, full = PCRDataset(tars, **of), PCRDataset(shards, **of)
        low = full.at(full.shards.entries[0].num_groups // 2)
        one, other = (next(iter(PCRLoader(each, 8))) for each in (plain, full))
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True)), "the same pixels"
        ways = {
            "plain tars, PCRLoader": lambda: _loaded(plain),
            "PCR shards at full": lambda: _loaded(full),
            "PCR shards at half the scans": lambda: _loaded(low),
            "WebDataset, Pillow": lambda: _stock(urls, None),
            "WebDataset, Pillow's draft": lambda: _stock(urls, _draft),
            "WebDataset, tuned": lambda: _stock(urls, _tuned()),
        }
        counts = {name: way() for name, way in ways.items()}
        assert set(counts.values()) == {len(repeated)}, counts
        spent = bench.compare("CPU per image", ways, cpu, per=len(repeated))
        ours = spent["plain tars, PCRLoader"]
        bench.target("of WebDataset", ratios(ours, spent["WebDataset, Pillow"]), most=0.40)
        bench.target("of the tuned one", ratios(ours, spent["WebDataset, tuned"]), most=0.50)
        starts = {"plain tars": lambda: _first(tars), "PCR shards": lambda: _first(shards)}
        waited = bench.compare("First batch", starts, time.perf_counter)
        first = ratios(waited["plain tars"], waited["PCR shards"])
        bench.target("first batch over that of PCR shards", first, most=1.0)
        _bytes(bench, tars)
        many = [
            _many(source, os.path.join(folder, f"many-{i}"))
            for i, source in enumerate((tars, shards))
        ]
        opened = bench.compare(
            f"Open {MANY} shards",
            {"plain tars": lambda: PCRDataset(many[0]), "PCR shards": lambda: PCRDataset(many[1])},
            time.process_time,
        )
        bench.target("opening", ratios(opened["plain tars"], opened["PCR shards"]), most=1.1)
