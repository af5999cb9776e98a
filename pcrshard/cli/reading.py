"""Commands that read whole shards: ``pcrshard verify | export | stage | cache | card``."""

from __future__ import annotations

import os
import sys
import time
from typing import Literal

from .. import storage
from ..errors import EncodeError, PCRError
from ..reading.dataset_folder import find_datasets, open_dataset
from ..reading.prefix_cache import PrefixCache
from ..reading.shard import Shard
from ..redaction import redact_url
from ..upkeep.dataset_card import dataset_card
from ..upkeep.export import export_shard
from ..upkeep.stage import Staged
from ..upkeep.stage import stage as stage_dataset
from ..upkeep.verify import verify as verify_dataset
from .inspect import by_split, choose_scan, image_counts
from .parser import (
    Count,
    Fraction,
    Parallel,
    Report,
    ScanOrFraction,
    StorageOptions,
    UsageError,
    problem_report,
)
from .progress import ProgressBar


def verify(
    src: str,
    *,
    against: str | None = None,
    workers: Count | None = None,
    storage_option: StorageOptions = None,
) -> Report:
    """Check every byte of a dataset; with --against, prove that all pixels equal the source's.

    Example:
        pcrshard verify /data/train-pcr --against imagenet/train

    Args:
        src: Dataset folder, its pcr.json, a folder of splits, or one shard.
        against: Source that was encoded; it is listed with the options that encode used.
        workers: Worker processes (default: one per usable CPU).
        storage_option: fsspec option of the dataset; repeatable.
    """

    def check(url: str, split: str) -> Report:
        with ProgressBar(f"verify {split}".strip(), "images") as progress:
            problems = verify_dataset(
                url,
                against=against,
                workers=workers,
                progress=progress,
                storage_options=storage_option,
            )
        index, _ = open_dataset(url, storage_options=storage_option)
        figures = {
            "samples": index.num_samples,
            **image_counts(index),
            "shards": len(index.shards),
            "against": against,
        }
        return problem_report(figures, problems)

    return by_split(src, storage_option, check)


def export(
    src: str,
    dst: str,
    *,
    scan: ScanOrFraction | None = None,
    quality: Fraction | None = None,
    format: Literal["folder", "wds"] = "folder",
    baseline: bool = False,
    on_error: Literal["raise", "skip"] = "raise",
    overwrite: bool = False,
    storage_option: StorageOptions = None,
) -> Report:
    """Export a dataset as ordinary JPEGs or stock WebDataset tars.

    Example:
        pcrshard export /data/train-pcr /data/train-5 --scan 5 --format wds --baseline

    Args:
        src: Dataset folder, its pcr.json, or one shard.
        dst: Target folder.
        scan: Scan to export: a number, full (default), or a fraction such as 0.5 of the full bytes.
        quality: Export the lowest scan with this mean MS-SSIM, such as 0.95.
        format: Image folder, or WebDataset tars.
        baseline: Convert losslessly to baseline JPEG, for hardware decoders; kept files that
            cannot be converted are errors.
        on_error: With skip, report samples and shards that cannot be exported and continue; the
            exit status is then 1.
        overwrite: Replace existing files.
        storage_option: fsspec option of the dataset and the target; repeatable.
    """
    index, urls = open_dataset(src, storage_options=storage_option)
    top = choose_scan(index, scan, quality)

    def leave_out(error: PCRError) -> bool:
        print(f"left out: {error}", file=sys.stderr)
        return True

    taken: set[str] = set()
    total = 0
    with ProgressBar("export", "images") as progress:
        for url, entry in zip(urls, index.shards, strict=True):
            total += export_shard(
                Shard(url, entry=entry, storage_options=storage_option),
                dst,
                scan=top,
                form=format,
                baseline=baseline,
                classes=index.classes,
                taken=taken,
                on_error=leave_out if on_error == "skip" else None,
                overwrite=overwrite,
                options=storage_option,
            )
            progress(total, index.num_samples)
    left_out = index.num_samples - total
    return Report({"samples": total, "left_out": left_out, "scan": top}, has_failed=left_out > 0)


