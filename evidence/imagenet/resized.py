"""Scans of pictures resized once: ``encode --resize-short 256 --reencode-quality 90``."""

import time

import numpy as np

import pcrshard
from pcrshard.format.shard_format import SCRIPTS

from .. import lites
from .photographs import RESIZED, encoded, photographs

ROUNDS = 7
BATCH = 65


def milliseconds(decoder, files):
    """CPU milliseconds to decode a file: the least of some rounds, because others' work makes it
    longer and nothing makes it shorter.
    """
    seconds = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        for file in files:
            decoder(file)
        seconds.append(time.process_time() - begun)
    return 1000 * min(seconds) / len(files)


def measure(lab):
    """For each scan of each script: mean bytes, CPU milliseconds to decode and crop, and the
    number of photographs that each network classifies correctly, in their order as ``1`` and ``0``.
    """
    chosen = photographs(lab)
    labels = {photograph.path.stem: photograph.label for photograph in chosen}
    networks = {
        name: lites.Classifier(lites.pretrained(name))
        for name in lites.NAMES
        if lites.available(name)
    }
    decoder = pcrshard.ImageDecoder(64 if lab.quick else 224, "center")
    found = {}
    for script in SCRIPTS:
        index, paths = encoded(lab, chosen, script, RESIZED)
        for scan in range(1, index.num_groups + 1):
            samples = [
                sample
                for path, entry in zip(paths, index.shards, strict=True)
                for sample in pcrshard.Shard(path, entry=entry).samples(scan)
            ]
            files = [sample["jpg"] for sample in samples]
            row = {"bytes": index.prefix_bytes(scan) / index.num_samples}
            row["milliseconds"] = milliseconds(decoder, files[:BATCH])
            wanted = np.array([labels[sample["__key__"]] for sample in samples])
            images = np.stack([decoder(file) for file in files])
            for name, classify in networks.items():
                parts = range(0, len(images), BATCH)
                scores = [classify(images[at : at + BATCH]).argmax(1).numpy() for at in parts]
                right = np.concatenate(scores) == wanted
                row[name] = "".join(map(str, right.astype(int)))
            found[f"{script} {scan}"] = row
            print(f"{script} {scan}: {row['bytes']:.0f} bytes", flush=True)
    return {"images": len(chosen), "points": found}
