"""The number of CPUs available to this process."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

_MEMBERSHIP = "proc/self/cgroup"
_CGROUPS = "sys/fs/cgroup"
# Quota and period in microseconds, of cgroup v2 and v1.
_QUOTA_FILES = {
    "": ("cpu.max",),
    "cpu": ("cpu.cfs_quota_us", "cpu.cfs_period_us"),
}


def decoding_threads(
    environment: Mapping[str, str] = os.environ,
    root: str = "/",
) -> int:
    """Return the decoding threads for one rank: its CPUs minus one for training, at least one.

    Args:
        environment: Environment variables; torchrun sets ``LOCAL_WORLD_SIZE``, the number of ranks
            that share the CPUs.
        root: Root of the file system.
    """
    ranks = environment.get("LOCAL_WORLD_SIZE", "1")
    share = available_cpus(root) // max(int(ranks) if ranks.isdecimal() else 1, 1)
    return max(share - 1, 1)


def available_cpus(root: str = "/") -> int:
    """Return the whole CPUs that the affinity and the cgroup quota allow this process."""
    return max(int(min(_affinity(), cgroup_quota(root))), 1)


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cgroup_quota(root: str = "/") -> float:
    """Return the CPU quota of this process's cgroup, v1 or v2; infinite if unlimited."""
    quotas = [_quota(folder, files) for folder, files in _cgroups(Path(root))]
    return min(quotas, default=math.inf)


def _cgroups(root: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the folder of each cgroup of this process, and the names of its quota files."""
    try:
        lines = (root / _MEMBERSHIP).read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in set(controllers.split(",")) & _QUOTA_FILES.keys():
            top = root / _CGROUPS / controller
            # A container mounts its own cgroup as the root but sees the host's path of it.
            for folder in [PurePosixPath(path), *PurePosixPath(path).parents]:
                yield top / folder.relative_to("/"), _QUOTA_FILES[controller]


def _quota(folder: Path, files: tuple[str, ...]) -> float:
    with suppress(OSError, ValueError):
        text = " ".join((folder / file).read_text() for file in files)
        quota, period = map(int, text.split())  # "max" is not a number, and -1 means no quota
        if quota > 0 and period > 0:
            return quota / period
    return math.inf
