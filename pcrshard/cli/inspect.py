"""Commands that change nothing: ``pcrshard info | plan | fidelity``."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

from msgspec import Meta

from .. import __version__, storage
from ..errors import PCRError
from ..fidelity import advice, measure, plots
from ..fidelity.contact_sheet import contact_sheet as draw_contact_sheet
from ..fidelity.costs import scan_costs
from ..fidelity.msssim import require_opencv
from ..format.dataset_index import DatasetIndex, ShardEntry, resolve_scan
from ..format.levels import LEVELS
from ..format.scan import FULL, Scan
from ..jpeg import libjpeg_turbo
from ..reading.dataset_folder import (
    check_claims,
    count_classes,
    find_datasets,
    is_shard,
    open_dataset,
)
from ..reading.shard import Shard
from ..redaction import redact_url
from ..simulation.cluster import Cluster, Job
from ..simulation.decoding import image_seconds
from ..simulation.epoch import Simulation
from ..simulation.reads import epoch_reads, plan_costs
from ..training.order import Geometry
from ..training.sequence import Rules
from .parser import (
    MEGABYTES,
    Bandwidth,
    Count,
    Fraction,
    Keywords,
    Parallel,
    ParallelOrZero,
    Picture,
    Positive,
    Report,
    ScanOrFraction,
    StorageOptions,
    UsageError,
)
from .progress import ProgressBar


def latency(text: str) -> tuple[float, float]:
    """Parse milliseconds: a median, and a 99th percentile."""
    median, _, p99 = text.partition(",")
    return float(median) / 1e3, float(p99 or median) / 1e3


# In the units of a command line.
ClusterOptions = Annotated[
    Cluster,
    {
        "bandwidth": MEGABYTES,
        "link": MEGABYTES,
        "stream": MEGABYTES,
        "latency": {
            "type": latency,
            "metavar": "MS[,MS]",
            "help": "Time to the first byte of a request: median and 99th percentile",
        },
    },
]


def info(
    src: str = "",
    *,
    classes: bool = False,
    system: bool = False,
    storage_option: StorageOptions = None,
) -> Report:
    """Show how many bytes each scan of a dataset takes.

    Example:
        pcrshard info /data/train-pcr --classes

    Args:
        src: Dataset folder, its pcr.json, a folder of splits, or one shard.
        classes: Also count samples per class (field cls); no images are read.
        system: Show this machine's libraries and decoders instead.
        storage_option: fsspec option of the dataset; repeatable.
    """
    if system:
        return Report({"pcrshard": __version__} | libjpeg_turbo.system())
    if not src:
        raise UsageError("expected a dataset or a shard")

    def describe(url: str, _: str) -> Report:
        index, urls = open_dataset(url, storage_options=storage_option)
        schema = index.schema
        figures: dict[str, Any] = {
            "samples": index.num_samples,
            **image_counts(index),
            "shards": len(index.shards),
            "script": schema.script,
            "layout": schema.layout,
            # As --kind takes them.
            "fields": [
                *(f"{field.name}={field.kind}" for field in schema.fields),
                *(f"{part.field}:{part.path}={part.kind}" for part in schema.parts),
            ],
            "deferred": [
                f"{field}={FULL if scan > index.num_groups else scan}"
                for field, scan in schema.late
            ],
            "classes": index.classes,
            "num_classes": index.num_classes,
        }
        if classes:
            of_classes = count_classes(index, urls, storage_options=storage_option)
            figures["samples_per_class"] = dict.fromkeys(index.classes, 0) | of_classes
        return Report(figures | {"scans": scan_costs(index)})

    return by_split(src, storage_option, describe)


def image_counts(index: DatasetIndex) -> dict[str, int]:
    """Return the numbers of images as they are shown; nothing if they are not known."""
    names = ("images", "kept_whole", "undecodable", "wide_color")
    return dict(zip(names, index.counts or (), strict=False))


def choose_scan(
    index: DatasetIndex, scan: Scan | float | None, quality: float | None, default: Scan = FULL
) -> Scan:
    """Return the scan of a dataset that options ask for.

    Raises:
        UsageError: Both a scan and a quality are given.
        ScanUnavailable: The dataset has no such scan.
    """
    if quality is None:
        found: Scan = resolve_scan(index.shards, default if scan is None else scan)
        return found
    if scan is not None:
        raise UsageError("argument --quality: not allowed with --scan")
    return index.scan_of_quality(quality)


def by_split(
    src: str, storage_options: storage.Options, report: Callable[[str, str], Report]
) -> Report:
    """Report on a shard, a dataset, or each split of a folder, by URL and split."""
    datasets = {"": src} if is_shard(src) else find_datasets(src, storage_options=storage_options)
    return of_splits({split: report(url, split) for split, url in datasets.items()})


def of_splits(reports: dict[str, Report]) -> Report:
    """Return one report on the splits of a folder; a dataset's own report has the name ``""``."""
    if "" in reports:
        return reports[""]
    text = "\n\n".join(f"{split}:\n{report.as_text()}" for split, report in reports.items())
    figures = {split: report.figures for split, report in reports.items()}
    return Report(figures, text, any(report.has_failed for report in reports.values()))


