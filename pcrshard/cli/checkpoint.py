"""The commands for stores of checkpoints: ``pcrshard checkpoint ls | show | verify | pull ...``.

Each command imports what it needs: all but ``ls`` need torch, which takes two seconds to import.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .parser import Count, Report, StorageOptions, UsageError, problem_report
from .progress import ProgressBar

if TYPE_CHECKING:
    from ..checkpoint import DeltaStore
    from ..checkpoint.codec import Entry

_MB = 1_000_000


def _open(store: str, options: dict[str, Any] | None) -> DeltaStore:
    from ..checkpoint import DeltaStore

    return DeltaStore(store, options=options)


def ls(store: str, *, storage_option: StorageOptions = None) -> Report:
    """List the versions in a store, or the checkpoints in a folder of the stores of all ranks.

    Example:
        pcrshard checkpoint ls runs/resnet

    Args:
        store: Store's folder, local or a URL.
        storage_option: fsspec option of the store; repeatable.
    """
    from ..checkpoint.manifest import ManifestFolder

    io = ManifestFolder(store, storage_option)
    if io.newest().number == 0 and "index" in io.list():
        from ..integrations.distributed_checkpoint import list_checkpoints

        found = list_checkpoints(store, storage_option)
        for row in found["versions"]:
            row["saved"] = _local_time(row["saved"])
        return Report(found)
    records = io.existing().versions
    versions = [
        {
            "number": record.number,
            "parent": record.parent,
            "saved": _local_time(record.saved),
            "file_bytes": record.file_bytes,
            "raw_bytes": record.raw_bytes,
            "metrics": record.metrics,
        }
        for record in records
    ]
    return Report(
        {
            "file_bytes": sum(record.file_bytes for record in records),
            "raw_bytes": sum(record.raw_bytes for record in records),
            "versions": versions,
        }
    )


def _local_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def show(store: str, version: int, *, storage_option: StorageOptions = None) -> Report:
    """Show how each tensor of a version is stored: coder, size, error bound.

    Example:
        pcrshard checkpoint show runs/resnet 12

    Args:
        store: Store's folder, local or a URL.
        version: Number of the version; -1 is the newest.
        storage_option: fsspec option of the store; repeatable.
    """
    io = _open(store, storage_option).io
    file = io.open(io.existing().record(version))
    tensors = [_tensor_figures(path, entry) for path, entry in file.entries.items()]
    return Report({"version": version, "tensors": tensors})


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


def verify(store: str, *, storage_option: StorageOptions = None) -> Report:
    """Read every byte of a store and restore every version.

    Example:
        pcrshard checkpoint verify runs/resnet

    Args:
        store: Store's folder, local or a URL.
        storage_option: fsspec option of the store; repeatable.
    """
    opened = _open(store, storage_option)
    with ProgressBar("verify", "versions") as progress:
        problems = list(map(str, opened.verify(progress=progress)))
    return problem_report({"versions": len(opened.versions())}, problems)


def export(
    store: str,
    version: int,
    file: str,
    *,
    names: Sequence[str] | None = None,
    storage_option: StorageOptions = None,
) -> Report:
    """Export the tensors of a version to a safetensors file.

    Example:
        pcrshard checkpoint export runs/resnet 12 model.safetensors --names model

    Args:
        store: Store's folder, local or a URL.
        version: Number of the version; -1 is the newest.
        file: File to write, local or a URL.
        names: Export only the tensors under these names, such as model (default: all).
        storage_option: fsspec option of the store and the file; repeatable.
    """
    from ..checkpoint import export_safetensors

    opened = _open(store, storage_option)
    size = export_safetensors(opened, version, file, names=names, options=storage_option)
    return Report({"version": version, "file": file, "file_bytes": size})


def recover(
    store: str, *, allow_loss: bool = False, storage_option: StorageOptions = None
) -> Report:
    """Rebuild a lost or damaged manifest from the version files.

    Example:
        pcrshard checkpoint recover runs/resnet

    Args:
        store: Store's folder, local or a URL.
        allow_loss: Continue if a version cannot be restored.
        storage_option: fsspec option of the store; repeatable.
    """
    from ..checkpoint import recover as recover_store

    with ProgressBar("recover", "files") as progress:
        found = recover_store(
            store, allow_loss=allow_loss, options=storage_option, progress=progress
        )
    numbers = [record.number for record in found.versions]
    return Report({"versions": numbers, "unused_files": found.lost})


def delete(
    store: str,
    *,
    keep: Sequence[int] = (),
    keep_every: Count | None = None,
    keep_last: Count | None = None,
    storage_option: StorageOptions = None,
) -> Report:
    """Delete all versions except the ones you choose to keep, by one rule or several.

    Example:
        pcrshard checkpoint delete runs/resnet --keep-last 5

    Args:
        store: Store's folder, local or a URL.
        keep: Version numbers to keep.
        keep_every: Keep versions whose number is a multiple of this, plus the newest version.
        keep_last: Keep this many of the newest versions.
        storage_option: fsspec option of the store; repeatable.
    """
    opened = _open(store, storage_option)
    before = opened.versions()
    numbers = [record.number for record in before]
    kept = set(keep)
    if keep_last:
        kept.update(numbers[-keep_last:])
    if keep_every:
        kept.update(number for number in numbers if number % keep_every == 0)
        kept.update(numbers[-1:])
    if not kept:
        raise UsageError("one of the arguments --keep --keep-every --keep-last is required")
    with ProgressBar("delete", "versions") as progress:
        opened.delete(keep=kept, progress=progress)
    after = opened.versions()
    return Report(
        {
            "versions_before": len(before),
            "versions": len(after),
            "bytes_before": sum(record.file_bytes for record in before),
            "bytes": sum(record.file_bytes for record in after),
        }
    )


def pull(
    url: str,
    store: str,
    *,
    version: int = -1,
    max_bytes: int | None = None,
    storage_option: StorageOptions = None,
) -> Report:
    """Copy a version from another store, transferring only the missing files.

    Example:
        pcrshard checkpoint pull https://models.example.org/resnet local --version 12

    Args:
        url: Folder of the source store, on a web server or at any other URL.
        store: Folder of the local store; created if it does not exist.
        version: Number of the version; -1 is the newest.
        max_bytes: Maximum bytes to accept (default: the machine's memory).
        storage_option: fsspec option of the URL; repeatable.
    """
    from ..checkpoint import pull as pull_version

    with ProgressBar("pull", "MB") as progress:
        got = pull_version(
            url,
            _open(store, None),
            version=version,
            max_bytes=max_bytes,
            options=storage_option,
            progress=lambda done, total: progress(done // _MB, total // _MB),
        )
    return Report(
        {"version": got.version, "added_versions": got.added, "moved_bytes": got.moved_bytes}
    )


COMMANDS = (ls, show, verify, export, recover, delete, pull)
