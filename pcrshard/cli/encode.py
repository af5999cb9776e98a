"""``pcrshard encode``."""

from __future__ import annotations

import collections
import os
from argparse import ArgumentTypeError, Namespace
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from .. import storage
from ..encoding.clusters import ENGINES, dask_executor, encode_on_slurm
from ..encoding.encode_dataset import EncodeOptions, encode
from ..encoding.labels import read_classes
from ..encoding.resume_journal import KEPT, REPORTS, SKIPPED, read_report
from ..encoding.shard_plan import ON_ERROR, advise
from ..encoding.sources import NO_SPLIT, list_source
from ..errors import EncodeError
from ..fidelity.costs import scan_costs, scan_table
from ..format.dataset_index import DatasetIndex
from ..format.scan import Scan
from ..format.scan_script import ScanScript, parse_script
from ..format.shard_format import AUTO, SCRIPTS, ShardFormat
from ..redaction import redact_url
from .arguments import (
    Command,
    argument,
    at_least,
    choice,
    either,
    flag,
    scan_argument,
    sizes,
    value,
)
from .progress import ProgressBar

ALL_SPLITS = "all"
# Options of encoding that have the names of the command's arguments.
_TAKEN = (
    "name",
    "num_shards",
    "samples_per_shard",
    "seed",
    "on_error",
    "reencode_quality",
    "resize_short",
    "prefix_keys",
    "lists",
    "stratify",
    "for_ranks",
    "for_workers",
)


def _encode(args: Namespace) -> None:
    try:
        targets = _targets(args)
        with _open_engine(args) as executor:
            for options, dst in targets:
                _encode_to(dst, args, options, executor)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command with --resume goes on from here") from None


def _open_engine(args: Namespace) -> AbstractContextManager[Executor | None]:
    if args.scheduler and args.engine != "dask":
        raise EncodeError(f"--scheduler needs --engine dask, got --engine {args.engine}")
    if args.slurm_option and args.engine != "slurm":
        raise EncodeError(f"--slurm-option needs --engine slurm, got --engine {args.engine}")
    if args.part is not None and args.engine == "slurm":
        raise EncodeError("--engine slurm makes parts itself: leave --part out")
    if args.engine != "dask":
        return nullcontext()
    if args.workers is not None:
        raise EncodeError(
            "--workers is for the engines local and slurm; a Dask cluster brings its own"
        )
    if not args.scheduler:
        raise EncodeError(
            "--engine dask needs --scheduler: start `dask scheduler` here and "
            "`dask worker ADDRESS --nthreads 1` on each node, then give ADDRESS"
        )
    return dask_executor(args.scheduler)


def _targets(args: Namespace) -> list[tuple[EncodeOptions, str]]:
    """What is encoded, and to which folder."""
    options = _options(args)
    if args.split != ALL_SPLITS:
        return [(replace(options, split=args.split), args.dst)]
    splits = list_source(args.src, prefix_keys=args.prefix_keys).splits
    if not splits:
        shown = redact_url(args.src)
        raise EncodeError(
            f"expected folders train, val or test in {shown}, found none: leave --split out"
        )
    return [(replace(options, split=split), storage.join(args.dst, split)) for split in splits]


def _encode_to(
    dst: str,
    args: Namespace,
    options: EncodeOptions,
    executor: Executor | None,
) -> None:
    with ProgressBar("encode", "images") as progress:
        index: DatasetIndex | None
        if args.engine == "slurm":
            index = encode_on_slurm(
                args.src,
                dst,
                options,
                jobs=8 if args.workers is None else args.workers,
                sbatch=dict(args.slurm_option),
                resume=args.resume,
                progress=progress,
            )
        else:
            index = encode(
                args.src,
                dst,
                options,
                part=args.part,
                workers=args.workers,
                resume=args.resume,
                executor=executor,
                progress=progress,
            )
    if index is None:
        number, count = args.part
        print(f"part {number} of {count} is done; other parts have shards to write yet")
        return
    print(scan_table(scan_costs(index)))
    print(_summary(index, dst))
    if advice := advise(len(index.shards)):
        print(advice)
    _tell_unlayered(dst)


def _tell_unlayered(dst: str) -> None:
    for name in REPORTS:
        rows = read_report(dst, name)
        for outcome, count in collections.Counter(row.outcome for row in rows).items():
            first = next(row for row in rows if row.outcome == outcome)
            done = {"kept": "kept as they are", "reencoded": "encoded again"}.get(outcome, outcome)
            print(
                f"{count} images were {done}, listed in {storage.join(dst, name)}; "
                f"the first: {first.source}: {first.reason}"
            )


def _summary(index: DatasetIndex, dst: str) -> str:
    labels = f", {index.num_classes} classes" if index.num_classes else ""
    return f"{sizes(index)} in {dst}{labels}"


def _options(args: Namespace) -> EncodeOptions:
    taken = {name: getattr(args, name) for name in _TAKEN}
    classes = read_classes(args.classes) if args.classes else ()
    return EncodeOptions(
        **taken,
        classes=classes,
        fmt=_format(args),
    )


def _format(args: Namespace) -> ShardFormat:
    preview_fields = tuple(filter(None, args.preview_fields.split(",")))
    if args.layout != "preview" and (preview_fields or args.base is not None):
        raise EncodeError("--base and --preview-fields need --layout preview")
    base = ShardFormat.base if args.base is None else args.base
    late = dict(args.late)
    return ShardFormat(_script(args.script), args.layout, base, preview_fields, late)