def stage(
    src: str,
    dst: str,
    *,
    scan: ScanOrFraction | None = None,
    quality: Fraction | None = None,
    workers: Parallel = 8,
    storage_option: StorageOptions = None,
) -> Report:
    """Copy a dataset's prefixes to fast local disk; a later, higher scan copies only the rest.

    Example:
        pcrshard stage s3://bucket/train-pcr $SCRATCH/train-pcr --scan 5

    Args:
        src: Dataset folder, its pcr.json, or a folder of splits, local or a URL.
        dst: Local folder.
        scan: Scan to copy up to: a number, full, or a fraction such as 0.5 of the full bytes.
        quality: Copy up to the lowest scan with this mean MS-SSIM, such as 0.95.
        workers: Number of shards copied concurrently.
        storage_option: fsspec option of the source; repeatable.
    """
    if (scan, quality) == (None, None):
        raise UsageError("expected --scan or --quality")

    def copy(url: str, split: str) -> Report:
        source, _ = open_dataset(url, storage_options=storage_option)
        top = choose_scan(source, scan, quality)
        staged: list[Staged] = []
        with ProgressBar("stage", "shards") as progress:

            def note(shard: Staged) -> None:
                staged.append(shard)
                progress(len(staged), len(source.shards))

            index = stage_dataset(
                url,
                storage.join(dst, split) if split else dst,
                top,
                workers=workers,
                storage_options=storage_option,
                on_shard=note,
            )
        return Report(
            {
                "scan": top,
                "shards": len(index.shards),
                "samples": index.num_samples,
                "copied_bytes": sum(shard.copied_bytes for shard in staged),
                "kept_bytes": sum(shard.kept_bytes for shard in staged),
            }
        )

    return by_split(src, storage_option, copy)


def cache(action: Literal["ls", "clear"], folder: str) -> Report:
    """List or clear the prefixes that jobs have cached in a folder.

    Example:
        pcrshard cache ls /local/pcr-cache

    Args:
        action: ls lists the cached shards; clear deletes the shards that no job has open.
        folder: Folder that ``PCRDataset`` was given to cache prefixes in.
    """
    prefixes = PrefixCache(folder)
    if action == "clear":
        return Report({"freed_bytes": prefixes.clear()})
    entries = prefixes.entries()
    shards = [
        {
            "scan": entry.scan,
            "name": entry.name,
            "num_bytes": entry.num_bytes,
            "idle_seconds": time.time() - entry.last_use,
        }
        for entry in entries
    ]
    return Report({"num_bytes": sum(entry.num_bytes for entry in entries), "shards": shards})


def card(
    folder: str,
    *,
    name: str | None = None,
    url: str | None = None,
    license: str = "",
    overwrite: bool = False,
    storage_option: StorageOptions = None,
) -> Report:
    """Write a Hugging Face dataset card (README.md) next to the shards.

    Example:
        pcrshard card birds-pcr --license cc-by-4.0 --url hf://datasets/me/birds

    Args:
        folder: Dataset folder, or a folder of splits, local or a URL.
        name: Name of the dataset (default: the folder's name).
        url: URL from which jobs will read the dataset (default: hf://datasets/USER/NAME).
        license: License identifier, as used on the Hub.
        overwrite: Replace an existing README.md.
        storage_option: fsspec option of the dataset; repeatable.
    """
    datasets = find_datasets(folder, storage_options=storage_option)
    target = storage.join(folder, "README.md")
    if storage.exists(target, options=storage_option) and not overwrite:
        raise EncodeError("it already exists; use --overwrite to replace it", url=target)
    opened = {
        split: open_dataset(each, storage_options=storage_option)
        for split, each in datasets.items()
    }
    name = name or os.path.basename(os.path.realpath(folder))
    text = dataset_card(
        {split: index for split, (index, _) in opened.items()},
        name=name,
        url=url or f"hf://datasets/USER/{name}",
        license=license,
    )
    with storage.atomic_write(target, options=storage_option) as file:
        file.write(text.encode(errors="backslashreplace"))
    note = "edit it to say where the images come from"
    return Report({"files": [redact_url(target)], "note": note})
