"""``pcrshard encode``."""

from __future__ import annotations

import collections
import os
from argparse import ArgumentTypeError
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Annotated, Any

from .. import storage
from ..encoding import encode_dataset
from ..encoding.clusters import dask_executor, encode_on_slurm
from ..encoding.encode_dataset import EncodeOptions
from ..encoding.labels import read_classes
from ..encoding.resume_journal import read_journal
from ..encoding.shard_plan import ON_ERROR, advise_script
from ..encoding.sources import list_source
from ..errors import EncodeError
from ..fidelity.costs import record_table, scan_costs
from ..format.dataset_index import DatasetIndex
from ..format.scan import Scan
from ..format.scan_script import ScanScript, parse_script
from ..format.shard_format import AUTO, SCRIPTS, ShardFormat
from ..redaction import redact_url
from .inspect import sizes
from .parser import (
    Keywords,
    Report,
    StorageOptions,
    UsageError,
    from_file,
    key_value,
    pairs,
    parse_scan,
)
from .progress import ProgressBar

ALL_SPLITS = "all"


def _script(name: str) -> ScanScript | str:
    """Return a built-in script by name, or read a script from a file."""
    if name in (*SCRIPTS, AUTO):
        return name
    stem, _ = os.path.splitext(os.path.basename(name))
    try:
        return parse_script(stem, storage.read_bytes(name).decode())
    except ValueError as error:
        raise EncodeError(f"not a scan script: {error}", url=name) from error


def _deferred(text: str) -> tuple[str, Scan | float]:
    field, scan = key_value(text)
    return field, parse_scan(scan)


def _names(text: str) -> tuple[str, ...]:
    return () if text in ("none", "") else tuple(text.split(","))


def _slurm_option(text: str) -> tuple[str, str]:
    key, value = key_value(text)
    return key.lstrip("-"), value


def _part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise ArgumentTypeError(f"expected I/N with I from 0 to N-1, got {text!r}")
    return int(number), int(count)


