"""Commands that change nothing: ``pcrshard info | plan | fidelity``."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from typing import Any

from .. import __version__, storage
from ..errors import PCRError
from ..fidelity import measure, plots
from ..fidelity.costs import counted, plan_costs, record_table, scan_costs
from ..format.dataset_index import DatasetIndex, ShardEntry
from ..format.scan import FULL, Scan
from ..format.tar_members import TRAILER
from ..jpeg import libjpeg_turbo
from ..reading.dataset_folder import (
    Opened,
    check_claims,
    count_classes,
    find_datasets,
    open_dataset,
)
from ..reading.shard import Shard
from ..redaction import redact_url
from ..training.epoch_order import Geometry, Rules
from .parser import (
    Bandwidth,
    Count,
    Parallel,
    ParallelOrZero,
    Positive,
    Report,
    ScanNumber,
    StorageOptions,
    UsageError,
)
from .progress import ProgressBar
from .simulate import ClusterOptions, simulate_scans

_MAX_LISTED = 20
_COMPACT_HINT = (
    "Compact shards are read by .pcr_scan() or PCRDataset; a stock tar or WebDataset reader gets "
    "one record of scan groups a shard. `pcrshard encode --layout preview` shows it the images."
)


def is_shard(url: str) -> bool:
    """Whether a command was given one shard instead of a dataset."""
    return storage.file_name(url).endswith(".tar")


def open_source(url: str, storage_options: storage.Options) -> Opened:
    """Open a dataset, or one shard as a dataset: its index, and the URLs of its shards.

    Raises:
        StorageError: There is no dataset index.
    """
    if not is_shard(url):
        return open_dataset(url, storage_options=storage_options)
    shard = Shard(url, storage_options=storage_options)
    head = shard.head
    entry = ShardEntry(
        storage.file_name(url),
        head.num_samples,
        head.crc32c,
        head.prefix_stop(FULL) + len(TRAILER),
        # The checksum of the file, which only a dataset index knows.
        0,
        head.prefix_stops,
        head.index_stop,
    )
    return DatasetIndex(shard.index.schema.script, head.num_groups, (entry,)), [url]


def sizes(index: DatasetIndex) -> str:
    """The size of a dataset, in words."""
    return f"{counted(index.num_samples, 'sample')} in {counted(len(index.shards), 'shard')}"


def info(
    src: str = "",
    *,
    plot: str | None = None,
    classes: bool = False,
    system: bool = False,
    storage_option: StorageOptions = None,
) -> Report:
    """Show what each scan of a dataset costs.

    Example:
        pcrshard info /data/train-pcr --plot sizes.png

    Args:
        src: Dataset folder, its pcr.json, a folder of splits, or one shard.
        plot: PNG file to save the table to, as a picture.
        classes: Count the samples of each class (field cls); reads no image.
        system: Show the libraries and decoders of this machine instead.
        storage_option: fsspec option of the dataset; repeatable.
    """
    if system:
        system_figures = {"pcrshard": __version__} | libjpeg_turbo.system()
        lines = itertools.starmap("{}: {}".format, system_figures.items())
        return Report(system_figures, "\n".join(lines))
    if not src:
        raise UsageError("expected a dataset or a shard")
    if plot:
        plots.check_target(plot)
    datasets = {"": src} if is_shard(src) else find_datasets(src, storage_options=storage_option)
    reports = {}
    for split, url in datasets.items():
        index, urls = open_source(url, storage_option)
        if plot:
            title = f"{index.num_samples} samples, script {index.script}"
            stem, extension = os.path.splitext(plot)
            target = f"{stem}-{split}{extension}" if split else plot
            plots.plot_scan_costs(scan_costs(index), target, title=title)
        reports[split] = _describe(index, urls, classes, storage_option)
    if "" in reports:
        return reports[""]
    text = "\n\n".join(f"{split}:\n{report.text}" for split, report in reports.items())
    return Report({split: report.figures for split, report in reports.items()}, text)


def _describe(
    index: DatasetIndex,
    urls: Sequence[str],
    classes: bool,
    storage_options: storage.Options,
) -> Report:
    costs = scan_costs(index)
    # Layout, streams and fields are those of the first shard.
    schema = Shard(urls[0], storage_options=storage_options).index.schema
    late = {
        field: FULL if position > index.num_groups else position for field, position in schema.late
    }
    about: dict[str, Any] = {
        "samples": index.num_samples,
        "shards": len(index.shards),
        "script": index.script,
        "layout": schema.layout,
        "streams": [
            f"{field}[]" if field in schema.lists else field for field, _ in schema.streams
        ],
        "fields": list(schema.fields),
        "deferred": [f"{field}={scan}" for field, scan in late.items()],
        "classes": index.classes,
    }
    shown = [f"{name}: {_listed(value)}" for name, value in about.items() if value]
    if classes:
        counts = count_classes(index, urls, storage_options=storage_options)
        about["samples_per_class"] = dict.fromkeys(index.classes, 0) | counts
        shown += [f"{count:9d}  {name}" for name, count in about["samples_per_class"].items()]
    shown.append(record_table(costs))
    if schema.layout == "compact":
        shown.append(_COMPACT_HINT)
    about |= {"num_classes": index.num_classes, "scans": costs}
    return Report(about, "\n".join(shown))


def _listed(value: Any) -> str:
    if not isinstance(value, list | tuple):
        return str(value)
    more = f", ... ({len(value)})" if len(value) > _MAX_LISTED else ""
    return ", ".join(value[:_MAX_LISTED]) + more


def plan(
    src: str,
    *,
    scan: ScanNumber | None = None,
    ranks: Count = 1,
    workers: ParallelOrZero = 1,
    batch: Count = 256,
    lanes_per_rank: Parallel = 4,
    shuffle_shards: ParallelOrZero = 4,
    bandwidth: Bandwidth | None = None,
    simulate: Positive | None = None,
    cluster: ClusterOptions = ClusterOptions(),
    storage_option: StorageOptions = None,
) -> Report:
    """Predict what an epoch of PCRDataset reads, and with --simulate how long it takes.

    Example:
        pcrshard plan s3://bucket/train-pcr --scan 5 --ranks 8 --workers 4 --bandwidth 200

    Args:
        src: Dataset folder or its pcr.json, local or a URL.
        scan: Only this scan (default: all).
        ranks: Training processes.
        workers: DataLoader workers per rank.
        batch: Images per rank and step.
        lanes_per_rank: Lanes per rank; best a multiple of the workers.
        shuffle_shards: Shards mixed at a time in a lane.
        bandwidth: Bandwidth of the storage, for all ranks together.
        simulate: Simulate the epoch with accelerators that train on this many images per
            second each.
        cluster: Machines of the simulated epoch.
        storage_option: fsspec option of the dataset; repeatable.
    """
    index, urls = open_dataset(src, storage_options=storage_option)
    check_claims(index, urls, storage_options=storage_option)
    samples = index.num_samples if simulate is None else cluster.samples or index.num_samples
    if ranks > samples:
        raise PCRError(f"expected at most {samples} ranks, one per sample, got {ranks}")
    if batch > (most := samples // ranks):
        print(
            f"note: {batch} x {ranks} (--batch x --ranks) is more than the {samples} samples; "
            f"planned with --batch {most}",
            file=sys.stderr,
        )
        batch = most
    geometry = Geometry(batch * ranks, ranks, lanes_per_rank)
    rules = Rules(shuffle_shards=shuffle_shards)
    scans = None if scan is None else [scan]
    rows: Any
    if simulate is not None:
        rows = simulate_scans(
            index,
            Shard(urls[0], storage_options=storage_option),
            scans,
            geometry,
            rules,
            rate=simulate,
            workers=workers,
            bandwidth=bandwidth,
            options=cluster,
        )
    elif cluster != ClusterOptions():
        raise UsageError(f"{', '.join(cluster.given())} needs --simulate")
    else:
        rows = plan_costs(
            index, scans, geometry, rules, workers=max(workers, 1), bandwidth=bandwidth
        )
    steps = counted(samples // geometry.global_batch, "step")
    units = "" if simulate is None else "; times in seconds"
    lines = [f"{sizes(index)}, {steps} of {batch * ranks}{units}", record_table(rows)]
    if lanes_per_rank % max(workers, 1):
        lines.append(
            f"{workers} workers do not divide {lanes_per_rank} lanes per rank: "
            f"shards are read by several workers; try --lanes-per-rank {workers}"
        )
    return Report(rows, "\n".join(lines))


def fidelity(
    src: str,
    *,
    min_msssim: Positive = 0.95,
    bandwidth: Bandwidth | None = None,
    cores: Positive = 1,
    num_images: Count = 32,
    seed: int = 0,
    plot: str | None = None,
    contact_sheet: str | None = None,
    model: str | None = None,
    model_size: Count = 224,
    reference: str | None = None,
    smoothing: bool = False,
    storage_option: StorageOptions = None,
) -> Report:
    """Measure how good each scan is and what it costs, and recommend one.

    Reports MS-SSIM, PSNR, bytes, and decoding time on this machine.

    Example:
        pcrshard fidelity /data/train-pcr --bandwidth 200 --plot fidelity.png

    Args:
        src: Dataset folder, local or a URL.
        min_msssim: Minimum acceptable mean MS-SSIM; the default is the paper's.
        bandwidth: Bandwidth of the storage: adds the images per second that each scan allows
            (Theorem 4.1).
        cores: CPU cores used for decoding in that estimate.
        num_images: Number of random images.
        seed: Seed of the random choice.
        plot: PNG file for a plot of MS-SSIM over bytes.
        contact_sheet: PNG file for a picture of some images at scans 1, 2, 5 and full, with their
            differences to full.
        model: PACKAGE.MODULE:FUNCTION that returns your network: adds its top-1 accuracy at each
            scan, by the labels in cls.
        model_size: Side in pixels of the images that the network takes.
        reference: Dataset that SRC is a staged copy of, to compare with its full fidelity.
        smoothing: Decode with smoothing between blocks, as ImageDecoder(smoothing=True).
        storage_option: fsspec option of the dataset and the reference; repeatable.
    """
    for path in filter(None, (plot, contact_sheet)):
        plots.check_target(path)
    network = None
    if model:
        # Importing torch takes two seconds, which the other commands should not pay.
        from ..fidelity.user_network import load_network

        network = load_network(model, model_size)
    with ProgressBar("fidelity", "images") as progress:
        rows = measure.measure(
            src,
            num_images=num_images,
            seed=seed,
            on_image=progress,
            reference=reference,
            model=network,
            smoothing=smoothing,
            storage_options=storage_option,
        )
    if plot:
        plots.plot_fidelity(
            [row.scan for row in rows],
            [row.bytes_per_image / 1000 for row in rows],
            [row.msssim for row in rows],
            plot,
            title=f"{rows[0].num_images} images of {redact_url(src)}",
        )
    if contact_sheet:
        measure.contact_sheet(
            src,
            contact_sheet,
            seed=seed,
            reference=reference,
            smoothing=smoothing,
            storage_options=storage_option,
        )
    scans = [row._asdict() for row in rows]
    if bandwidth is not None:
        for scan, row in zip(scans, rows, strict=True):
            rate = measure.throughput(row, bandwidth, cores)
            scan["images_per_second"] = rate.images_per_second
    advice = measure.recommend(rows, min_msssim)
    first = rows[0]
    small = f"; {first.num_small} of them small, by fewer scales" if first.num_small else ""
    lines = [
        f"{first.num_images} images, against {_described(first.reference)}{small}",
        measure.fidelity_table(rows, bandwidth, cores),
        f"recommended: scan {advice.scan}: {advice.reason}",
    ]
    figures = {"recommended": advice.scan, "reason": advice.reason, "scans": scans}
    return Report(figures, "\n".join(lines))


def _described(reference: Scan) -> str:
    if reference == FULL:
        return "full fidelity"
    return (
        f"scan {reference}, the highest of this staged copy (--reference URL names the whole "
        "dataset)"
    )
