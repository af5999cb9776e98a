"""The operations whose instructions are counted: ``gate.py`` runs this under callgrind.

    python operations.py MARKS FOLDER    # the library of marks.c, and a folder to work in

Prints a JSON list of (operation, what one of it is, how many of these were done), in the order in
which callgrind dumps. Each runs once before it is counted, so that imports and caches are warm.
"""

import ctypes
import gc
import json
import pathlib
import shutil
import sys

import numpy as np
import torch
import webdataset as wds

import pcrshard
from pcrshard import native
from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.format.levels import Levels
from pcrshard.format.scan_script import STANDARD
from pcrshard.native import sparse_words
from pcrshard.testing import make_jpeg

HEIGHT, WIDTH = 375, 500
NUM_IMAGES = 4
NUM_WORDS = 1 << 20
SCANS = {"1": 1, "2": 2, "5": 5, "full": "full"}


def make_shards(folder):
    """Synthetic pictures, the same everywhere, and a call that encodes them."""
    photos = folder / "photos" / "class"
    photos.mkdir(parents=True)
    for seed in range(NUM_IMAGES):
        (photos / f"{seed}.jpg").write_bytes(make_jpeg(seed, HEIGHT, WIDTH, quality=90))

    def encode():
        shutil.rmtree(folder / "shards", ignore_errors=True)
        options = pcrshard.EncodeOptions(num_shards=1, fmt=pcrshard.ShardFormat("standard"))
        pcrshard.encode(str(photos.parent), str(folder / "shards"), options, workers=1)

    return encode


def decode(jpegs):
    """Whole pictures."""
    for jpeg in jpegs:
        assert native.decode([jpeg]).shape == (HEIGHT, WIDTH, 3)


def crop(jpegs):
    """A crop of each, resized."""
    for jpeg in jpegs:
        pixels = native.decode([jpeg], crop=(40, 60, 280, 300), size=(224, 224))
        assert pixels.shape == (224, 224, 3)


def join(shard):
    """The JPEGs of scan 5, joined."""
    jpegs = [bytes(sample["jpg"]) for sample in shard.load(5).samples()]
    assert len(jpegs) == NUM_IMAGES
    return jpegs


def load_epoch(shards):
    """One batch of center crops by PCRLoader."""
    dataset = pcrshard.PCRDataset(shards, scan=5, decoder=pcrshard.ImageDecoder(224, "center"))
    (batch,) = pcrshard.PCRLoader(dataset, NUM_IMAGES, threads=1)
    assert batch["jpg"].shape == (NUM_IMAGES, 3, 224, 224)


def webdataset_epoch(shards):
    """The same by a WebDataset pipeline."""
    index, urls = pcrshard.open_dataset(shards)
    dataset = wds.WebDataset(pcrshard.shards(urls), shardshuffle=False)
    samples = list(dataset.pcr_scan(5, index=index).pcr_decode(size=224, crop="center"))
    assert len(samples) == NUM_IMAGES


def image_operations(folder):
    """From photographs to batches."""
    encode = make_shards(folder)
    encode()
    shards = str(folder / "shards")
    shard = pcrshard.Shard(pcrshard.open_dataset(shards)[1][0])
    files = [path.read_bytes() for path in sorted((folder / "photos" / "class").iterdir())]
    levels = Levels(STANDARD, (1e-5, 1e-6, 0.0))
    found = [
        ("encode", "image", NUM_IMAGES, encode),
        ("to scans", "image", NUM_IMAGES, lambda: [encode_jpeg(file) for file in files]),
        ("to levels", "image", NUM_IMAGES, lambda: [encode_jpeg(file, levels) for file in files]),
    ]
    for name, scan in SCANS.items():
        jpegs = [bytes(sample["jpg"]) for sample in shard.load(scan).samples()]
        found.append((f"decode, scan {name}", "image", NUM_IMAGES, lambda j=jpegs: decode(j)))
    jpegs = join(shard)
    found += [
        ("crop to 224, scan 5", "image", NUM_IMAGES, lambda: crop(jpegs)),
        ("join, scan 5", "image", NUM_IMAGES, lambda: join(shard)),
        ("PCRLoader batch, scan 5", "image", NUM_IMAGES, lambda: load_epoch(shards)),
        (".pcr_decode, scan 5", "image", NUM_IMAGES, lambda: webdataset_epoch(shards)),
    ]
    return found


def delta_operations():
    """One in 32 of a million words changes; both include the checksum of all words."""
    rng = np.random.default_rng(0)
    was = rng.integers(0, 1 << 16, NUM_WORDS, dtype=np.uint16)
    now = was.copy()
    now[rng.choice(NUM_WORDS, NUM_WORDS // 32, replace=False)] += 1
    scratch = np.empty(NUM_WORDS, np.uint8)
    encoded = sparse_words.encode(now, was.copy(), scratch, True)
    assert encoded is not None
    crc, gaps, steps = encoded
    # One for each run: the instructions of a copy depend on where its memory is.
    copies = iter([was.copy() for _ in range(4)])

    def encode():
        assert sparse_words.encode(now, next(copies), scratch, True)

    def apply():
        assert sparse_words.apply(next(copies), gaps, steps, True) == crc

    return [
        ("delta, encode", "word", NUM_WORDS, encode),
        ("delta, apply", "word", NUM_WORDS, apply),
    ]


def main():
    """Count each operation."""
    marks = ctypes.CDLL(sys.argv[1])
    torch.set_num_threads(1)
    gc.disable()  # a collection would count where it happens to fall
    done = []
    for name, unit, count, run in image_operations(pathlib.Path(sys.argv[2])) + delta_operations():
        run()
        marks.start()
        run()
        marks.stop()
        done.append((name, unit, count))
    print(json.dumps(done))


if __name__ == "__main__":
    main()
