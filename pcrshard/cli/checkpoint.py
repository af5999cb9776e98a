"""The commands for stores of checkpoints: ``pcrshard checkpoint ls | show | verify | ...``."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..checkpoint import DeltaStore, VersionRecord
    from ..checkpoint.version_file import TensorEntry

Run = Callable[[argparse.Namespace], int]


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
    command: argparse.ArgumentParser = inner.add_parser(name, help=text, description=text)
    command.set_defaults(run=run)
    command.add_argument("store", help="the store's folder, local or a URL")
    command.add_argument("--json", action="store_true", help="print JSON")
    return command


def _add_reading(inner: Any) -> None:
    _add(inner, "ls", _ls, "List the versions.")

    show = _add(inner, "show", _show, "Show the tensors of a version: form, size, bound.")
    show.add_argument("version", type=int, help="number of the version")

    verify = _add(inner, "verify", _verify, "Read every byte, and restore every version.")
    verify.add_argument("versions", type=int, nargs="*", help="numbers (default: all)")

    export = _add(inner, "export", _export, "Write a version's tensors as a safetensors file.")
    export.add_argument("version", type=int, help="number of the version")
    export.add_argument("file", help="the file to write, local or a URL")


def _add_writing(inner: Any) -> None:
    compact = _add(inner, "compact", _compact, "Remove all versions but some.")
    keep = compact.add_mutually_exclusive_group(required=True)
    keep.add_argument("--keep", type=int, nargs="+", metavar="N", help="numbers that stay")
    keep.add_argument("--keep-every", type=int, metavar="K", help="each K-th and the newest stay")
    keep.add_argument("--keep-last", type=int, metavar="K", help="the newest K stay")

    diff = _add(inner, "diff", _diff, "Write the difference of two versions as one small file.")
    diff.add_argument("old", type=int, help="number of the version that the receiver has")
    diff.add_argument("new", type=int, help="number of the version that it shall get")
    diff.add_argument("file", help="the file to write, local or a URL")

    patch = _add(inner, "patch", _patch, "Add the version that such a file makes.")
    patch.add_argument("file", help="the file, local or a URL")


def _open(args: argparse.Namespace) -> DeltaStore:
    # torch takes a second to import: other commands must not wait for it.
    from ..checkpoint import DeltaStore

    return DeltaStore(args.store)


def _ls(args: argparse.Namespace) -> int:
    records = _open(args).versions()
    if args.json:
        print(json.dumps([_record_figures(record) for record in records]))
        return 0
    header = ("version", "reference", "bytes", "ratio", "saved", "metrics")
    print(_table(header, [_record_row(record) for record in records]))
    stored = sum(record.file_bytes for record in records)
    raw = sum(record.raw_bytes for record in records)
    print(f"{len(records)} versions, {raw} bytes in {stored}: {_ratio(raw, stored)}")
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
        _ratio(record.raw_bytes, record.file_bytes),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.saved)),
        " ".join(f"{key}={value}" for key, value in record.metrics.items()),
    )


def _show(args: argparse.Namespace) -> int:
    file = _open(args).open_file(args.version)
    rows = [_tensor_figures(entry) for entry in file.header.tensors]
    if args.json:
        print(json.dumps({"version": args.version, "tensors": rows}))
        return 0
    header = ("tensor", "type", "shape", "coder", "bytes", "ratio", "bound", "escapes")
    print(_table(header, [_tensor_row(row) for row in rows]))
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
        _ratio(figures["raw_bytes"], figures["stored_bytes"]),
        "lossless" if lossless else f"{figures['error_bound']:.3g}{relative}",
        str(figures["escapes"]),
    )


def _verify(args: argparse.Namespace) -> int:
    store = _open(args)
    problems = [str(problem) for problem in store.verify(args.versions or None)]
    checked = len(args.versions) or len(store.versions())
    if args.json:
        print(json.dumps({"versions": checked, "problems": problems}))
    else:
        print("\n".join([*problems, f"{checked} versions, {len(problems)} problems"]))
    return 1 if problems else 0


def _export(args: argparse.Namespace) -> int:
    size = _open(args).export(args.version, args.file)
    _report(args, {"version": args.version, "file": args.file, "file_bytes": size})
    return 0


def _compact(args: argparse.Namespace) -> int:
    store = _open(args)
    before = store.versions()
    store.compact(_kept([record.number for record in before], args))
    after = store.versions()
    figures = {
        "versions_before": len(before),
        "versions": len(after),
        "bytes_before": sum(record.file_bytes for record in before),
        "bytes": sum(record.file_bytes for record in after),
    }
    _report(args, figures)
    return 0


def _kept(numbers: Sequence[int], args: argparse.Namespace) -> Sequence[int]:
    if args.keep is not None:
        return list(args.keep)
    if args.keep_last is not None:
        return numbers[-max(args.keep_last, 1) :]
    every = [number for number in numbers if number % max(args.keep_every, 1) == 0]
    return sorted({*every, *numbers[-1:]})


def _diff(args: argparse.Namespace) -> int:
    from ..checkpoint.patch import write_patch

    patch = write_patch(_open(args), args.old, args.new, args.file)
    figures = {
        "file": args.file,
        "file_bytes": patch.num_bytes,
        "raw_bytes": patch.raw_bytes,
        "ratio": round(patch.raw_bytes / patch.num_bytes, 2),
        "old": patch.old.hex(),
        "new": patch.new.hex(),
    }
    _report(args, figures)
    return 0


def _patch(args: argparse.Namespace) -> int:
    from ..checkpoint.patch import apply_patch

    number, version = apply_patch(_open(args), args.file)
    _report(args, {"version": number, "id": version.id.hex()})
    return 0


def _report(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    if args.json:
        print(json.dumps(figures))
    else:
        print(", ".join(f"{name}={value}" for name, value in figures.items()))


def _ratio(raw: int, stored: int) -> str:
    return f"{raw / stored:.1f}x" if stored else "-"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in (header, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
