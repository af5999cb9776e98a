"""Commands that look and change nothing: ``pcrshard info | plan | fidelity``."""

from __future__ import annotations

import itertools
import math
import sys
from argparse import Namespace
from typing import Any

from .. import __version__
from ..errors import EncodeError, PCRError
from ..fidelity import measure, plots
from ..fidelity.costs import PlanCost, plan_costs, plan_table, scan_costs, scan_table
from ..format.dataset_index import DatasetIndex
from ..format.scan import FULL, Scan
from ..jpeg import libjpeg_turbo
from ..reading.dataset_folder import check_claims, count_classes, open_dataset
from ..reading.shard import Shard
from ..redaction import redact_url
from ..training.epoch_order import Geometry, Rules
from .arguments import (
    DATASET,
    JSON,
    Command,
    argument,
    at_least,
    flag,
    megabytes,
    open_source,
    positive,
    print_json,
    scan_argument,
    sizes,
    value,
)
from .progress import ProgressBar
from .simulate import ARGUMENTS, simulate, simulation_table

Report = dict[str, Any]


def _info(args: Namespace) -> None:
    if args.system:
        print_json({"pcrshard": __version__} | libjpeg_turbo.system())
    elif args.src is None:
        raise EncodeError("expected a dataset or a shard; see `pcrshard info --help`")
    else:
        index, urls = open_source(args.src)
        if args.plot:
            title = f"{index.num_samples} samples, script {index.script}"
            plots.plot_scan_costs(scan_costs(index), args.plot, title=title)
        about = _describe(index, urls[0])
        if args.classes:
            about["samples_per_class"] = count_classes(index, urls)
        show = _info_as_json if args.json else _info_as_text
        show(index, about)


def _info_as_json(index: DatasetIndex, about: Report) -> None:
    scans = [cost._asdict() for cost in scan_costs(index)]
    labels = {
        "classes": index.classes,
        "num_classes": index.num_classes,
    }
    print_json(about | labels | {"scans": scans})


def _info_as_text(index: DatasetIndex, about: Report) -> None:
    counts = about.pop("samples_per_class", {})
    print("  ".join(itertools.starmap(_shown, about.items())))
    for name, count in counts.items():
        print(f"{count:9d}  {name}")
    print(scan_table(scan_costs(index)))
    if about["layout"] == "compact":
        print(_COMPACT_HINT)


def _shown(name: str, content: object) -> str:
    shown = ", ".join(content) if isinstance(content, list) else content
    return f"{name}: {shown}"


_COMPACT_HINT = (
    "Compact shards are read by .pcr_scan() or PCRDataset; a stock tar or WebDataset reader gets "
    "one record of scan groups a shard. `pcrshard encode --layout preview` shows it the images."
)
INFO = Command(
    "info",
    "Show what each scan of a dataset costs.",
    "pcrshard info /data/train-pcr --plot sizes.png",
    _info,
    [
        argument("src", "dataset folder, its pcr.json, or one shard", nargs="?"),
        JSON,
        value("--plot", "save the table as a picture", "PNG"),
        flag("--classes", "count the samples of each class (field cls); reads no image"),
        flag("--system", "show libraries and decoders of this machine instead"),
    ],
)


def _describe(index: DatasetIndex, first_url: str) -> Report:
    """What a dataset holds; layout, streams and fields are those of its first shard."""
    schema = Shard(first_url).index.schema
    return {
        "samples": index.num_samples,
        "shards": len(index.shards),
        "script": index.script,
        "layout": schema.layout,
        "streams": [
            f"{field}[]" if field in schema.lists else field for field, _ in schema.streams
        ],
        "fields": list(schema.fields),
        "late": [f"{field}={_scan_name(index, scan)}" for field, scan in schema.late],
        "classes": index.num_classes,
    }


def _scan_name(index: DatasetIndex, position: int) -> Scan:
    return FULL if position > index.num_groups else position


def _plan(args: Namespace) -> None:
    index, urls = open_dataset(args.src)
    check_claims(index, urls)
    samples = args.samples if args.simulate and args.samples else index.num_samples
    step = _global_batch(args, samples)
    rows: list[Report]
    if args.simulate:
        args.batch = step // args.ranks
        rows = simulate(args, index, urls)
        shown = simulation_table(rows)
    else:
        costs = _plan_costs(args, index, step)
        rows = [cost._asdict() for cost in costs]
        shown = plan_table(costs)
    if args.json:
        print_json(rows)
        return
    print(f"{sizes(index)}, {samples // step} steps of {step}")
    print(shown)
    if args.phases % max(args.workers, 1):
        print(
            f"{args.workers} workers do not divide {args.phases} phases: "
            f"shards are read by several workers; try --phases {args.workers}"
        )


def _plan_costs(args: Namespace, index: DatasetIndex, step: int) -> list[PlanCost]:
    return plan_costs(
        index,
        [args.scan] if args.scan else None,
        Geometry(step, args.ranks, args.phases),
        Rules(shuffle_shards=args.shuffle_shards),
        workers=max(args.workers, 1),
        bandwidth=args.bandwidth,
    )


def _global_batch(args: Namespace, num_samples: int) -> int:
    """Images of all ranks in a step; of a small dataset as many as there are."""
    ranks: int = args.ranks
    if ranks > num_samples:
        raise PCRError(f"expected at most {num_samples} ranks, one a sample, got {ranks}")
    batch: int = args.batch
    most = num_samples // ranks
    if batch > most:
        print(
            f"note: {batch} x {ranks} (--batch x --ranks) is more than the {num_samples} "
            f"samples; planned with --batch {most}",
            file=sys.stderr,
        )
    return min(batch, most) * ranks


