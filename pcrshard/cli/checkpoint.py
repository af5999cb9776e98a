"""The commands for stores of checkpoints: ``pcrshard checkpoint ls | show | verify | pull ...``."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .store_commands import (
    Run,
    add_command,
    add_store,
    bar,
    counted,
    open_store,
    printable,
    ratio,
    report,
    text_table,
)

_MB = 1_000_000

if TYPE_CHECKING:
    from ..checkpoint import DeltaStore, VersionRecord
    from ..checkpoint.codec import Entry, Tensor


def register(commands: Any) -> None:
    """Add ``checkpoint`` and its own commands to the parser's sub-commands."""
    parser = commands.add_parser(
        "checkpoint",
        help="Look into a store of checkpoints, check it, and move versions between stores.",
        description="Look into a store of checkpoints, check it, and move versions between stores.",
    )
    inner = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_reading(inner)
    _add_writing(inner)


def _add(inner: Any, name: str, run: Run, text: str) -> argparse.ArgumentParser:
    command = add_command(inner, name, run, text)
    add_store(command)
    return command


def _add_reading(inner: Any) -> None:
    _add(inner, "ls", _ls, "List the versions.")

    show = _add(inner, "show", _show, "Show the tensors of a version: form, size, bound.")
    show.add_argument("version", type=int, help="number of the version")
    show.add_argument("--figure", metavar="PNG", help="draw ratio and error of each tensor")
    show.add_argument(
        "--original",
        metavar="FILE",
        help="safetensors file with what was saved: the largest error is measured",
    )

    verify = _add(inner, "verify", _verify, "Read every byte, and restore every version.")
    verify.add_argument("versions", type=int, nargs="*", help="numbers (default: all)")

    export = _add(inner, "export", _export, "Write a version's tensors as a safetensors file.")
    export.add_argument("version", type=int, help="number of the version")
    export.add_argument("file", help="the file to write, local or a URL")
    export.add_argument("--names", nargs="+", help="only these, such as `model` (default: all)")


def _add_writing(inner: Any) -> None:
    text = "Write a lost or damaged manifest again, from the files of the versions."
    recover = _add(inner, "recover", _recover, text)
    recover.add_argument(
        "--allow-loss", action="store_true", help="go on if a version cannot be restored"
    )

    delete = _add(inner, "delete", _delete, "Delete all versions but some.")
    keep = delete.add_mutually_exclusive_group(required=True)
    keep.add_argument("--keep", type=int, nargs="+", metavar="N", help="numbers to keep")
    keep.add_argument("--keep-every", type=int, metavar="K", help="keep each K-th and the newest")
    keep.add_argument("--keep-last", type=int, metavar="K", help="keep the newest K")

    text = "Copy a version from a store behind a URL; only missing files are moved."
    pull = add_command(inner, "pull", _pull, text)
    pull.add_argument("url", help="the other store's folder, on a web server or at any URL")
    add_store(pull)
    pull.add_argument("--version", type=int, default=-1, metavar="N", help="default: the newest")
    pull.add_argument(
        "--max-bytes", type=int, metavar="BYTES", help="refuse more (default: the machine's memory)"
    )

    text = "Copy a store or release of format 1 into a new store, bit for bit."
    convert = add_command(inner, "convert", _convert, text)
    convert.add_argument("source", help="the old folder, local or a URL")
    add_store(convert)


def _ls(args: argparse.Namespace) -> int:
    records = open_store(args).read(lambda manifest: manifest.versions)
    if args.json:
        print(json.dumps([_record_figures(record) for record in records]))
        return 0
    header = ("version", "reference", "bytes", "ratio", "saved", "metrics")
    print(text_table(header, [_record_row(record) for record in records]))
    stored = sum(record.file_bytes for record in records)
    raw = sum(record.raw_bytes for record in records)
    print(f"{counted(len(records))}, {raw} bytes in {stored}: {ratio(raw, stored)}")
    return 0


def _record_figures(record: VersionRecord) -> dict[str, Any]:
    return {
        "version": record.number,
        "reference": record.parent,
        "file": record.file,
        "file_bytes": record.file_bytes,
        "raw_bytes": record.raw_bytes,
        "saved": record.saved,
        "metrics": {key: str(value) for key, value in record.metrics.items()},
        "id": record.id.hex(),
    }


def _record_row(record: VersionRecord) -> Sequence[str]:
    return (
        str(record.number),
        "-" if record.parent is None else str(record.parent),
        str(record.file_bytes),
        ratio(record.raw_bytes, record.file_bytes),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.saved)),
        " ".join(f"{key}={value}" for key, value in record.metrics.items()),
    )


def _show(args: argparse.Namespace) -> int:
    store = open_store(args)
    file = store.read(lambda manifest: store.io.open(manifest.record(args.version)))
    rows = [_tensor_figures(path, entry) for path, entry in file.entries.items()]
    if args.original:
        _add_errors(store, args, rows)
    if args.figure:
        _draw(store, args, rows)
    if args.json:
        print(json.dumps({"version": args.version, "tensors": rows}))
        return 0
    header = ("tensor", "type", "shape", "coder", "bytes", "ratio", "bound", "patch", "error")
    print(text_table(header, [_tensor_row(row) for row in rows]))
    return 0