def plan(
    src: str,
    *,
    scan: ScanOrFraction | None = None,
    quality: Fraction | None = None,
    ranks: Count = 1,
    workers: ParallelOrZero = 1,
    batch: Count = 256,
    lanes_per_rank: Parallel = 4,
    shuffle_shards: ParallelOrZero = 4,
    # Planning takes 57 bytes per sample.
    samples: Annotated[int, Meta(ge=1, le=1 << 26)] | None = None,
    simulate: Positive | None = None,
    threads: ParallelOrZero = 0,
    decode: Positive | None = None,
    cluster: ClusterOptions = Cluster(),
    storage_option: StorageOptions = None,
) -> Report:
    """Estimate what an epoch of PCRDataset reads and, with --simulate, how long it takes.

    Example:
        pcrshard plan s3://bucket/train-pcr --scan 5 --ranks 8 --workers 4 --bandwidth 200

    Args:
        src: Dataset folder or its pcr.json, local or a URL.
        scan: Plan for this scan only (default: all).
        quality: Plan for the lowest scan with this mean MS-SSIM, such as 0.95.
        ranks: Training processes.
        workers: DataLoader workers per rank.
        batch: Batch size per rank; at most an equal part of the samples.
        lanes_per_rank: Lanes per rank; ideally a multiple of the number of workers.
        shuffle_shards: Number of shards mixed together within a lane.
        samples: Number of samples to assume, such as those of a larger dataset (default: the
            dataset's own).
        simulate: Simulate an epoch in which each accelerator trains on this many images per
            second.
        threads: Decoding threads per rank, instead of workers, with --simulate.
        decode: Images per second that one core decodes, with --simulate (default: measured on this
            machine at each scan).
        cluster: The cluster; all but its bandwidth is for --simulate.
        storage_option: fsspec option of the dataset; repeatable.
    """
    index, urls = open_dataset(src, storage_options=storage_option)
    check_claims(index, urls, storage_options=storage_option)
    if simulate is None and (
        threads or decode or replace(cluster, bandwidth=math.inf) != Cluster()
    ):
        raise UsageError("only --simulate uses threads, decode, and a cluster's options")
    shards = _repeated(index.shards, samples or index.num_samples)
    counts = [count for _, count in shards]
    num_samples = sum(counts)
    batch = min(batch, num_samples // ranks)
    if not batch:
        raise PCRError(f"expected at most {num_samples} ranks, one per sample, got {ranks}")
    geometry = Geometry(batch * ranks, ranks, lanes_per_rank)
    rules = Rules(shuffle_shards=shuffle_shards)
    scans = [cost.scan for cost in scan_costs(index)]
    if (scan, quality) != (None, None):
        scans = [choose_scan(index, scan, quality)]
    prefixes = {
        each: [entry.prefix_stop(each) * count // entry.num_samples for entry, count in shards]
        for each in scans
    }
    rows: list[Any]
    if simulate is None:
        reads = epoch_reads(counts, geometry, rules, max(workers, 1))
        bandwidth = cluster.bandwidth if math.isfinite(cluster.bandwidth) else None
        rows = plan_costs(reads, prefixes, bandwidth)
    else:
        shard = Shard(urls[0], storage_options=storage_option)
        rows = []
        for each, stops in prefixes.items():
            job = Job(
                ranks,
                simulate,
                batch,
                workers=0 if threads else workers,
                threads=threads,
                image_seconds=1 / decode if decode else image_seconds(shard, each),
            )
            simulation = Simulation(
                cluster, job, counts, stops, rules=rules, lanes_per_rank=lanes_per_rank
            )
            rows.append({"scan": each} | simulation.run().outcome(job))
    return Report({"samples": num_samples, "batch": batch, "scans": rows})


def _repeated(shards: Sequence[ShardEntry], samples: int) -> list[tuple[ShardEntry, int]]:
    """Repeat the shards up to a number of samples; return each with its samples."""
    taken = []
    for shard in itertools.cycle(shards):
        taken.append((shard, min(samples, shard.num_samples)))
        samples -= taken[-1][1]
        if not samples:
            break
    return taken


def fidelity(
    src: str,
    *,
    min_msssim: Positive = 0.95,
    bandwidth: Bandwidth | None = None,
    cores: Positive = 1,
    num_images: Count = 32,
    seed: int = 0,
    plot: Picture | None = None,
    contact_sheet: Picture | None = None,
    model: Annotated[str | None, Keywords(metavar="MODULE:FUNCTION")] = None,
    model_size: Parallel = 224,
    storage_option: StorageOptions = None,
) -> Report:
    """Measure the quality and cost of each scan, and recommend one.

    Reports MS-SSIM, PSNR, bytes, and decoding time on this machine.

    Example:
        pcrshard fidelity /data/train-pcr --bandwidth 200 --plot fidelity.png

    Args:
        src: Dataset folder, or a folder of splits, local or a URL.
        min_msssim: Minimum acceptable mean MS-SSIM; the default is the paper's.
        bandwidth: Storage bandwidth; adds the images per second that each scan allows
            (Theorem 4.1).
        cores: CPU cores used for decoding in that estimate.
        num_images: Number of images to sample at random.
        seed: Random seed for choosing images.
        plot: PNG file for a plot of MS-SSIM against bytes; one per split, named after it.
        contact_sheet: PNG file showing some images at scans 1, 2, 5 and the last, with their
            differences from the last; one per split, named after it.
        model: Function of a Python module that returns your network; adds its top-1 accuracy at
            each scan, using the labels in field cls.
        model_size: Side of the network's input images, in pixels.
        storage_option: fsspec option of the dataset; repeatable.
    """
    # A missing package is named before any work.
    require_opencv()
    if plot or contact_sheet:
        plots.figure_class()
    network = None
    if model:
        # Imported lazily: torch takes two seconds, which other commands should not pay.
        from ..fidelity.user_network import load_network

        network = load_network(model, model_size)

    def report(url: str, split: str) -> Report:
        with ProgressBar(f"fidelity {split}".strip(), "images") as progress:
            rows = measure.measure(
                url,
                num_images=num_images,
                seed=seed,
                on_image=progress,
                model=network,
                storage_options=storage_option,
            )
        first = rows[0]
        found = advice.recommend(rows, min_msssim)
        if plot:
            title = f"{first.num_images} images of {redact_url(url)}"
            index, _ = open_dataset(url, storage_options=storage_option)
            plots.plot_fidelity(
                rows,
                _of_split(plot, split),
                title=title,
                name="level" if index.script == LEVELS else "scan",
                enough=None if network else min_msssim,
                recommended=found.scan,
            )
        if contact_sheet:
            path = _of_split(contact_sheet, split)
            draw_contact_sheet(
                url, path, recommended=found.scan, seed=seed, storage_options=storage_option
            )
        return Report(
            {
                "num_images": first.num_images,
                "recommended": found.scan,
                "reason": found.reason,
                "lowest_possible": None if found.images is None else found.lowest,
                "images_to_tell": found.images,
                "question": advice.accuracy_question(rows),
                "scans": advice.with_throughput(rows, bandwidth, cores),
            }
        )

    return by_split(src, storage_option, report)


def _of_split(path: str, split: str) -> str:
    """Return the path of a split's picture: ``plot-val.png``."""
    stem, extension = os.path.splitext(path)
    return f"{stem}-{split}{extension}" if split else path
