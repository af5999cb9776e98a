"""Commands that read whole shards: ``pcrshard verify | export | stage | cache``."""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence

from .. import storage
from ..encoding.labels import renumber
from ..encoding.resume_journal import SKIPPED, read_report
from ..encoding.sources import SampleRef, list_source
from ..encoding.worker_processes import run_tasks, worker_pool
from ..errors import EncodeError, PCRError, StorageError
from ..fidelity.costs import human_bytes, table
from ..format.dataset_index import DATASET_INDEX, DatasetIndex, resolve_scan
from ..format.scan import FULL
from ..reading.cache_folder import MARKER, is_marked
from ..reading.dataset_folder import open_dataset
from ..reading.prefix_cache import Cached, PrefixCache
from ..reading.shard import Shard
from ..upkeep.export import FORMATS, export_shard
from ..upkeep.stage import Staged, stage
from ..upkeep.verify import VerifyResult, VerifyTask, verify_shard
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

Sources = dict[str, SampleRef]
SCAN_HELP = "scan to {}: a number, full, or a fraction such as 0.5 of the full bytes"


def _verify(args: Namespace) -> bool:
    index, urls = open_source(args.src)
    problems = _verify_shards(args, index, urls)
    if args.json:
        counted = {
            "samples": index.num_samples,
            "shards": len(index.shards),
        }
        print_json(counted | {"problems": problems})
    elif problems:
        print("\n".join(problems))
        print(f"{len(problems)} problems in {index.num_samples} samples")
    else:
        proven = ", pixels equal the source's" if args.against else ""
        print(f"{sizes(index)}: checksums and layout are right{proven}")
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


def _list_sources(args: Namespace, index: DatasetIndex) -> Sources | None:
    if not args.against:
        return None
    listed = list_source(args.against, prefix_keys=args.prefix_keys)
    # A split alone may lack classes that the dataset numbers; other names are other labels.
    if set(listed.classes) <= set(index.classes):
        listed = renumber(listed, index.classes)
    if index.scan is not None:
        raise EncodeError(
            f"--against needs full fidelity, this staged copy holds scans 1 to {index.scan}: "
            "verify the dataset itself"
        )
    return {sample.key: sample for sample in listed.samples}


def _verify_shards(
    args: Namespace,
    index: DatasetIndex,
    urls: list[str],
) -> list[str]:
    """The problems of each shard, and of the source's samples that no shard holds."""
    sources = _list_sources(args, index)
    entries = [None] if is_shard(args.src) else index.shards
    tasks = {
        number: VerifyTask(url, entry, sources and _sources_of(url, sources))
        for number, (url, entry) in enumerate(zip(urls, entries, strict=True))
    }
    results = _run(args, index, tasks)
    problems = [problem for result in results for problem in result.problems]
    return problems + _name_missing(args.src, sources, results)


def _run(
    args: Namespace,
    index: DatasetIndex,
    tasks: dict[int, VerifyTask],
) -> list[VerifyResult]:
    results = []
    with ProgressBar("verify", "images") as bar, worker_pool(args.workers, len(tasks)) as pool:
        for number, result in run_tasks(pool, verify_shard, tasks):
            results.append(result)
            bar(bar.done + index.shards[number].num_samples, index.num_samples)
    return results


def _name_missing(
    src: str,
    sources: Sources | None,
    results: list[VerifyResult],
) -> list[str]:
    # Of a shard that could not be read nobody knows what is missing.
    if sources is None or is_shard(src) or not all(result.keys for result in results):
        return []
    missing = set(sources).difference(*(result.keys for result in results))
    skipped = read_report(src.removesuffix(DATASET_INDEX), SKIPPED)
    missing.difference_update(row.key for row in skipped)
    return [f"the source's sample {key} is in no shard" for key in sorted(missing)]


def _sources_of(url: str, sources: Sources) -> Sources:
    """Only the sources of a shard's samples, so that a task stays small."""
    try:
        keys = Shard(url).index.keys
    except PCRError:
        return {}
    return {key: sources[key] for key in keys if key in sources}


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
    source, _ = open_dataset(args.src)
    args.scan = resolve_scan(source.shards, args.scan)
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
        figures = {
            "shards": len(index.shards),
            "samples": index.num_samples,
            "copied_bytes": copied,
            "kept_bytes": kept,
        }
        print(json.dumps(figures))
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
