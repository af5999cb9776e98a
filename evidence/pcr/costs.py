"""What scans cost and what they look like: sizes, decode rates, MS-SSIM."""

import pathlib
import time

import numpy as np

import pcrshard
from pcrshard.fidelity.measure import measure
from pcrshard.jpeg.other_formats import decode

from ..learning import files_of


def _piece_sizes(url):
    """Bytes of each image up to each scan and in full: (scans + 1, images)."""
    index, urls = pcrshard.open_dataset(url)
    parts = []
    for entry, shard in zip(index.shards, urls, strict=True):
        prefix = pcrshard.Shard(shard, entry=entry).load()
        parts.append(prefix.tables.sizes)
    return np.cumsum(np.concatenate(parts, axis=1, dtype=np.int64), axis=0)


def sizes(lab):
    """Quartiles and means of the images of each set, by scan."""
    results = {}
    for name in lab.photos():
        found = _piece_sizes(lab.dataset(name))
        results[name] = {
            "images": found.shape[1],
            "quartiles": np.quantile(found, (0.25, 0.5, 0.75), axis=1).T.tolist(),
            "means": found.mean(axis=1).tolist(),
        }
    return results


def _jpegs(url, scan):
    """The images of a dataset at a scan."""
    index, urls = pcrshard.open_dataset(url)
    for entry, shard in zip(index.shards, urls, strict=True):
        for sample in pcrshard.Shard(shard, entry=entry).samples(scan):
            yield sample["jpg"]


def _rate(call, images, rounds):
    """Return images per CPU second of the fastest round."""
    best = float("inf")
    for _ in range(rounds):
        begun = time.thread_time()
        for image in images:
            call(image)
        best = min(best, time.thread_time() - begun)
    return len(images) / best


def decode_rates(lab):
    """Measure images per second at scans 1, 2, 5, and the last, and of the baseline source."""
    count, rounds = (4, 1) if lab.quick else (24, 3)
    results = {}
    for name, folder in lab.photos().items():
        every = lab.index(name).num_samples // count
        stops = (1, 2, 5, lab.index(name).num_groups)
        cases = [list(_jpegs(lab.dataset(name), stop))[::every][:count] for stop in stops]
        cases.append(
            [path.read_bytes() for path in files_of(pathlib.Path(folder))[::every][:count]]
        )
        results[name] = {
            decoder: [_rate(call, images, rounds) for images in cases]
            for decoder, call in (("native core", pcrshard.decode_image), ("libjpeg-turbo", decode))
        }
    return results


COUNTS = {"imagenet": 24, "ham10000": 10, "cars": 16, "faces_1024": 4}


def _likeness(lab, url, count=24):
    rows = measure(url, num_images=3 if lab.quick else count, rounds=1)
    return {"images": rows[0].num_images, "msssim": [row.msssim for row in rows]}


def msssim(lab):
    """Mean MS-SSIM by scan, of photographs and of the tasks' validation images."""
    found = {}
    for name in () if lab.quick else lab.photos():
        found[name] = _likeness(lab, lab.dataset(name), COUNTS[name])
    for task in lab.tasks:
        found[task.name] = _likeness(lab, lab.dataset(task.name, "val"))
    return found


def msssim_q95(lab):
    """MS-SSIM of the tasks at each scan of ``q95``."""
    return {
        task.name: _likeness(lab, lab.dataset(task.name, "val", "q95"))["msssim"]
        for task in lab.tasks
    }


def bytes_per_image(lab):
    """Bytes of a training image at each scan of each script, by task."""
    found = {}
    for task in lab.tasks:
        for script in ("standard", "q95"):
            index = lab.index(task.name, "train", script)
            found.setdefault(task.name, {})[script] = {
                str(scan): index.prefix_bytes(scan) / index.num_samples
                for scan in (*range(1, index.num_groups + 1), "full")
            }
    return found
