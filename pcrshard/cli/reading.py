"""Commands that read whole shards: ``pcrshard verify | export | stage | cache``."""

from __future__ import annotations

import collections
import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence

from .. import storage
from ..errors import EncodeError, PCRError, StorageError
from ..fidelity.costs import human_bytes, table
from ..format.dataset_index import resolve_scan
from ..format.scan import FULL
from ..reading.cache_folder import MARKER, is_marked
from ..reading.dataset_folder import find_datasets, open_dataset
from ..reading.prefix_cache import Cached, PrefixCache
from ..reading.shard import Shard
from ..upkeep.export import FORMATS, export_shard
from ..upkeep.stage import Staged, stage
from ..upkeep.verify import verify
from .arguments import (
    DATASET,
    DATASET_OR_SHARD,
    JSON,
    Command,
    argument,
    at_least,
    choice,
    flag,
    is_shard,
    open_source,
    print_json,
    scan_or_fraction,
    sizes,
    value,
)
from .progress import ProgressBar

SCAN_HELP = "scan to {}: a number, full, or a fraction such as 0.5 of the full bytes"


def _verify(args: Namespace) -> bool:
    datasets = {"": args.src} if is_shard(args.src) else find_datasets(args.src)
    problems: list[str] = []
    opened = []
    for split, url in datasets.items():
        opened.append(open_source(url)[0])
        with ProgressBar(f"verify {split}".strip(), "images") as bar:
            problems += verify(
                url,
                against=args.against or "",
                prefix_keys=args.prefix_keys,
                workers=args.workers,
                progress=bar,
            )
    total = sum(index.num_samples for index in opened)
    if args.json:
        shards = sum(len(index.shards) for index in opened)
        print_json({"samples": total, "shards": shards, "problems": problems})
    elif problems:
        print("\n".join(problems))
        noun = "problem" if len(problems) == 1 else "problems"
        print(f"{len(problems)} {noun} in {total} samples")
    else:
        proven = ", pixels equal the source's" if args.against else ""
        for (split, _), index in zip(datasets.items(), opened, strict=True):
            name = f"{split}: " if split else ""
            print(f"{name}{sizes(index)}: checksums and layout are right{proven}")
    return bool(problems)


VERIFY = Command(
    "verify",
    "Check every byte of a dataset; with --against, prove that all pixels equal the source's.",
    "pcrshard verify /data/train-pcr --against imagenet/train",
    _verify,
    [
        DATASET_OR_SHARD,
        value("--against", "the source that was encoded", "SRC"),
        flag("--prefix-keys", "as given to encode"),
        value("--workers", "worker processes (default: one a core)", "N", int),
        JSON,
    ],
)


def _export(args: Namespace) -> bool:
    index, urls = open_source(args.src)
    args.scan = resolve_scan(index.shards, args.scan)
    _check_target(args, os.path.dirname(urls[0]))
    failed = []

    def leave_out(error: PCRError) -> bool:
        failed.append(error)
        return bool(args.on_error == "skip")

    taken: set[str] = set()
    total = 0
    with ProgressBar("export", "images") as progress:
        for url, entry in zip(urls, index.shards, strict=True):
            total += export_shard(
                Shard(url, entry=entry),
                args.dst,
                scan=args.scan,
                form=args.format,
                baseline=args.baseline,
                classes=index.classes,
                taken=taken,
                on_error=leave_out,
                overwrite=args.overwrite,
            )
            progress(total, index.num_samples)
    for error in failed:
        print(f"left out: {error}", file=sys.stderr)
    return _tell_exported(args, total, index.num_samples - total)


def _tell_exported(args: Namespace, total: int, left_out: int) -> bool:
    """Print how many samples were written; returns whether some were left out."""
    note = f"; {left_out} were left out" if left_out else ""
    print(f"{total} samples at scan {args.scan} in {args.dst}{note}")
    return left_out > 0


