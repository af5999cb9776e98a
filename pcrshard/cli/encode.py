"""``pcrshard encode``."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from .. import storage
from ..encoding import encode_dataset
from ..encoding.clusters import dask_executor, encode_on_slurm
from ..encoding.encode_dataset import EncodeOptions
from ..encoding.labels import read_classes
from ..encoding.resume_journal import read_journal, read_script, report_of
from ..encoding.sources import find_splits
from ..errors import EncodeError
from ..fidelity.costs import scan_costs
from ..format.dataset_index import DatasetIndex
from ..format.levels import Levels
from ..format.scan import Scan
from ..format.scan_script import ScanScript, parse_script
from ..format.shard_format import NAMES, ShardFormat
from ..reading.dataset_folder import open_dataset
from ..redaction import get_logger, redact_url
from .inspect import of_splits
from .parser import (
    KIND,
    Count,
    Keywords,
    Report,
    StorageOptions,
    UsageError,
    convert,
    from_file,
    key_value,
    pairs,
    parse_scan,
)
from .progress import ProgressBar

ALL_SPLITS = "all"


def _script(name: str) -> ScanScript | str:
    """Return a built-in script by name, or read a script from a file."""
    if name in NAMES:
        return name
    stem, _ = os.path.splitext(os.path.basename(name))
    try:
        return parse_script(stem, storage.read_bytes(name).decode())
    except ValueError as error:
        raise EncodeError(f"not a scan script: {error}", url=name) from error


def _deferred(text: str) -> tuple[str, Scan | float]:
    field, scan = key_value(text)
    return field, parse_scan(scan)


def _shares(text: str) -> tuple[float, ...]:
    return tuple(convert(list[float], text.split(",")))


def names(text: str) -> tuple[str, ...]:
    """Parse names that are separated by commas."""
    return () if text in ("none", "") else tuple(text.split(","))


Part = Annotated[
    tuple[int, int] | None,
    Keywords(type=lambda text: convert(tuple[int, int], text.split("/")), metavar="I/N"),
]
Options = Annotated[
    EncodeOptions,
    {
        "classes": from_file(read_classes),
        "script": from_file(_script, "SCRIPT"),
        "level_shares": {"type": _shares, "metavar": "A,B"},
        "preview_fields": {"type": names, "metavar": "A,B"},
        "deferred": pairs(_deferred, "FIELD=SCAN")
        | {
            "help": "First scan at which a field (or extension) is present, such as npy=5; "
            "repeatable (default: every scan)"
        },
        "kinds": KIND,
        "lists": {"type": names, "metavar": "A,B"},
        "seed": {
            "type": int,
            "metavar": "N",
            "help": "Seed of the global shuffle before sharding (default: 0)",
        },
    },
]


def encode(
    src: str,
    dst: str,
    *,
    options: Options,
    classes_of: str | None = None,
    levels_of: str | None = None,
    keep_order: bool = False,
    workers: Count | None = None,
    engine: Annotated[str, Keywords(choices=("local", "dask", "slurm"))] = "local",
    scheduler: str | None = None,
    slurm_option: Annotated[dict[str, str] | None, pairs(key_value)] = None,
    part: Part = None,
    resume: bool = False,
    storage_option: StorageOptions = None,
) -> Report:
    """Encode images losslessly into PCR shards.

    Example:
        pcrshard encode imagenet/train /data/train-pcr --samples-per-shard 1024

    Args:
        src: Folder or 'pattern' of images (one subfolder per class); folder, URL or pattern of
            WebDataset tars; or a .csv, .tsv or .jsonl list.
        dst: Folder for the shards, local or a URL. With --split all, each split gets a subfolder.
        options: Options for splitting, ordering and encoding the dataset.
        classes_of: Number the classes as another dataset does, such as the training set.
        levels_of: Cut images at the slopes of another dataset, which this one extends.
        keep_order: Keep the source order instead of shuffling.
        workers: Worker processes (default: one per usable CPU), or concurrent SLURM jobs (default:
            8).
        engine: Where shards are encoded: local processes, Dask or SLURM.
        scheduler: Dask scheduler address, or path to its JSON scheduler file.
        slurm_option: Option for sbatch, such as account=abc or time=60; repeatable.
        part: Encode only part I (from 0) of N; the last part to finish writes the dataset index.
        resume: Continue an interrupted run; complete shards are kept.
        storage_option: fsspec option for the source and the destination; repeatable.
    """
    fmt = options.fmt
    wrong = {
        "--base, --preview-fields: need --layout preview": (
            fmt.layout == "compact" and (fmt.base, fmt.preview_fields) != (2, ())
        ),
        "--slurm-option: needs --engine slurm": slurm_option and engine != "slurm",
        "--workers: a Dask cluster has its own workers": workers and engine == "dask",
        "--part: --engine slurm creates the parts itself": part and engine == "slurm",
        "--scheduler: needed by --engine dask and by no other; start `dask scheduler` here and "
        "`dask worker ADDRESS --nthreads 1` on each node, then give ADDRESS": (
            (engine == "dask") != bool(scheduler)
        ),
    }
    for text, is_wrong in wrong.items():
        if is_wrong:
            raise UsageError(f"argument {text}")
    if classes_of is not None:
        options = replace(options, classes=_classes_of(classes_of, options, storage_option))
    if levels_of is not None:
        levels = _levels_of(levels_of, fmt, storage_option)
        options = replace(options, fmt=replace(fmt, script=levels))
    if keep_order:
        options = replace(options, seed=None)
    reports = {}
    # What will be written is said before.
    get_logger("pcrshard").setLevel(logging.INFO)
    try:
        splits = _splits(src, options, storage_option)
        with dask_executor(scheduler) if scheduler else nullcontext() as executor:
            run: Callable[..., DatasetIndex | None]
            if engine == "slurm":
                run = partial(encode_on_slurm, jobs=workers or 8, sbatch=slurm_option)
            else:
                run = partial(encode_dataset.encode, part=part, workers=workers, executor=executor)
            # A scan is the same quality in all splits: that of the training set, if there is one.
            for split in sorted(splits, key=lambda name: name != "train"):
                target = storage.join(dst, split) if split else dst
                with ProgressBar("encode", "images") as progress:
                    index = run(
                        src,
                        target,
                        replace(options, split=split) if split else options,
                        resume=resume,
                        progress=progress,
                        src_options=storage_option,
                        dst_options=storage_option,
                    )
                if options.fmt.is_open and (script := read_script(target, options=storage_option)):
                    options = replace(options, fmt=replace(options.fmt, script=script))
                reports[split] = _report(target, index, storage_option)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command with --resume continues from here") from None
    return of_splits(reports)


def _classes_of(
    url: str, options: EncodeOptions, storage_options: storage.Options
) -> tuple[str, ...]:
    """Return the class names of another dataset."""
    if options.classes:
        raise UsageError("argument --classes-of: not allowed with --classes")
    index, _ = open_dataset(url, storage_options=storage_options)
    if not index.classes:
        raise EncodeError("expected a dataset with class names, its labels are numbers", url=url)
    return index.classes


def _levels_of(url: str, fmt: ShardFormat, storage_options: storage.Options) -> Levels:
    """Return the levels of another dataset."""
    default = ShardFormat()
    for name in ("script", "levels", "level_shares", "train_size"):
        if getattr(fmt, name) != getattr(default, name):
            flag = name.replace("_", "-")
            raise UsageError(f"argument --levels-of: not allowed with --{flag}")
    index, _ = open_dataset(url, storage_options=storage_options)
    if index.levels is None:
        raise EncodeError(f"expected a dataset with levels, its script is {index.script}", url=url)
    return index.levels


def _splits(src: str, options: EncodeOptions, storage_options: storage.Options) -> Sequence[str]:
    """Return the splits to encode into folders of their names; one without a name otherwise."""
    if options.split != ALL_SPLITS:
        return ("",)
    splits = find_splits(src, options=storage_options)
    if not splits:
        raise EncodeError(
            f"expected folders train, val or test in {redact_url(src)}, found none: omit --split"
        )
    return splits


def _report(dst: str, index: DatasetIndex | None, storage_options: storage.Options) -> Report:
    url = redact_url(dst)
    if index is None:
        return Report({"url": url, "note": "this part is done; others have shards left to write"})
    journal = read_journal(dst, options=storage_options)
    figures: dict[str, Any] = {
        "url": url,
        "samples": index.num_samples,
        "shards": len(index.shards),
        "script": index.script,
        "classes": index.classes,
        "num_classes": index.num_classes,
    }
    if index.counts is not None and index.counts.wide:
        figures["wide_color"] = (
            f"{index.counts.wide} images have an ICC profile other than sRGB; color='srgb' of "
            "decoders applies it"
        )
    for row in journal.unlayered:
        if row.outcome not in figures:
            figures[f"first_{row.outcome}"] = f"{row.source}: {row.reason}"
            figures[f"list_of_{row.outcome}"] = storage.join(url, report_of(row))
        figures[row.outcome] = figures.get(row.outcome, 0) + 1
    return Report(figures | {"scans": scan_costs(index)})
