"""The commands of the reading side: ``pcrshard stage | plan | cache | fidelity``."""

from __future__ import annotations

import argparse
import json
import math
import time
from typing import Any

from .. import storage
from ..errors import PCRError, StorageError
from ..fidelity.costs import human_bytes, plan_costs, plan_table, table
from ..reading.dataset_folder import open_dataset
from ..reading.prefix_cache import PrefixCache
from ..training.epoch_order import Geometry, Rules
from ..upkeep.stage import Staged, stage
from .progress import Progress, add_command, at_least, scan_argument


def add_commands(commands: Any) -> None:
    """Add the commands to the parser."""
    _add_stage(commands)
    _add_plan(commands)
    _add_cache(commands)
    _add_fidelity(commands)


def _add_stage(commands: Any) -> None:
    add = add_command(
        commands,
        "stage",
        _stage,
        "Copy the prefixes of a scan to fast local disk; later, only the difference to a higher scan.",
        "pcrshard stage s3://bucket/train-pcr $SCRATCH/train-pcr --scan 5",
    ).add_argument
    add("src", help="dataset folder or its pcr.json, local or a URL")
    add("dst", help="local folder")
    add("--scan", type=scan_argument, required=True, help="scan to copy, or full")
    add(
        "--workers",
        type=at_least(1),
        default=8,
        metavar="N",
        help="shards at a time (default: %(default)s)",
    )
    add("--json", action="store_true", help="print JSON")