PLAN = Command(
    "plan",
    "What an epoch of PCRDataset will read, before any job runs: bytes, requests, memory,"
    " images a second; with --simulate, what a cluster will do.",
    "pcrshard plan s3://bucket/train-pcr --scan 5 --ranks 8 --workers 4 --bandwidth 200",
    _plan,
    [
        DATASET,
        value("--scan", "only this scan (default: all)", "SCAN", scan_argument),
        value("--ranks", "processes that train (default: %(default)s)", "R", at_least(1), 1),
        value(
            "--workers", "DataLoader workers of each (default: %(default)s)", "W", at_least(0), 1
        ),
        value("--batch", "images per rank and step (default: %(default)s)", "N", at_least(1), 256),
        value(
            "--phases",
            "lanes per rank; best a multiple of the workers (default: %(default)s)",
            "P",
            at_least(1),
            4,
        ),
        value(
            "--shuffle-shards",
            "shards mixed at a time in a lane (default: %(default)s)",
            "K",
            at_least(0),
            4,
        ),
        value("--bandwidth", "of the storage, for all ranks together", "MB/s", megabytes),
        *ARGUMENTS,
        JSON,
    ],
)


def _fidelity(args: Namespace) -> None:
    rows = _measure(args)
    advice = measure.recommend(rows, args.min_msssim)
    _draw_fidelity(args, rows)
    if args.json:
        scans = [_as_json(row, args) for row in rows]
        print_json({"recommended": advice.scan, "reason": advice.reason, "scans": scans})
        return
    print(_describe_images(rows[0]))
    print(measure.fidelity_table(rows, args.bandwidth, args.cores))
    print(f"recommended: scan {advice.scan}: {advice.reason}")


def _measure(args: Namespace) -> list[measure.ScanFidelity]:
    with ProgressBar("fidelity", "images") as progress:
        return measure.measure(
            args.src,
            num_images=args.num_images,
            seed=args.seed,
            on_image=progress,
            reference=args.reference,
            model=_network(args),
            smoothing=args.smoothing,
        )


def _network(args: Namespace) -> Any:
    if not args.model:
        return None
    # It brings torch, two seconds that the others should not pay.
    from ..fidelity.user_network import load_network

    return load_network(args.model, args.model_size)


def _describe_images(row: measure.ScanFidelity) -> str:
    """How many images were measured, and what they were compared with."""
    note = f"; {row.num_small} small ones by fewer scales" if row.num_small else ""
    return f"{row.num_images} images, against {_describe_reference(row.reference)}{note}"


def _describe_reference(scan: Scan) -> str:
    if scan == FULL:
        return "full fidelity"
    return f"scan {scan}, the highest of this staged copy (--reference URL names the whole dataset)"


def _draw_fidelity(args: Namespace, rows: list[measure.ScanFidelity]) -> None:
    if args.plot:
        plots.plot_fidelity(
            [row.scan for row in rows],
            [row.bytes_per_image / 1000 for row in rows],
            [row.msssim for row in rows],
            args.plot,
            title=f"{rows[0].num_images} images of {redact_url(args.src)}",
        )
    if args.contact_sheet:
        measure.contact_sheet(
            args.src,
            args.contact_sheet,
            seed=args.seed,
            reference=args.reference,
            smoothing=args.smoothing,
        )


def _as_json(row: measure.ScanFidelity, args: Namespace) -> Report:
    entry = row._asdict()
    if row.psnr == math.inf:
        # JSON has no infinity, which is the PSNR of equal pixels.
        entry["psnr"] = None
    if args.bandwidth is not None:
        rate = measure.throughput(row, args.bandwidth, args.cores)
        entry["images_per_second"] = rate.images_per_second
    return entry


FIDELITY = Command(
    "fidelity",
    "How good each scan is, what it costs, and which to take: MS-SSIM, PSNR, bytes,"
    " decode time on this machine.",
    "pcrshard fidelity /data/train-pcr --bandwidth 200 --plot fidelity.png"
    " --contact-sheet sheet.png",
    _fidelity,
    [
        argument("src", "dataset folder, local or a URL"),
        value(
            "--min-msssim",
            "that is good enough (default: %(default)s, as in the paper)",
            "X",
            float,
            0.95,
        ),
        value(
            "--bandwidth",
            "of the storage: adds the images/s that each scan allows (Theorem 4.1)",
            "MB/s",
            megabytes,
        ),
        value("--cores", "that decode, for the same (default: %(default)s)", "N", positive, 1),
        value("--num-images", "drawn at random (default: %(default)s)", "N", at_least(1), 32),
        value("--seed", "same seed, same images (default: %(default)s)", "SEED", int, 0),
        value("--plot", "draw bytes against MS-SSIM", "OUT.png"),
        value(
            "--contact-sheet",
            "draw some images at scans 1, 2, 5 and full, with their differences to full",
            "OUT.png",
        ),
        value(
            "--model",
            "a function that gives your network: adds its top-1 at each scan, by the labels in cls",
            "PACKAGE.MODULE:FUNCTION",
        ),
        value(
            "--model-size",
            "side of the images that it takes (default: %(default)s)",
            "PIXELS",
            at_least(1),
            224,
        ),
        value(
            "--reference",
            "the dataset that SRC is a staged copy of, to compare with its full fidelity",
            "URL",
        ),
        flag(
            "--smoothing", "decode with smoothing between blocks, as ImageDecoder(smoothing=True)"
        ),
        JSON,
    ],
)
