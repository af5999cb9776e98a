"""Measures the native core against libjpeg-turbo and Pillow: CPU time per image, one thread.

Every decode is timed side by side with its reference on the same image, the order changing from
round to round, and the medians are compared. Each result is checked before it is timed. Progressive
prefixes are made with ``jpegtran -copy none -progressive`` and cut after a scan.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import math
import platform
import random
import statistics
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import PIL
import turbojpeg
from PIL import Image

from pcrshard import native

SCANS = (1, 2, 5, 10)
EOI = b"\xff\xd9"
TARGET = 224
LARGE_PIXELS = 1_000_000
TARGETS = {
    "whole": {1: 3.5, 2: 2.5, 5: 1.6, 10: 1.0, 0: 1.0},
    "crop vs Pillow": {1: 6.0, 2: 5.0, 5: 3.0, 10: 1.6},
    "crop vs OpenCV": {1: 4.5, 2: 4.0, 5: 2.2, 10: 1.25},
    "large vs Pillow draft": {5: 5.0},
    "large vs Pillow draft, same scan": {5: 5.0},
}
Job = Callable[[], np.ndarray]


def scan_ends(jpeg: bytes) -> list[int]:
    """Offset after each scan's entropy data."""
    ends, at = [], 2
    while jpeg[at + 1] != 0xD9:
        marker, at = jpeg[at + 1], at + 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
        if marker == 0xDA:
            at = jpeg.index(b"\xff", at)
            while jpeg[at + 1] == 0 or 0xD0 <= jpeg[at + 1] <= 0xD7:
                at = jpeg.index(b"\xff", at + 2)
            ends.append(at)
    return ends


def prefixes(source: bytes) -> dict[int, bytes]:
    """The standard script's scans 1..k for the k that are measured; empty for other scripts."""
    command = ["jpegtran", "-copy", "none", "-progressive"]
    whole = subprocess.run(command, input=source, capture_output=True, check=True).stdout
    ends = scan_ends(whole)
    return {k: whole[: ends[k - 1]] for k in SCANS} if len(ends) == max(SCANS) else {}


def random_crop(height: int, width: int, rng: random.Random) -> tuple[int, int, int, int]:
    """RandomResizedCrop's (y, x, h, w): scale (0.08, 1), ratio (3/4, 4/3)."""
    for _ in range(10):
        area = height * width * rng.uniform(0.08, 1)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return rng.randint(0, height - h), rng.randint(0, width - w), h, w
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


def medians(jobs: dict[str, Job], rounds: int) -> dict[str, float]:
    """Median CPU milliseconds of each job; every round runs all of them, in another order."""
    times: dict[str, list[int]] = {name: [] for name in jobs}
    rng = random.Random(0)
    for _ in range(rounds):
        for name in rng.sample(list(jobs), len(jobs)):
            start = time.process_time_ns()
            jobs[name]()
            times[name].append(time.process_time_ns() - start)
    return {name: statistics.median(values) / 1e6 for name, values in times.items()}


def pillow_crop(
    source: bytes, crop: tuple[int, int, int, int], *, draft: bool = False
) -> np.ndarray:
    """Decode + antialiased bilinear resize with a box, to CHW."""
    image = Image.open(io.BytesIO(source))
    y, x, h, w = crop
    scale = 1.0
    if draft:
        full = image.width
        image.draft("RGB", (TARGET, TARGET))
        scale = image.width / full
    box = (
        x * scale,
        y * scale,
        min((x + w) * scale, image.width),
        min((y + h) * scale, image.height),
    )
    pixels = image.convert("RGB").resize((TARGET, TARGET), Image.Resampling.BILINEAR, box=box)
    return np.ascontiguousarray(np.asarray(pixels).transpose(2, 0, 1))


