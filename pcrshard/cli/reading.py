"""Commands that read shards and write something else: ``pcrshard export | stage | cache``."""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence

from .. import storage
from ..errors import EncodeError, PCRError, StorageError
from ..fidelity.costs import human_bytes, table
from ..format.scan import FULL
from ..reading.cache_folder import MARKER
from ..reading.dataset_folder import open_dataset
from ..reading.prefix_cache import Cached, PrefixCache, is_cache
from ..reading.shard import Shard
from ..upkeep.export import FORMATS, export_shard
from ..upkeep.stage import Staged, stage
from .arguments import (
    DATASET,
    DATASET_OR_SHARD,
    JSON,
    Command,
    argument,
    at_least,
    choice,
    flag,
    open_source,
    print_json,
    scan_argument,
    value,
)
from .progress import ProgressBar


def _export(args: Namespace) -> bool:
    index, urls = open_source(args.src)
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
        value("--scan", "scan to export (default: full)", "SCAN", scan_argument, FULL),
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
    source, _ = open_dataset(args.src)
    total = source.prefix_bytes(args.scan)
    copied = kept = 0
    with ProgressBar("stage", "MB") as progress:

        def note(staged: Staged) -> None:
            nonlocal copied, kept
            copied += staged.copied_bytes
            kept += staged.kept_bytes
            progress((copied + kept) // 10**6, total // 10**6)

        index = stage(args.src, args.dst, args.scan, workers=args.workers, on_shard=note)
    if args.json:
        figures = {"shards": len(index.shards), "samples": index.num_samples}
        print(json.dumps(figures | {"copied_bytes": copied, "kept_bytes": kept}))
        return
    print(
        f"{len(index.shards)} shards at scan {args.scan} in {args.dst}: "
        f"{human_bytes(copied)} copied, {human_bytes(kept)} were there"
    )


STAGE = Command(
    "stage",
    "Copy the prefixes of a scan to fast local disk; later, only the difference to a higher scan.",
    "pcrshard stage s3://bucket/train-pcr $SCRATCH/train-pcr --scan 5",
    _stage,
    [
        DATASET,
        argument("dst", "local folder"),
        argument("--scan", "scan to copy, or full", type=scan_argument, required=True),
        value("--workers", "shards at a time (default: %(default)s)", "N", at_least(1), 8),
        JSON,
    ],
)


def _cache(args: Namespace) -> None:
    if not is_cache(args.folder):
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
        [entry.scan, human_bytes(entry.num_bytes), f"{now - entry.last_use:.0f} s ago", entry.url]
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
