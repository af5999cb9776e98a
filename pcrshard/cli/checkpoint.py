"""The commands for stores of checkpoints: ``pcrshard checkpoint ls | show | verify | ...``."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .release import add_release_commands
from .store_commands import (
    Run,
    add_command,
    add_store,
    bar,
    open_store,
    ratio,
    report,
    text_table,
)

if TYPE_CHECKING:
    from ..checkpoint import DeltaStore, VersionRecord
    from ..checkpoint.tensor_codec import Held
    from ..checkpoint.version_file import TensorEntry


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
    add_release_commands(inner)


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


def _add_writing(inner: Any) -> None:
    text = "Write a lost or damaged manifest again, from the files of the versions."
    recover = _add(inner, "recover", _recover, text)
    recover.add_argument(
        "--allow-loss", action="store_true", help="go on if a version cannot be restored"
    )

    compact = _add(inner, "compact", _compact, "Remove all versions but some.")
    keep = compact.add_mutually_exclusive_group(required=True)
    keep.add_argument("--keep", type=int, nargs="+", metavar="N", help="numbers that stay")
    keep.add_argument("--keep-every", type=int, metavar="K", help="each K-th and the newest stay")
    keep.add_argument("--keep-last", type=int, metavar="K", help="the newest K stay")

    rebase = _add(inner, "rebase", _rebase, "Write the deltas again in another order, exactly.")
    rebase.add_argument("--order", choices=("backward", "forward", "hop"), help="default: as it is")
    rebase.add_argument("--keyframe-every", type=int, metavar="K", help="default: as it is")


def _ls(args: argparse.Namespace) -> int:
    from ..checkpoint.manifest import require_manifest

    records = open_store(args).versions()
    if not records:
        require_manifest(args.store)  # an empty store is no error, something else is
    if args.json:
        print(json.dumps([_record_figures(record) for record in records]))
        return 0
    header = ("version", "reference", "bytes", "ratio", "saved", "metrics")
    print(text_table(header, [_record_row(record) for record in records]))
    stored = sum(record.file_bytes for record in records)
    raw = sum(record.raw_bytes for record in records)
    print(f"{len(records)} versions, {raw} bytes in {stored}: {ratio(raw, stored)}")
    return 0


def _record_figures(record: VersionRecord) -> dict[str, Any]:
    return {
        "version": record.number,
        "reference": record.parent,
        "file": record.file,
        "file_bytes": record.file_bytes,
        "raw_bytes": record.raw_bytes,
        "saved": record.saved,
        "metrics": {str(key): str(value) for key, value in record.metrics.items()},
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
    file = store.open_file(args.version)
    rows = [_tensor_figures(entry) for entry in file.header.tensors]
    if args.original:
        _add_errors(store, args, rows)
    if args.figure:
        _draw(store, args, rows)
    if args.json:
        print(json.dumps({"version": args.version, "tensors": rows}))
        return 0
    header = ("tensor", "type", "shape", "coder", "bytes", "ratio", "bound", "escapes", "error")
    print(text_table(header, [_tensor_row(row) for row in rows]))
    return 0


def _tensor_figures(entry: TensorEntry) -> dict[str, Any]:
    described = entry.described
    lattice = described.lattice
    return {
        "path": entry.path,
        "dtype": described.spec.dtype,
        "shape": list(described.spec.shape),
        "coder": described.coder,
        "stored_bytes": sum(described.sizes),
        "raw_bytes": described.spec.num_bytes,
        "bound_kind": "lossless" if lattice is None else lattice.kind,
        "error_bound": 0.0 if lattice is None else lattice.error_bound,
        "escapes": described.count,
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
        str(figures["escapes"]),
        f"{figures['error']:.3f} of bound" if "error" in figures else "-",
    )


def _add_errors(
    store: DeltaStore,
    args: argparse.Namespace,
    rows: Sequence[dict[str, Any]],
) -> None:
    """The measured error of each tensor that the original file has."""
    from ..checkpoint.safetensors_file import measure_errors

    errors = measure_errors(store.read(args.version), args.original)
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
        state = store.read(args.version).tensors
        drawn = [row | {"bound_std": _bound_share(row, state[row["path"]])} for row in rows]
    stored = sum(row["stored_bytes"] for row in rows)
    raw = sum(row["raw_bytes"] for row in rows)
    title = f"Version {args.version}: {ratio(raw, stored)} smaller"
    plot_tensors(drawn, args.figure, title=title)


def _bound_share(row: dict[str, Any], held: Held) -> float:
    """What error is allowed, as a share of the deviation, or of each value."""
    if row["bound_kind"] != "linear":
        return float(row["error_bound"])
    from ..errorbound import FLOAT_TYPES

    values = FLOAT_TYPES[held.spec.dtype].widen(held.restore())
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
        print("\n".join([*problems, f"{checked} versions, {len(problems)} problems"]))
    return 1 if problems else 0


def _export(args: argparse.Namespace) -> int:
    with bar("export", "tensors") as progress:
        size = open_store(args).export(args.version, args.file, progress=progress)
    report(args, {"version": args.version, "file": args.file, "file_bytes": size})
    return 0


def _compact(args: argparse.Namespace) -> int:
    store = open_store(args)
    before = store.versions()
    with bar("compact", "versions") as progress:
        store.compact(_kept([record.number for record in before], args), progress=progress)
    _report_sizes(args, before, store.versions())
    return 0


def _rebase(args: argparse.Namespace) -> int:
    store = open_store(args)
    before = store.versions()
    with bar("rebase", "versions") as progress:
        store.rebase(
            order=args.order,
            keyframe_every=args.keyframe_every,
            progress=progress,
        )
    _report_sizes(args, before, store.versions())
    return 0


def _recover(args: argparse.Namespace) -> int:
    from ..checkpoint import DeltaStore

    with bar("recover", "versions") as progress:
        found = DeltaStore.recover(args.store, allow_loss=args.allow_loss, progress=progress)
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