def _late(text: str) -> tuple[str, Scan]:
    """The type of ``--late``."""
    field, equals, scan = text.partition("=")
    if not (field and equals):
        raise ArgumentTypeError(f"expected FIELD=SCAN such as npy=5, got {text!r}")
    return field, scan_argument(scan)


def _names(text: str) -> tuple[str, ...]:
    """The type of ``--lists``."""
    return () if text == "none" else tuple(text.split(","))


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return key.lstrip("-"), value


def _part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise ArgumentTypeError(f"expected I/N with I from 0 to N-1, got {text!r}")
    return int(number), int(count)


def _script(name: str) -> ScanScript | str:
    """A built-in script's name, or the script in a file."""
    if name in (*SCRIPTS, AUTO):
        return name
    stem, _ = os.path.splitext(os.path.basename(name))
    try:
        return parse_script(stem, storage.read_bytes(name).decode())
    except ValueError as error:
        raise EncodeError(f"not a scan script: {error}", url=name) from error


# Which sample goes to which shard.
_SHARDING = [
    value("--name", "shards' name before the number (default: %(default)s)", "NAME", str, "data"),
    value("--num-shards", "number of shards; their sizes differ by at most one sample", "N", int),
    value(
        "--samples-per-shard",
        "at most N samples a shard (default: 1024, and up to 8 shards if there are fewer)",
        "N",
        int,
    ),
    either(
        value("--seed", "seed of the global shuffle (default: %(default)s)", "SEED", int, 0),
        argument(
            "--keep-order",
            "do not shuffle",
            dest="seed",
            action="store_const",
            const=None,
        ),
    ),
    flag("--stratify", "spread every class evenly over the shards"),
    value(
        "--for-ranks",
        "a number of shards that N training processes (with --for-workers) divide",
        "N",
        at_least(1),
        1,
    ),
    value("--for-workers", "DataLoader workers of each of them", "M", at_least(1), 1),
]
# Where shards are encoded, and which of them.
_ENGINE = [
    value(
        "--workers",
        "worker processes (default: one a core), or SLURM jobs at a time (default: 8)",
        "N",
        int,
    ),
    choice("--engine", ENGINES, "where shards are encoded (default: %(default)s processes)"),
    value("--scheduler", "of the Dask scheduler, or its scheduler file (.json)", "ADDRESS"),
    argument(
        "--slurm-option",
        "sbatch option of the jobs (partition, account, time, tasks_per_node...); may be repeated",
        type=_pair,
        action="append",
        default=[],
        metavar="KEY=VALUE",
    ),
    value(
        "--part",
        "encode part I (from 0) of N only; the last one to end writes the dataset index",
        "I/N",
        _part,
    ),
    flag("--resume", "go on with an earlier run; whole shards are kept"),
]
# What is done about sources that are not stored as they are.
_SOURCES = [
    choice(
        "--on-error",
        ON_ERROR,
        "files that cannot be rearranged into scans: raise an error; keep them as they are "
        f"(listed in {KEPT}); reencode them (lossy); or skip them (listed in {SKIPPED})",
    ),
    value(
        "--reencode-quality",
        "convert PNG, WebP, BMP sources to JPEG of this quality (lossy)",
        "Q",
        int,
    ),
    value(
        "--resize-short",
        "resize larger images to a shorter side of N pixels first (lossy)",
        "N",
        int,
    ),
    flag("--prefix-keys", "put the tar's name before its keys"),
    value(
        "--lists",
        "make lists of numbered images of tars: images.jpg of images.0.jpg, images.1.jpg; none for "
        "no list (default: those whose number differs from sample to sample)",
        "A,B",
        _names,
    ),
    value(
        "--split",
        "of a folder with train, val, test: all encodes each into DST/SPLIT, a name encodes that "
        f"one, {NO_SPLIT} takes the folders for classes",
        "SPLIT",
    ),
    value("--classes", "names of the labels 0, 1, ..., one a line", "FILE"),
]
_FORMAT = [
    value(
        "--script",
        "scan script: standard, q95 (for sources of JPEG quality 90 and above), auto (chooses by"
        " the quality of the sources), or a file in the syntax of jpegtran -scans (default:"
        " %(default)s)",
        "SCRIPT",
        str,
        "standard",
    ),
    choice(
        "--layout", ("compact", "preview"), "preview shows base scans as ordinary image members"
    ),
    argument(
        "--late",
        "store a field (by name or last extension) with a scan, absent below it: npy=5, json=full; "
        "may be repeated",
        type=_late,
        action="append",
        default=[],
        metavar="FIELD=SCAN",
    ),
    value("--base", f"scans in a preview member (default: {ShardFormat.base})", "K", int),
    value(
        "--preview-fields",
        "fields stored as members too, in the preview layout (cls,json)",
        "A,B",
        str,
        "",
    ),
]
ENCODE = Command(
    "encode",
    "Encode images losslessly into PCR shards.",
    "pcrshard encode imagenet/train /data/train-pcr --samples-per-shard 1024",
    _encode,
    [
        argument(
            "src",
            "folder or 'pattern' of images (class per sub-folder), folder/URL/pattern of"
            " WebDataset tars, or a .csv/.tsv/.jsonl list",
        ),
        argument("dst", "folder for the shards, local or a URL"),
        *_SHARDING,
        *_ENGINE,
        *_SOURCES,
        *_FORMAT,
    ],
)
