"""The commands that move versions between stores: ``pcrshard checkpoint diff | publish | ...``."""

from __future__ import annotations

import argparse
from typing import Any

from .store_commands import add_command, add_store, bar, open_store, report

_MB = 1_000_000


def add_release_commands(inner: Any) -> None:
    """Add ``diff``, ``patch``, ``publish`` and ``pull`` to the commands of ``checkpoint``."""
    diff = add_command(
        inner, "diff", _diff, "Write the difference of two versions as one small file."
    )
    add_store(diff)
    diff.add_argument("old", type=int, help="number of the version that the receiver has")
    diff.add_argument("new", type=int, help="number of the version that it shall get")
    diff.add_argument("file", help="the file to write, local or a URL")

    patch = add_command(inner, "patch", _patch, "Add the version that such a file makes.")
    add_store(patch)
    patch.add_argument("file", help="the file, local or a URL")

    _add_publish(inner)
    _add_pull(inner)


def _add_publish(inner: Any) -> None:
    text = "Offer versions in a folder of plain files, from which others pull what they lack."
    publish = add_command(inner, "publish", _publish, text)
    add_store(publish)
    publish.add_argument("folder", help="the folder, local or a URL; any web server can offer it")
    publish.add_argument("--versions", type=int, nargs="+", metavar="N", help="default: all")
    publish.add_argument(
        "--keyframe-every",
        type=int,
        default=10,
        metavar="K",
        help="each K-th release can be had without an older one (default: %(default)s)",
    )


def _add_pull(inner: Any) -> None:
    text = "Add a release to a store; only what the store lacks is moved."
    pull = add_command(inner, "pull", _pull, text)
    pull.add_argument("url", help="the folder that the sender publishes to")
    add_store(pull)
    pull.add_argument("--release", type=int, metavar="N", help="default: the newest")
    pull.add_argument(
        "--max-bytes",
        type=int,
        metavar="BYTES",
        help="refuse releases of more bytes (default: the machine's memory)",
    )


def _diff(args: argparse.Namespace) -> int:
    from ..release.patch import write_patch

    with bar("diff", "tensors") as progress:
        patch = write_patch(open_store(args), args.old, args.new, args.file, progress=progress)
    figures = {
        "file": args.file,
        "file_bytes": patch.num_bytes,
        "raw_bytes": patch.raw_bytes,
        "ratio": round(patch.raw_bytes / patch.num_bytes, 2),
        "old": patch.old.hex(),
        "new": patch.new.hex(),
    }
    report(args, figures)
    return 0


def _patch(args: argparse.Namespace) -> int:
    from ..release.patch import apply_patch

    number, version = apply_patch(open_store(args), args.file)
    report(args, {"version": number, "id": version.id.hex()})
    return 0


def _publish(args: argparse.Namespace) -> int:
    from ..release import publish

    with bar("publish", "releases") as progress:
        made = publish(
            open_store(args),
            args.folder,
            versions=args.versions,
            keyframe_every=args.keyframe_every,
            progress=progress,
        )
    figures = {
        "releases": [release.number for release in made.releases],
        "keyframe_bytes": sum(file.num_bytes for file in made.files if file.old is None),
        "delta_bytes": sum(file.num_bytes for file in made.files if file.old is not None),
        "raw_bytes": sum(release.raw_bytes for release in made.releases),
    }
    report(args, figures)
    return 0


def _pull(args: argparse.Namespace) -> int:
    from ..release import pull

    with bar("pull", "MB") as progress:
        got = pull(
            args.url,
            open_store(args),
            release=args.release,
            max_bytes=args.max_bytes,
            progress=lambda done, total: progress(done // _MB, total // _MB),
        )
    figures = {
        "release": got.release.number,
        "version": got.number,
        "files": len(got.files),
        "moved_bytes": got.num_bytes,
        "raw_bytes": got.release.raw_bytes,
        "id": got.release.id,
    }
    report(args, figures)
    return 0
