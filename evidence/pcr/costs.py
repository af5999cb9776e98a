"""What scans cost and what they look like: sizes, decode rates, MS-SSIM."""

import pathlib
import random
import time

import numpy as np

import pcrshard
from pcrshard.fidelity.measure import measure
from pcrshard.jpeg.other_formats import decode


def _loaded(url):
    """The prefix of each shard of a dataset, in full."""
    index, urls = pcrshard.open_dataset(url)
    for entry, shard in zip(index.shards, urls, strict=True):
        with pcrshard.Shard(shard, entry=entry).load() as prefix:
            yield prefix


def _piece_sizes(url):
    """Bytes of each image up to each scan and in full: (scans + 1, images)."""
    parts = []
    for prefix in _loaded(url):
        found = prefix.contents
        parts.append(np.concatenate([found.groups.table.sizes, found.tail.table.sizes]))
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


def _pieces(url, count):
    """Pieces of random images: for each its scans, in order."""
    found = []
    for prefix in _loaded(url):
        field = prefix.index.schema.streams[0][0]
        samples = prefix.samples(
            select=lambda _, name, field=field: name == field,
            decode=lambda pieces: [bytes(piece) for piece in pieces],
        )
        found += [sample[field] for sample in samples if field in sample]
    random.Random(0).shuffle(found)
    return found[:count]


def _sources(folder, count):
    files = sorted(path for path in pathlib.Path(folder).rglob("*") if path.is_file())
    random.Random(0).shuffle(files)
    return [path.read_bytes() for path in files[:count]]


def _rate(call, images, rounds):
    """Return images per CPU second of the fastest round."""
    best = float("inf")
    for _ in range(rounds):
        begun = time.thread_time()
        for image in images:
            call(image)
        best = min(best, time.thread_time() - begun)
    return len(images) / best


def _turbo(image):
    joined = image if isinstance(image, bytes) else b"".join(image)
    return decode(joined if joined.endswith(b"\xff\xd9") else joined + b"\xff\xd9")


def decode_rates(lab):
    """Measure images per second at scans 1, 2, 5, and the last, and of the baseline source."""
    count, rounds = (4, 1) if lab.quick else (24, 3)
    results = {}
    for name, folder in lab.photos().items():
        samples = _pieces(lab.dataset(name), count)
        stops = (1, 2, 5, lab.index(name).num_groups)
        cases = [[pieces[:stop] for pieces in samples] for stop in stops]
        cases.append(_sources(folder, count))
        results[name] = {
            decoder: [_rate(call, images, rounds) for images in cases]
            for decoder, call in (("native core", pcrshard.decode_image), ("libjpeg-turbo", _turbo))
        }
    return results


def msssim(lab):
    """Mean MS-SSIM by scan, of photographs and of the tasks' validation images."""
    wanted = {name: lab.dataset(name) for name in lab.photos() if not lab.quick}
    wanted |= {task.name: lab.dataset(task.name, "val") for task in lab.tasks}
    counts = {"imagenet": 24, "ham10000": 10, "cars": 16, "faces_1024": 4}
    results = {}
    for name, url in wanted.items():
        rows = measure(url, num_images=3 if lab.quick else counts.get(name, 24), rounds=1)
        results[name] = {"images": rows[0].num_images, "msssim": [row.msssim for row in rows]}
    return results


def msssim_q95(lab):
    """MS-SSIM of the tasks at each scan of ``q95``."""
    found = {}
    for task in lab.tasks:
        url = lab.dataset(task.name, "val", "q95")
        rows = measure(url, num_images=3 if lab.quick else 24, rounds=1)
        found[task.name] = [row.msssim for row in rows]
    return found


def bytes_per_image(lab):
    """Bytes of a training image at each scan of each script, by task."""
    return {
        task.name: {
            script: _prefixes(lab.index(task.name, "train", script))
            for script in ("standard", "q95")
        }
        for task in lab.tasks
    }


def _prefixes(index):
    scans = [*range(1, index.num_groups + 1), "full"]
    return {str(scan): index.prefix_bytes(scan) / index.num_samples for scan in scans}