def _tensor_figures(path: str, entry: Entry) -> dict[str, Any]:
    lattice = entry.grid
    return {
        "path": path,
        "dtype": entry.spec.dtype,
        "shape": list(entry.spec.shape),
        "coder": "delta" if entry.is_delta else "intra",
        "stored_bytes": entry.num_bytes,
        "raw_bytes": entry.spec.num_bytes,
        "bound_kind": "lossless" if lattice is None else lattice.kind,
        "error_bound": 0.0 if lattice is None else lattice.error_bound,
        "patch_bytes": entry.patch_bytes,
    }


def _tensor_row(figures: dict[str, Any]) -> Sequence[str]:
    relative = " of each value" if figures["bound_kind"] == "log" else ""
    lossless = figures["bound_kind"] == "lossless"
    return (
        figures["path"],
        figures["dtype"],
        "x".join(map(str, figures["shape"])) or "scalar",
        figures["coder"],
        str(figures["stored_bytes"]),
        ratio(figures["raw_bytes"], figures["stored_bytes"]),
        "lossless" if lossless else f"{figures['error_bound']:.3g}{relative}",
        str(figures["patch_bytes"]),
        f"{figures['error']:.3f} of bound" if "error" in figures else "-",
    )


def _add_errors(
    store: DeltaStore,
    args: argparse.Namespace,
    rows: Sequence[dict[str, Any]],
) -> None:
    """The measured error of each tensor that the original file has."""
    from ..checkpoint.safetensors_file import measure_errors

    errors = measure_errors(store, args.version, args.original)
    for row in rows:
        if row["path"] in errors:
            row["error"] = errors[row["path"]]


def _draw(
    store: DeltaStore,
    args: argparse.Namespace,
    rows: Sequence[dict[str, Any]],
) -> None:
    """The figure; without measured errors it shows what is allowed."""
    from .store_figure import plot_tensors

    drawn = list(rows)
    if not args.original:
        from ..checkpoint.reader import read_tensors

        _, state = store.read(lambda manifest: read_tensors(store.io, manifest, args.version))
        drawn = [row | {"bound_std": _bound_share(row, state[row["path"]])} for row in rows]
    stored = sum(row["stored_bytes"] for row in rows)
    raw = sum(row["raw_bytes"] for row in rows)
    title = f"Version {args.version}: {ratio(raw, stored)} smaller"
    plot_tensors(drawn, args.figure, title=title)


def _bound_share(row: dict[str, Any], tensor: Tensor) -> float:
    """What error is allowed, as a share of the deviation, or of each value."""
    if row["bound_kind"] != "linear":
        return float(row["error_bound"])
    from ..errorbound import FLOAT_TYPES

    values = FLOAT_TYPES[tensor.spec.dtype].widen(tensor.restore())
    deviation = float(values[np.isfinite(values)].std())
    return float(row["error_bound"] / deviation) if deviation else 0.0


def _verify(args: argparse.Namespace) -> int:
    store = open_store(args)
    with bar("verify", "versions") as progress:
        found = store.verify(args.versions or None, progress=progress)
    problems = [str(problem) for problem in found]
    checked = len(args.versions) or len(store.versions())
    if args.json:
        print(json.dumps({"versions": checked, "problems": problems}))
    else:
        found_text = f"{len(problems)} problems" if problems else "no problems"
        print(printable("\n".join([*problems, f"{counted(checked)}, {found_text}"])))
    return 1 if problems else 0


def _export(args: argparse.Namespace) -> int:
    from ..checkpoint import export_safetensors

    names = args.names or None
    size = export_safetensors(open_store(args), args.version, args.file, names=names)
    report(args, {"version": args.version, "file": args.file, "file_bytes": size})
    return 0


def _delete(args: argparse.Namespace) -> int:
    store = open_store(args)
    before = store.versions()
    with bar("delete", "versions") as progress:
        store.delete(keep=_kept([record.number for record in before], args), progress=progress)
    _report_sizes(args, before, store.versions())
    return 0


def _pull(args: argparse.Namespace) -> int:
    from ..checkpoint import pull

    with bar("pull", "MB") as progress:
        got = pull(
            args.url,
            open_store(args),
            version=args.version,
            max_bytes=args.max_bytes,
            progress=lambda done, total: progress(done // _MB, total // _MB),
        )
    figures = {
        "version": got.version,
        "added_versions": list(got.added),
        "moved_bytes": got.moved_bytes,
    }
    report(args, figures)
    return 0


def _convert(args: argparse.Namespace) -> int:
    from ..checkpoint import convert

    with bar("convert", "versions") as progress:
        records = convert(args.source, args.store, progress=progress)
    report(args, {"versions": [record.number for record in records]})
    return 0


def _recover(args: argparse.Namespace) -> int:
    from ..checkpoint import recover

    with bar("recover", "files") as progress:
        found = recover(args.store, allow_loss=args.allow_loss, progress=progress)
    figures = {
        "versions": [record.number for record in found.versions],
        "unused_files": found.lost,
    }
    report(args, figures)
    return 0


def _report_sizes(
    args: argparse.Namespace,
    before: Sequence[VersionRecord],
    after: Sequence[VersionRecord],
) -> None:
    figures = {
        "versions_before": len(before),
        "versions": len(after),
        "bytes_before": sum(record.file_bytes for record in before),
        "bytes": sum(record.file_bytes for record in after),
    }
    report(args, figures)


def _kept(numbers: Sequence[int], args: argparse.Namespace) -> Sequence[int]:
    if args.keep is not None:
        return list(args.keep)
    if args.keep_last is not None:
        return numbers[-max(args.keep_last, 1) :]
    every = [number for number in numbers if number % max(args.keep_every, 1) == 0]
    return sorted({*every, *numbers[-1:]})