def _stage(args: argparse.Namespace) -> int:
    source, _ = open_dataset(args.src)
    total = source.prefix_bytes(args.scan)
    copied = kept = 0
    with Progress("stage", "MB") as progress:

        def note(staged: Staged) -> None:
            nonlocal copied, kept
            copied, kept = copied + staged.copied_bytes, kept + staged.kept_bytes
            progress((copied + kept) // 10**6, total // 10**6)

        index = stage(args.src, args.dst, args.scan, workers=args.workers, on_shard=note)
    figures = {
        "shards": len(index.shards),
        "samples": index.num_samples,
        "copied_bytes": copied,
        "kept_bytes": kept,
    }
    if args.json:
        print(json.dumps(figures))
    else:
        print(
            f"{len(index.shards)} shards at scan {args.scan} in {args.dst}: {human_bytes(copied)} copied, {human_bytes(kept)} were there"
        )
    return 0


def _add_plan(commands: Any) -> None:
    add = add_command(
        commands,
        "plan",
        _plan,
        "What an epoch of PCRDataset will read, before any job runs: bytes, requests, memory, images a second.",
        "pcrshard plan s3://bucket/train-pcr --scan 5 --ranks 8 --workers 4 --bandwidth 200",
    ).add_argument
    add("src", help="dataset folder or its pcr.json, local or a URL")
    add("--scan", type=scan_argument, help="only this scan (default: all)")
    add(
        "--ranks",
        type=at_least(1),
        default=1,
        metavar="R",
        help="processes that train (default: %(default)s)",
    )
    add(
        "--workers",
        type=at_least(0),
        default=1,
        metavar="W",
        help="DataLoader workers of each (default: %(default)s)",
    )
    add(
        "--batch",
        type=at_least(1),
        default=256,
        metavar="N",
        help="images per rank and step (default: %(default)s)",
    )
    add(
        "--phases",
        type=at_least(1),
        default=4,
        metavar="P",
        help="lanes per rank; best a multiple of the workers (default: %(default)s)",
    )
    add(
        "--shuffle-shards",
        type=at_least(0),
        default=4,
        metavar="K",
        help="shards mixed at a time in a lane (default: %(default)s)",
    )
    add(
        "--bandwidth",
        type=at_least(0, float),
        metavar="MB/s",
        help="of the storage, for all ranks together",
    )
    add("--json", action="store_true", help="print JSON")


def _plan(args: argparse.Namespace) -> int:
    index, _ = open_dataset(args.src)
    if args.batch * args.ranks > index.num_samples:
        raise PCRError(
            f"expected a step of at most the {index.num_samples} samples, got {args.batch} x {args.ranks} (--batch x --ranks)"
        )
    costs = plan_costs(
        index,
        [args.scan] if args.scan else None,
        Geometry(args.batch * args.ranks, args.ranks, args.phases),
        Rules(shuffle_shards=args.shuffle_shards),
        workers=max(args.workers, 1),
        bandwidth=None if args.bandwidth is None else args.bandwidth * 1e6,
    )
    if args.json:
        print(json.dumps([cost._asdict() for cost in costs], indent=1))
        return 0
    print(
        f"{index.num_samples} samples in {len(index.shards)} shards, {costs[0].steps} steps of {args.batch * args.ranks}"
    )
    print(plan_table(costs))
    if args.phases % max(args.workers, 1):
        print(
            f"{args.workers} workers do not divide {args.phases} phases: shards are read by several workers; try --phases {args.workers}"
        )
    return 0


def _add_cache(commands: Any) -> None:
    add = add_command(
        commands,
        "cache",
        _cache,
        "List or clear a folder of cached prefixes (pcr_scan's cache_dir).",
        "pcrshard cache ls /local/pcr-cache",
    ).add_argument
    add(
        "action",
        choices=("ls", "clear"),
        help="ls lists what is held; clear drops what no job has open",
    )
    add("folder", help="the cache_dir")
    add("--json", action="store_true", help="print JSON")


def _cache(args: argparse.Namespace) -> int:
    if not storage.is_folder(args.folder):
        raise StorageError("expected the folder of a cache, there is none", url=args.folder)
    cache = PrefixCache(args.folder)
    if args.action == "clear":
        freed = cache.clear()
        print(json.dumps({"freed_bytes": freed}) if args.json else f"{human_bytes(freed)} freed")
        return 0
    entries = cache.entries()
    if args.json:
        print(json.dumps([entry._asdict() | {"scan": entry.scan} for entry in entries], indent=1))
        return 0
    rows = [
        [e.scan, human_bytes(e.num_bytes), f"{time.time() - e.last_use:.0f} s ago", e.url]
        for e in entries
    ]
    print(table(["scan", "bytes", "last use", "shard"], rows))
    print(f"{len(entries)} shards, {human_bytes(sum(entry.num_bytes for entry in entries))}")
    return 0


def _add_fidelity(commands: Any) -> None:
    add = add_command(
        commands,
        "fidelity",
        _fidelity,
        "How good each scan is, what it costs, and which to take: MS-SSIM, PSNR, bytes, decode time on this machine.",
        "pcrshard fidelity /data/train-pcr --bandwidth 200 --plot fidelity.png --contact-sheet sheet.png",
    ).add_argument
    add("src", help="dataset folder, local or a URL")
    add(
        "--min-msssim",
        type=float,
        default=0.95,
        metavar="X",
        help="that is good enough (default: %(default)s, as in the paper)",
    )
    add(
        "--bandwidth",
        type=at_least(0, float),
        metavar="MB/s",
        help="of the storage: adds the images/s that each scan allows (Theorem 4.1)",
    )
    add(
        "--cores",
        type=at_least(0, float),
        default=1,
        metavar="N",
        help="that decode, for the same (default: %(default)s)",
    )
    add(
        "--num-images",
        type=at_least(1),
        default=32,
        metavar="N",
        help="drawn at random (default: %(default)s)",
    )
    add("--seed", type=int, default=0, help="same seed, same images (default: %(default)s)")
    add("--plot", metavar="OUT.png", help="draw bytes against MS-SSIM")
    add(
        "--contact-sheet",
        metavar="OUT.png",
        help="draw some images at each scan, with their differences to full",
    )
    add("--json", action="store_true", help="print JSON")


def _fidelity(args: argparse.Namespace) -> int:
    from ..fidelity import measure

    with Progress("fidelity", "images") as progress:
        rows = measure.measure(
            args.src, num_images=args.num_images, seed=args.seed, on_image=progress
        )
    advice = measure.recommend(rows, args.min_msssim)
    bandwidth = None if args.bandwidth is None else args.bandwidth * 1e6
    if args.plot:
        from ..fidelity import plots

        sizes, values = [row.bytes_per_image / 1000 for row in rows], [row.msssim for row in rows]
        plots.plot_fidelity(
            [row.scan for row in rows],
            sizes,
            values,
            args.plot,
            title=f"{rows[0].num_images} images of {args.src}",
        )
    if args.contact_sheet:
        measure.contact_sheet(args.src, args.contact_sheet, seed=args.seed)
    if args.json:
        # JSON has no infinity, which is the PSNR of equal pixels.
        scans = [
            {name: None if value == math.inf else value for name, value in row._asdict().items()}
            for row in rows
        ]
        for row, entry in zip(rows, scans, strict=True):
            if bandwidth is not None:
                entry["images_per_second"] = measure.throughput(
                    row, bandwidth, args.cores
                ).images_per_second
        print(
            json.dumps(
                {"recommended": advice.scan, "reason": advice.reason, "scans": scans}, indent=1
            )
        )
        return 0
    print(
        f"{rows[0].num_images} images, against full fidelity"
        + (f"; {rows[0].num_small} small ones by fewer scales" if rows[0].num_small else "")
    )
    print(measure.fidelity_table(rows, bandwidth, args.cores))
    print(f"recommended: scan {advice.scan}: {advice.reason}")
    return 0