def opencv_crop(
    codec: turbojpeg.TurboJPEG, source: bytes, crop: tuple[int, int, int, int]
) -> np.ndarray:
    """libjpeg-turbo decode + OpenCV's INTER_AREA resize, to CHW."""
    y, x, h, w = crop
    pixels = codec.decode(source, pixel_format=turbojpeg.TJPF_RGB)[y : y + h, x : x + w]
    pixels = cv2.resize(pixels, (TARGET, TARGET), interpolation=cv2.INTER_AREA)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def native_job(stream: bytes, out: np.ndarray, **options: object) -> Job:
    """A decode into a buffer that is reused, as a loader fills rows of a batch."""
    return lambda: native.decode([stream], out=out, **options)


def whole_jobs(
    source: bytes, streams: dict[int, bytes], codec: turbojpeg.TurboJPEG
) -> dict[str, Job]:
    """Whole image to RGB."""
    reference = codec.decode(source, pixel_format=turbojpeg.TJPF_RGB)
    out = np.empty_like(reference)
    jobs: dict[str, Job] = {
        "libjpeg-turbo": lambda: codec.decode(source, pixel_format=turbojpeg.TJPF_RGB)
    }
    for k, stream in {0: source, **streams}.items():
        jobs[f"native {k}"] = native_job(stream, out)
    for k in (0, max(SCANS)):
        if not np.array_equal(jobs[f"native {k}"](), reference):
            raise SystemExit(f"native decode differs from libjpeg-turbo at scan {k}")
    return jobs


def crop_jobs(
    source: bytes,
    streams: dict[int, bytes],
    codec: turbojpeg.TurboJPEG,
    crop: tuple[int, int, int, int],
) -> dict[str, Job]:
    """A random crop to 224 x 224, CHW."""
    out = np.empty((3, TARGET, TARGET), np.uint8)
    jobs: dict[str, Job] = {
        "Pillow": lambda: pillow_crop(source, crop),
        "OpenCV": lambda: opencv_crop(codec, source, crop),
    }
    for k, stream in streams.items():
        jobs[f"native {k}"] = native_job(
            stream, out, crop=crop, size=(TARGET, TARGET), layout="chw"
        )
    exact = native.decode([source], crop=crop, size=(TARGET, TARGET), layout="chw", scale=1)
    difference = np.abs(exact.astype(int) - pillow_crop(source, crop)).mean()
    if difference >= 1:
        raise SystemExit(f"expected a resize within 1 grey level of Pillow's, got {difference:.2f}")
    return jobs


def large_jobs(source: bytes, streams: dict[int, bytes], height: int, width: int) -> dict[str, Job]:
    """A whole large photograph to 224 x 224."""
    out = np.empty((3, TARGET, TARGET), np.uint8)
    crop = (0, 0, height, width)
    jobs: dict[str, Job] = {"Pillow draft": lambda: pillow_crop(source, crop, draft=True)}
    for k, stream in streams.items():
        jobs[f"native {k}"] = native_job(stream, out, size=(TARGET, TARGET), layout="chw")
        jobs[f"Pillow draft {k}"] = functools.partial(pillow_crop, stream + EOI, crop, draft=True)
    return jobs


