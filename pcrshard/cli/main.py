"""The command line: ``pcrshard encode | info | verify | export | demo``; the other commands are in ``cli_read``."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from .. import __version__, storage
from ..encoding.clusters import ENGINES, open_engine
from ..encoding.encode_dataset import EncodeOptions, encode, encode_part
from ..encoding.resume_journal import SKIPPED, read_skipped
from ..encoding.shard_writer import SCRIPTS, ShardFormat
from ..encoding.sources import list_source
from ..encoding.worker_processes import run_tasks, worker_pool
from ..errors import EncodeError, PCRError, StorageError
from ..fidelity.costs import scan_costs, scan_table
from ..format.dataset_index import DATASET_INDEX, DatasetIndex, ShardEntry
from ..format.scan import FULL
from ..format.scan_script import ScanScript, parse_script
from ..format.tar_members import TRAILER
from ..jpeg import pixels
from ..native import scatter
from ..reading.dataset_folder import open_dataset
from ..reading.shard import Shard
from ..upkeep.export import FORMATS, export_shard
from ..upkeep.verify import VerifyTask, verify_shard
from . import reading as cli_read
from .progress import Progress, add_command, at_least, scan_argument


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0 if all is well, 1 for a problem found or an error, 2 for wrong usage.
    """
    args = _parser().parse_args(argv)
    logging.getLogger("pcrshard").handlers = [logging.StreamHandler(sys.stderr)]
    for stream in (sys.stdout, sys.stderr):
        # A file's name need not be UTF-8, and must not stop the report about it.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader has seen enough (| head); python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except PCRError as error:
        print(f"pcrshard {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"pcrshard {args.command}: stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pcrshard", description="Read only the JPEG fidelity that training needs."
    )
    parser.add_argument("--version", action="version", version=f"pcrshard {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_encode(commands)
    _add_info(commands)
    _add_verify(commands)
    _add_export(commands)
    cli_read.add_commands(commands)
    _add_demo(commands)
    return parser


def _add_encode(commands: Any) -> None:
    parser = add_command(
        commands,
        "encode",
        _encode,
        "Encode images losslessly into PCR shards.",
        "pcrshard encode imagenet/train /data/train-pcr --samples-per-shard 1024",
    )
    add = parser.add_argument
    add(
        "src",
        help="folder of images (class per sub-folder), folder/URL/brace pattern of WebDataset tars, or a .tsv/.jsonl list",
    )
    add("dst", help="folder for the shards, local or a URL")
    add("--name", default="data", help="shards' name before the number (default: %(default)s)")
    add(
        "--num-shards",
        type=int,
        metavar="N",
        help="number of shards; their sizes differ by at most one sample",
    )
    add(
        "--samples-per-shard",
        type=int,
        metavar="N",
        help="at most N samples a shard (default: 1024, and up to 8 shards if there are fewer)",
    )
    order = parser.add_mutually_exclusive_group()
    order.add_argument(
        "--seed", type=int, default=0, help="seed of the global shuffle (default: %(default)s)"
    )
    order.add_argument("--keep-order", action="store_true", help="do not shuffle")
    add(
        "--workers",
        type=int,
        metavar="N",
        help="worker processes (default: one a core), or SLURM jobs at a time (default: 8)",
    )
    add(
        "--engine",
        choices=ENGINES,
        default="local",
        help="where shards are encoded (default: %(default)s processes)",
    )
    add(
        "--scheduler",
        metavar="ADDRESS",
        help="of the Dask scheduler, or its scheduler file (.json)",
    )
    add(
        "--slurm-option",
        type=_pair,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="sbatch option of the jobs (partition, account, time, tasks_per_node...); may be repeated",
    )
    add(
        "--part",
        type=_part,
        metavar="I/N",
        help="encode part I (from 0) of N only; the last one to end writes the dataset index",
    )
    add("--resume", action="store_true", help="go on with an earlier run; whole shards are kept")
    add(
        "--on-error",
        choices=("raise", "skip"),
        default="raise",
        help=f"skip lists bad images in {SKIPPED} and goes on",
    )
    add(
        "--reencode-quality",
        type=int,
        metavar="Q",
        help="convert PNG, WebP, BMP sources to JPEG of this quality (lossy)",
    )
    add(
        "--resize-short",
        type=int,
        metavar="N",
        help="resize larger images to a shorter side of N pixels first (lossy)",
    )
    add("--prefix-keys", action="store_true", help="put the tar's name before its keys")
    add(
        "--script",
        default="standard",
        help="scan script: standard, q95, or a file in the syntax of jpegtran -scans (default: %(default)s)",
    )
    add(
        "--layout",
        choices=("compact", "preview"),
        default="compact",
        help="preview shows base scans as ordinary image members",
    )
    add(
        "--base",
        type=int,
        metavar="K",
        help=f"scans in a preview member (default: {ShardFormat.base})",
    )
    add(
        "--preview-fields",
        default="",
        metavar="A,B",
        help="fields stored as members too, in the preview layout (cls,json)",
    )


def _encode(args: argparse.Namespace) -> int:
    preview_fields = tuple(name for name in args.preview_fields.split(",") if name)
    if args.layout != "preview" and (preview_fields or args.base is not None):
        raise EncodeError("--base and --preview-fields need --layout preview")
    options = EncodeOptions(
        name=args.name,
        num_shards=args.num_shards,
        samples_per_shard=args.samples_per_shard,
        seed=None if args.keep_order else args.seed,
        on_error=args.on_error,
        reencode_quality=args.reencode_quality,
        resize_short=args.resize_short,
        prefix_keys=args.prefix_keys,
        fmt=ShardFormat(
            _script(args.script),
            args.layout,
            ShardFormat.base if args.base is None else args.base,
            preview_fields,
        ),
    )
    local = args.engine == "local"
    engine = open_engine(
        args.engine,
        workers=None if local else args.workers,
        scheduler=args.scheduler,
        slurm=dict(args.slurm_option),
    )
    with Progress("encode", "images") as progress, engine as executor:
        how: dict[str, Any] = {"workers": args.workers if local else None, "executor": executor}
        how |= {"resume": args.resume, "progress": progress}
        if args.part is None:
            index: DatasetIndex | None = encode(args.src, args.dst, options, **how)
        else:
            index = encode_part(args.src, args.dst, args.part, options, **how)
    if index is None:
        print(
            f"part {args.part[0]} of {args.part[1]} is done; other parts have shards to write yet"
        )
        return 0
    print(scan_table(scan_costs(index)))
    print(f"{index.num_samples} samples in {len(index.shards)} shards in {args.dst}")
    if rows := read_skipped(args.dst):
        listed = storage.join(args.dst, SKIPPED)
        print(
            f"{len(rows)} images were skipped, listed in {listed}; the first: {rows[0].source}: {rows[0].reason}"
        )
    return 0


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return key.lstrip("-"), value


def _part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 0 to N-1, got {text!r}")
    return int(number), int(count)


def _script(name: str) -> ScanScript | str:
    """A built-in script's name, or the script in a file."""
    if name in SCRIPTS:
        return name
    try:
        return parse_script(
            os.path.splitext(os.path.basename(name))[0], storage.read_bytes(name).decode()
        )
    except ValueError as error:
        raise EncodeError(f"not a scan script: {error}", url=name) from error


def _add_info(commands: Any) -> None:
    add = add_command(
        commands,
        "info",
        _info,
        "Show what each scan of a dataset costs.",
        "pcrshard info /data/train-pcr --plot sizes.png",
    ).add_argument
    add("src", nargs="?", help="dataset folder, its pcr.json, or one shard")
    add("--json", action="store_true", help="print JSON")
    add("--plot", metavar="PNG", help="save the table as a picture")
    add("--system", action="store_true", help="show libraries and decoders of this machine instead")


def _info(args: argparse.Namespace) -> int:
    if args.system:
        print(
            json.dumps(
                {"pcrshard": __version__, "scattered reads": scatter.available} | pixels.system(),
                indent=1,
            )
        )
        return 0
    if args.src is None:
        raise EncodeError("expected a dataset or a shard; see `pcrshard info --help`")
    index, urls = _open(args.src)
    costs = scan_costs(index)
    first = Shard(urls[0]).index.schema
    about = {
        "samples": index.num_samples,
        "shards": len(index.shards),
        "script": index.script,
        "layout": first.layout,
        "streams": [field for field, _ in first.streams],
        "fields": list(first.fields),
        "classes": len(index.classes),
    }
    if args.plot:
        from ..fidelity import plots

        plots.plot_scan_costs(
            costs, args.plot, title=f"{index.num_samples} samples, script {index.script}"
        )
    if args.json:
        print(
            json.dumps(
                about | {"classes": index.classes, "scans": [c._asdict() for c in costs]}, indent=1
            )
        )
        return 0
    print(
        "  ".join(
            f"{name}: {', '.join(value) if isinstance(value, list) else value}"
            for name, value in about.items()
        )
    )
    print(scan_table(costs))
    return 0


def _open(url: str) -> tuple[DatasetIndex, list[str]]:
    """A dataset, or one shard as a dataset."""
    if not storage.file_name(url).endswith(".tar"):
        try:
            return open_dataset(url)
        except StorageError as error:
            if not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                raise
            raise EncodeError(
                f"no {DATASET_INDEX} in {url}; make a dataset with `pcrshard encode`, or name one shard"
            ) from error
    shard = Shard(url)
    head = shard.head
    crc = int.from_bytes(head.encode()[8:12], "little")
    size = storage.file_bytes(url) or head.prefix_stop(FULL) + len(TRAILER)
    # Nobody compares a single shard with a dataset index, which would know the checksum of the file.
    entry = ShardEntry(storage.file_name(url), head.num_samples, crc, size, 0, head.prefix_stops)
    return DatasetIndex(shard.index.schema.script, head.num_groups, (entry,)), [url]


def _add_verify(commands: Any) -> None:
    add = add_command(
        commands,
        "verify",
        _verify,
        "Check every byte of a dataset; with --against, prove that all pixels equal the source's.",
        "pcrshard verify /data/train-pcr --against imagenet/train",
    ).add_argument
    add("src", help="dataset folder, its pcr.json, or one shard")
    add("--against", metavar="SRC", help="the source that was encoded")
    add("--prefix-keys", action="store_true", help="as given to encode")
    add("--workers", type=int, metavar="N", help="worker processes (default: one a core)")
    add("--json", action="store_true", help="print JSON")


def _verify(args: argparse.Namespace) -> int:
    index, urls = _open(args.src)
    sources = None
    if args.against:
        listed = list_source(args.against, prefix_keys=args.prefix_keys)
        sources = {sample.key: sample for sample in listed.samples}
        if index.scan is not None:
            raise EncodeError(
                f"--against needs full fidelity, this staged copy holds scans 1 to {index.scan}: verify the dataset itself"
            )
    tasks = {}
    for i, (url, entry) in enumerate(zip(urls, index.shards, strict=True)):
        tasks[i] = VerifyTask(
            url,
            None if storage.file_name(args.src).endswith(".tar") else entry,
            _sources_of(url, sources),
        )
    problems: list[str] = []
    seen: set[str] = set()
    unread = 0
    with Progress("verify", "images") as progress, worker_pool(args.workers, len(tasks)) as pool:
        for number, result in run_tasks(pool, verify_shard, tasks):
            problems += result.problems
            seen.update(result.keys)
            unread += not result.keys
            progress(progress.done + index.shards[number].num_samples, index.num_samples)
    # Of a shard that could not be read nobody knows what is missing.
    missing = (
        set()
        if unread or storage.file_name(args.src).endswith(".tar")
        else set(sources or ()) - seen
    )
    missing -= (
        {row.key for row in read_skipped(args.src.removesuffix(DATASET_INDEX))}
        if missing
        else set()
    )
    problems += [f"the source's sample {key} is in no shard" for key in sorted(missing)]
    return _report_verify(args, index, problems)


def _sources_of(url: str, sources: dict[str, Any] | None) -> dict[str, Any] | None:
    """Only the sources of a shard's samples, so that a task stays small."""
    if sources is None:
        return None
    try:
        keys = Shard(url).index.keys
    except PCRError:
        return {}
    return {key: sources[key] for key in keys if key in sources}


def _report_verify(args: argparse.Namespace, index: DatasetIndex, problems: list[str]) -> int:
    what = "checksums and layout are right" + (
        ", pixels equal the source's" if args.against else ""
    )
    if args.json:
        print(
            json.dumps(
                {"samples": index.num_samples, "shards": len(index.shards), "problems": problems},
                indent=1,
            )
        )
    elif problems:
        print("\n".join(problems))
        print(f"{len(problems)} problems in {index.num_samples} samples")
    else:
        print(f"{index.num_samples} samples in {len(index.shards)} shards: {what}")
    return 1 if problems else 0


def _add_export(commands: Any) -> None:
    add = add_command(
        commands,
        "export",
        _export,
        "Write a dataset back as ordinary JPEGs or stock WebDataset tars.",
        "pcrshard export /data/train-pcr /data/train-5 --scan 5 --format wds --baseline",
    ).add_argument
    add("src", help="dataset folder, its pcr.json, or one shard")
    add("dst", help="target folder")
    add("--scan", type=scan_argument, default=FULL, help="scan to export (default: full)")
    add(
        "--format",
        choices=FORMATS,
        default="folder",
        help="image folder, or WebDataset tars (default: %(default)s)",
    )
    add(
        "--baseline",
        action="store_true",
        help="rearrange losslessly into baseline JPEG, for hardware decoders",
    )
    add(
        "--on-error",
        choices=("raise", "skip"),
        default="raise",
        help="skip names samples that cannot be exported and goes on",
    )
    add(
        "--overwrite",
        action="store_true",
        help="write to a folder that is not empty; files of the same names are replaced",
    )


def _export(args: argparse.Namespace) -> int:
    index, urls = _open(args.src)
    if os.path.realpath(args.dst) == os.path.realpath(os.path.dirname(urls[0])):
        raise EncodeError(f"expected another folder than the dataset's own, got {args.dst}")
    if not args.overwrite and storage.is_folder(args.dst) and storage.list_files(args.dst):
        raise EncodeError(
            f"{args.dst} is not empty: use another folder, or --overwrite to replace files of the same names"
        )
    total, taken, failed = 0, set[str](), list[PCRError]()
    how: dict[str, Any] = {
        "scan": args.scan,
        "form": args.format,
        "baseline": args.baseline,
        "classes": index.classes,
    }

    def leave_out(error: PCRError) -> bool:
        failed.append(error)
        return True

    if args.on_error == "skip":
        how["on_error"] = leave_out
    with Progress("export", "images") as progress:
        for url, entry in zip(urls, index.shards, strict=True):
            total += export_shard(Shard(url, entry=entry), args.dst, taken=taken, **how)
            progress(total, index.num_samples)
    for error in failed:
        print(f"left out: {error}", file=sys.stderr)
    print(
        f"{total} samples at scan {args.scan} in {args.dst}"
        + (f"; {len(failed)} were left out" if failed else "")
    )
    return 0


def _add_demo(commands: Any) -> None:
    add = add_command(
        commands,
        "demo",
        _demo,
        "Encode photographs, show what each scan costs, train from scan 2 and from full fidelity.",
        "pcrshard demo my-photos --out demo-output",
    ).add_argument
    add(
        "photos",
        nargs="?",
        help="folder of JPEGs, one sub-folder a class (default: crops of two sample photographs)",
    )
    add("--out", default="demo-output", help="folder for shards and picture (default: %(default)s)")
    add(
        "--epochs",
        type=at_least(1),
        default=6,
        help="epochs of each training (default: %(default)s)",
    )


def _demo(args: argparse.Namespace) -> int:
    from .demo import run_demo

    run_demo(args.photos, args.out, epochs=args.epochs)
    return 0
