"""Commands that read whole shards: ``pcrshard verify | export | stage | cache | card``."""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated, Literal

from .. import storage
from ..errors import EncodeError, PCRError
from ..fidelity.costs import counted, human_bytes, record_table
from ..format.dataset_index import DATASET_INDEX, resolve_scan
from ..format.scan import FULL, Scan
from ..reading.dataset_folder import find_datasets, open_dataset
from ..reading.prefix_cache import PrefixCache
from ..reading.shard import Shard
from ..upkeep.dataset_card import dataset_card
from ..upkeep.export import FORMATS, export_shard
from ..upkeep.stage import Staged
from ..upkeep.stage import stage as stage_dataset
from ..upkeep.verify import verify as verify_dataset
from .inspect import is_shard, of_splits, open_source, sizes
from .parser import Count, Keywords, Parallel, Report, ScanOrFraction, StorageOptions
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
        workers: Worker processes (default: one per core).
        storage_option: fsspec option of the dataset; repeatable.
    """
    datasets = {"": src} if is_shard(src) else find_datasets(src, storage_options=storage_option)
    reports = {}
    for split, url in datasets.items():
        with ProgressBar(f"verify {split}".strip(), "images") as progress:
            problems = verify_dataset(
                url,
                against=against,
                workers=workers,
                progress=progress,
                storage_options=storage_option,
            )
        index, _ = open_source(url, storage_option)
        figures = {"samples": index.num_samples, "shards": len(index.shards), "problems": problems}
        proven = ", pixels equal the source's" if against else ""
        text = f"{sizes(index)}: checksums and layout are right{proven}"
        if problems:
            count = f"{counted(len(problems), 'problem')} in {index.num_samples} samples"
            text = "\n".join([*problems, count])
        reports[split] = Report(figures, text, bool(problems))
    return of_splits(reports)


def export(
    src: str,
    dst: str,
    *,
    scan: ScanOrFraction = FULL,
    format: Annotated[str, Keywords(choices=FORMATS)] = FORMATS[0],
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
        scan: Scan to export: a number, full, or a fraction such as 0.5 of the full bytes.
        format: Image folder, or WebDataset tars.
        baseline: Convert losslessly to baseline JPEG, for hardware decoders.
        on_error: With skip, report samples and shards that cannot be exported and continue; the
            exit status is then 1.
        overwrite: Replace existing files.
        storage_option: fsspec option of the dataset and the target; repeatable.
    """
    index, urls = open_source(src, storage_option)
    top: Scan = resolve_scan(index.shards, scan)
    failed: list[PCRError] = []

    def leave_out(error: PCRError) -> bool:
        failed.append(error)
        return on_error == "skip"

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
                on_error=leave_out,
                overwrite=overwrite,
                options=storage_option,
            )
            progress(total, index.num_samples)
    for error in failed:
        print(f"left out: {error}", file=sys.stderr)
    left_out = index.num_samples - total
    return Report({"samples": total, "left_out": left_out, "scan": top}, has_failed=left_out > 0)


def stage(
    src: str,
    dst: str,
    *,
    scan: ScanOrFraction,
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
        workers: Number of shards copied concurrently.
        storage_option: fsspec option of the source; repeatable.
    """
    reports = {
        split: _stage_one(
            url, storage.join(dst, split) if split else dst, scan, workers, storage_option
        )
        for split, url in find_datasets(src, storage_options=storage_option).items()
    }
    return of_splits(reports)


def _stage_one(
    src: str,
    dst: str,
    scan: ScanOrFraction,
    workers: int,
    storage_options: storage.Options,
) -> Report:
    source, _ = open_dataset(src, storage_options=storage_options)
    staged: list[Staged] = []
    with ProgressBar("stage", "shards") as progress:

        def note(shard: Staged) -> None:
            staged.append(shard)
            progress(len(staged), len(source.shards))

        index = stage_dataset(
            src, dst, scan, workers=workers, storage_options=storage_options, on_shard=note
        )
    return Report(
        {
            "scan": resolve_scan(source.shards, scan),
            "shards": len(index.shards),
            "samples": index.num_samples,
            "copied_bytes": sum(shard.copied_bytes for shard in staged),
            "kept_bytes": sum(shard.kept_bytes for shard in staged),
        }
    )


def cache(action: Literal["ls", "clear"], folder: str) -> Report:
    """List or clear the prefixes that jobs have cached in a folder.

    Example:
        pcrshard cache ls /local/pcr-cache

    Args:
        action: ls lists the cached shards; clear deletes the shards that no job has open.
        folder: Folder that ``PCRDataset`` was given to cache prefixes in.
    """
    prefixes = PrefixCache(folder)
    prefixes.check_marked()
    if action == "clear":
        return Report({"freed_bytes": prefixes.clear()})
    entries = prefixes.entries()
    figures = [{"scan": entry.scan, "name": entry.name, **entry._asdict()} for entry in entries]
    now = time.time()
    rows = [row | {"last_use": f"{now - row['last_use']:.0f} s ago"} for row in figures]
    listed = record_table(rows, omit=("path",))
    total = human_bytes(sum(entry.num_bytes for entry in entries))
    return Report(figures, f"{listed}\n{counted(len(entries), 'shard')}, {total}")


def card(
    folder: str,
    *,
    name: str | None = None,
    url: str | None = None,
    license: str = "",
    overwrite: bool = False,
) -> Report:
    """Write a Hugging Face dataset card (README.md) next to the shards.

    Example:
        pcrshard card birds-pcr --license cc-by-4.0 --url hf://datasets/me/birds

    Args:
        folder: Dataset folder, or a folder of splits.
        name: Name of the dataset (default: the folder's name).
        url: URL from which jobs will read the dataset (default: hf://datasets/USER/NAME).
        license: License identifier, as used on the Hub.
        overwrite: Replace an existing README.md.
    """
    path = storage.plain_path(folder)
    if not storage.is_local(folder) or not os.path.isdir(path):
        raise EncodeError(f"expected a local folder with {DATASET_INDEX}, got {folder}")
    target = os.path.join(path, "README.md")
    if os.path.lexists(target) and not overwrite:
        raise EncodeError(f"{target} already exists; use --overwrite to replace it")
    opened = {split: open_dataset(each) for split, each in find_datasets(path).items()}
    index, urls = next(iter(opened.values()))
    schema = Shard(urls[0], entry=index.shards[0]).index.schema
    name = name or os.path.basename(os.path.realpath(path))
    text = dataset_card(
        {split: index for split, (index, _) in opened.items()},
        schema,
        name=name,
        url=url or f"hf://datasets/USER/{name}",
        license=license,
    )
    with storage.atomic_write(target) as file:
        file.write(text.encode(errors="backslashreplace"))
    return Report({"files": [target]}, f"wrote {target}; edit it to say where the images come from")