def add(total: dict[str, list[float]], times: dict[str, float]) -> None:
    for name, value in times.items():
        total.setdefault(name, []).append(value)


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Milliseconds per image of every job, per table."""
    codec, rng = turbojpeg.TurboJPEG(), random.Random(arguments.seed)
    tables: dict[str, dict[str, list[float]]] = {"whole": {}, "crop": {}, "large": {}}
    with tarfile.open(arguments.photos) as tar:
        members = [m for m in tar.getmembers() if m.isfile()]
        chosen = [m for m in members if "/imagenet/" in m.name]
        rng.shuffle(chosen)
        large = [m for m in members if "/imagenet/" not in m.name]
        for member in chosen[: arguments.limit] + large:
            source = tar.extractfile(member).read()
            header = native.read_header([source])
            is_large = header.height * header.width >= LARGE_PIXELS
            if (
                header.num_components != 3
                or header.progressive
                or (member in large and not is_large)
            ):
                continue
            streams = prefixes(source)
            if member in large:
                add(
                    tables["large"],
                    medians(large_jobs(source, streams, header.height, header.width), 5),
                )
                continue
            add(tables["whole"], medians(whole_jobs(source, streams, codec), arguments.rounds))
            crop = random_crop(header.height, header.width, rng)
            add(tables["crop"], medians(crop_jobs(source, streams, codec, crop), arguments.rounds))
    return tables


def ratios(tables: dict[str, dict[str, list[float]]]) -> dict[str, dict[int, float]]:
    """How many times faster the native core is, by the summed time of all images."""
    totals = {
        table: {name: sum(values) for name, values in jobs.items()}
        for table, jobs in tables.items()
    }
    pairs = {
        "whole": ("whole", "libjpeg-turbo"),
        "crop vs Pillow": ("crop", "Pillow"),
        "crop vs OpenCV": ("crop", "OpenCV"),
        "large vs Pillow draft": ("large", "Pillow draft"),
        "large vs Pillow draft, same scan": ("large", "Pillow draft {}"),
    }
    speeds: dict[str, dict[int, float]] = {}
    for title, (table, reference) in pairs.items():
        for name, total in totals[table].items():
            if name.startswith("native"):
                scan = int(name.split()[1])
                speeds.setdefault(title, {})[scan] = totals[table][reference.format(scan)] / total
    return speeds


def report(tables: dict[str, dict[str, list[float]]], speeds: dict[str, dict[int, float]]) -> None:
    for table, jobs in tables.items():
        print(
            f"{table}: CPU ms per image, mean over {max(map(len, jobs.values()), default=0)} images"
        )
        for name, values in jobs.items():
            print(f"  {name:16} {statistics.fmean(values):8.3f}")
    for title, by_scan in speeds.items():
        for k, speed in by_scan.items():
            target = TARGETS[title].get(k)
            verdict = (
                ""
                if target is None
                else f"  target {target:.2f} {'met' if speed >= target else 'MISSED'}"
            )
            print(f"{title:34} {f'scan {k}' if k else 'source':8} {speed:6.2f}x{verdict}")


def draw(speeds: dict[str, dict[int, float]], path: Path) -> None:
    """One picture: speed relative to the reference, by scan."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    titles = list(speeds)
    for i, title in enumerate(titles):
        heights = [speeds[title].get(k, 0) for k in SCANS]
        positions = [x + (i - (len(titles) - 1) / 2) * 0.17 for x in range(len(SCANS))]
        bars = axes.bar(positions, heights, 0.16, label=title)
        axes.bar_label(bars, fmt="%.1f", fontsize=6)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(SCANS)), [f"scan {k}" if k < max(SCANS) else "full" for k in SCANS])
    axes.set_ylabel("times faster than the reference")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def machine() -> dict[str, str]:
    """What the numbers depend on."""
    processor = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":")[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        processor = names[0] if names else processor
    return {
        "processor": processor,
        "python": platform.python_version(),
        "backend": native.backend(),
        "pillow": PIL.__version__,
        "opencv": cv2.__version__,
        "numpy": np.__version__,
        "pyturbojpeg": getattr(turbojpeg, "__version__", "unknown"),
    }


def main() -> None:
    """Runs the tables, writes the JSON, and the picture if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("photos", type=Path, help="photos.tar")
    parser.add_argument("--limit", type=int, default=260, help="ImageNet photographs to measure")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    cv2.setNumThreads(1)
    tables = measure(arguments)
    speeds = ratios(tables)
    report(tables, speeds)
    if arguments.json:
        options = {"limit": arguments.limit, "rounds": arguments.rounds, "seed": arguments.seed}
        result = {"machine": machine(), "options": options, "milliseconds": tables, "speed": speeds}
        arguments.json.write_text(json.dumps(result, indent=1))
    if arguments.picture:
        draw(speeds, arguments.picture)


if __name__ == "__main__":
    main()