_NAMES = {"type": _names, "metavar": "A,B"}
Options = Annotated[
    EncodeOptions,
    {
        "on_error": {"choices": ON_ERROR},
        "layout": {"choices": ("compact", "preview")},
        "classes": from_file(read_classes),
        "script": from_file(_script, "SCRIPT"),
        "lists": _NAMES,
        "preview_fields": _NAMES,
        "deferred": pairs(_deferred, "FIELD=SCAN")
        | {
            "help": "First scan at which a field (or extension) is present, such as npy=5; "
            "repeatable (default: every scan)"
        },
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
    keep_order: bool = False,
    workers: int | None = None,
    engine: Annotated[str, Keywords(choices=("local", "dask", "slurm"))] = "local",
    scheduler: str | None = None,
    slurm_option: Annotated[dict[str, str] | None, pairs(_slurm_option)] = None,
    part: Annotated[tuple[int, int] | None, Keywords(type=_part, metavar="I/N")] = None,
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
        keep_order: Keep the source order instead of shuffling.
        workers: Worker processes (default: one per core), or concurrent SLURM jobs (default: 8).
        engine: Where shards are encoded: local processes, Dask or SLURM.
        scheduler: Dask scheduler address, or path to its JSON scheduler file.
        slurm_option: Option for sbatch (partition, account, time, cpus_per_task...); repeatable.
        part: Encode only part I (from 0) of N; the last part to finish writes the dataset index.
        resume: Continue an interrupted run; complete shards are kept.
        storage_option: fsspec option for the source and the destination; repeatable.
    """
    if keep_order and options.seed:
        raise UsageError("argument --seed: not allowed with argument --keep-order")
    fmt = options.fmt
    if fmt.layout != "preview" and (fmt.preview_fields or fmt.base != ShardFormat.base):
        raise EncodeError("--base and --preview-fields need --layout preview")
    if keep_order:
        options = replace(options, seed=None)
    if engine == "slurm" and part is not None:
        raise EncodeError("--engine slurm creates the parts itself: omit --part")

    def encode_to(target: str, options: EncodeOptions, executor: Executor | None) -> Report:
        how: dict[str, Any] = {
            "resume": resume,
            "src_options": storage_option,
            "dst_options": storage_option,
        }
        index: DatasetIndex | None
        with ProgressBar("encode", "images") as progress:
            if engine == "slurm":
                index = encode_on_slurm(
                    src,
                    target,
                    options,
                    jobs=8 if workers is None else workers,
                    sbatch=slurm_option,
                    progress=progress,
                    **how,
                )
            else:
                index = encode_dataset.encode(
                    src,
                    target,
                    options,
                    part=part,
                    workers=workers,
                    executor=executor,
                    progress=progress,
                    **how,
                )
        if index is None and part is not None:
            text = f"part {part[0]} of {part[1]} is done; other parts have shards left to write"
            return Report({"url": target, "part": part}, text)
        assert index is not None, "a run without parts is complete when it ends"
        return _report(target, index, options.fmt.script, storage_option)

    try:
        targets = list(_targets(src, dst, options, storage_option))
        with _open_engine(engine, scheduler, workers, slurm_option) as executor:
            reports = [encode_to(target, each, executor) for target, each in targets]
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command with --resume goes on from here") from None
    figures = [report.figures for report in reports]
    text = "\n".join(report.text for report in reports)
    return Report(figures if options.split == ALL_SPLITS else figures[0], text)


def _open_engine(
    engine: str,
    scheduler: str | None,
    workers: int | None,
    slurm_option: dict[str, str] | None,
) -> AbstractContextManager[Executor | None]:
    if scheduler and engine != "dask":
        raise EncodeError(f"--scheduler needs --engine dask, got --engine {engine}")
    if slurm_option and engine != "slurm":
        raise EncodeError(f"--slurm-option needs --engine slurm, got --engine {engine}")
    if engine != "dask":
        return nullcontext()
    if workers is not None:
        raise EncodeError(
            "--workers applies to the engines local and slurm; a Dask cluster has its own workers"
        )
    if not scheduler:
        raise EncodeError(
            "--engine dask needs --scheduler: start `dask scheduler` here and "
            "`dask worker ADDRESS --nthreads 1` on each node, then give ADDRESS"
        )
    return dask_executor(scheduler)


def _targets(
    src: str, dst: str, options: EncodeOptions, storage_options: storage.Options
) -> Iterator[tuple[str, EncodeOptions]]:
    """Return the target folder and options of each split to encode."""
    if options.split != ALL_SPLITS:
        yield dst, options
        return
    splits = list_source(src, prefix_keys=options.prefix_keys, options=storage_options).splits
    if not splits:
        raise EncodeError(
            f"expected folders train, val or test in {redact_url(src)}, found none: omit --split"
        )
    for split in splits:
        yield storage.join(dst, split), replace(options, split=split)


def _report(
    dst: str,
    index: DatasetIndex,
    script: ScanScript | str,
    storage_options: storage.Options,
) -> Report:
    journal = read_journal(dst, options=storage_options)
    costs = scan_costs(index)
    num_shards = len(index.shards)
    classes = f", {index.num_classes} classes" if index.num_classes else ""
    lines = [
        record_table(costs),
        f"{sizes(index)} in {dst}{classes}",
        "" if script != AUTO else f"scan script: {index.script}, by the quality of the sources",
        advise_script(index.script, journal.quality),
    ]
    figures: dict[str, Any] = {
        "url": redact_url(dst),
        "samples": index.num_samples,
        "shards": num_shards,
        "classes": index.classes,
        "scans": costs,
    }
    rows = journal.unlayered
    for outcome, count in collections.Counter(row.outcome for row in rows).items():
        figures[outcome] = count
        first = next(row for row in rows if row.outcome == outcome)
        done = {"kept": "kept as they are", "reencoded": "encoded again"}.get(outcome, outcome)
        lines.append(
            f"{count} images were {done}, listed in {storage.join(dst, first.report)}; "
            f"the first: {first.source}: {first.reason}"
        )
    return Report(figures, "\n".join(filter(None, lines)))