EXPORT = Command(
    "export",
    "Write a dataset back as ordinary JPEGs or stock WebDataset tars.",
    "pcrshard export /data/train-pcr /data/train-5 --scan 5 --format wds --baseline",
    _export,
    [
        DATASET_OR_SHARD,
        argument("dst", "target folder"),
        value("--scan", SCAN_HELP.format("export"), "SCAN", scan_or_fraction, FULL),
        choice("--format", FORMATS, "image folder, or WebDataset tars (default: %(default)s)"),
        flag("--baseline", "rearrange losslessly into baseline JPEG, for hardware decoders"),
        choice(
            "--on-error",
            ("raise", "skip"),
            "skip names samples and shards that cannot be exported and goes on; exit status 1",
        ),
        flag(
            "--overwrite",
            "write to a folder that is not empty; files of the same names are replaced",
        ),
    ],
)


def _check_target(args: Namespace, source: str) -> None:
    if os.path.realpath(args.dst) == os.path.realpath(source):
        raise EncodeError(f"expected another folder than the dataset's own, got {args.dst}")
    if not args.overwrite and storage.is_folder(args.dst) and storage.list_files(args.dst):
        raise EncodeError(
            f"{args.dst} is not empty: "
            "use another folder, or --overwrite to replace files of the same names"
        )


def _stage(args: Namespace) -> None:
    figures: collections.Counter[str] = collections.Counter()
    for split, url in find_datasets(args.src).items():
        dst = storage.join(args.dst, split) if split else args.dst
        figures.update(_stage_one(args, url, dst))
    if args.json:
        print(json.dumps(figures))


def _stage_one(args: Namespace, url: str, dst: str) -> dict[str, int]:
    source, _ = open_dataset(url)
    scan = resolve_scan(source.shards, args.scan)
    total = source.prefix_bytes(scan)
    copied = kept = 0
    with ProgressBar("stage", "MB") as progress:

        def note(staged: Staged) -> None:
            nonlocal copied, kept
            copied += staged.copied_bytes
            kept += staged.kept_bytes
            progress((copied + kept) // 10**6, total // 10**6)

        index = stage(url, dst, scan, workers=args.workers, on_shard=note)
    if not args.json:
        print(
            f"{len(index.shards)} shards at scan {scan} in {dst}: "
            f"{human_bytes(copied)} copied, {human_bytes(kept)} were there"
        )
    return {
        "shards": len(index.shards),
        "samples": index.num_samples,
        "copied_bytes": copied,
        "kept_bytes": kept,
    }


STAGE = Command(
    "stage",
    "Copy the prefixes of a scan to fast local disk; later, only the difference to a higher scan.",
    "pcrshard stage s3://bucket/train-pcr $SCRATCH/train-pcr --scan 5",
    _stage,
    [
        DATASET,
        argument("dst", "local folder"),
        argument("--scan", SCAN_HELP.format("copy"), type=scan_or_fraction, required=True),
        value("--workers", "shards at a time (default: %(default)s)", "N", at_least(1), 8),
        JSON,
    ],
)


def _cache(args: Namespace) -> None:
    if not is_marked(args.folder):
        what = "something else" if storage.exists(args.folder) else "nothing"
        raise StorageError(
            f"expected a folder that a job has used as cache_dir, with a {MARKER}, there is {what}",
            url=args.folder,
        )
    cache = PrefixCache(args.folder)
    if args.action == "clear":
        freed = cache.clear()
        print(json.dumps({"freed_bytes": freed}) if args.json else f"{human_bytes(freed)} freed")
    elif args.json:
        print_json([entry._asdict() | {"scan": entry.scan} for entry in cache.entries()])
    else:
        _list_entries(cache.entries())


def _list_entries(entries: Sequence[Cached]) -> None:
    now = time.time()
    rows = [
        [entry.scan, human_bytes(entry.num_bytes), f"{now - entry.last_use:.0f} s ago", entry.name]
        for entry in entries
    ]
    print(table(["scan", "bytes", "last use", "shard"], rows))
    print(f"{len(entries)} shards, {human_bytes(sum(entry.num_bytes for entry in entries))}")


CACHE = Command(
    "cache",
    "List or clear a folder of cached prefixes (pcr_scan's cache_dir).",
    "pcrshard cache ls /local/pcr-cache",
    _cache,
    [
        argument(
            "action",
            "ls lists what is held; clear drops what no job has open",
            choices=("ls", "clear"),
        ),
        argument("folder", "the cache_dir"),
        JSON,
    ],
)
