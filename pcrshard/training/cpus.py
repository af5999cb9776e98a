"""How many CPUs this process may really use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

_MEMBERSHIP = "proc/self/cgroup"
_CGROUPS = "sys/fs/cgroup"
# In microseconds: the quota and its period, of the second version and the first.
_QUOTA_FILES = {
    "": ("cpu.max",),
    "cpu": ("cpu.cfs_quota_us", "cpu.cfs_period_us"),
}


def decoding_threads(
    environment: Mapping[str, str] = os.environ,
    root: str = "/",
) -> int:
    """Threads that decode for one rank: the CPUs that it has, less one for training; at least one.

    Args:
        environment: ``LOCAL_WORLD_SIZE``, as torchrun sets it, says how many ranks share them.
        root: Where the files of the system are.
    """
    ranks = environment.get("LOCAL_WORLD_SIZE", "1")
    share = available_cpus(root) // max(int(ranks) if ranks.isdecimal() else 1, 1)
    return max(share - 1, 1)


def available_cpus(root: str = "/") -> int:
    """Whole CPUs that affinity and the quota of the control group give this process."""
    return max(int(min(_affinity(), cgroup_quota(root))), 1)


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cgroup_quota(root: str = "/") -> float:
    """CPUs that the control group of this process may use, of either version; infinite for all."""
    quotas = [_quota(folder, files) for folder, files in _cgroups(Path(root))]
    return min(quotas, default=math.inf)


def _cgroups(root: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """The folder of each group that this process is in, and which files may say its quota."""
    try:
        lines = (root / _MEMBERSHIP).read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in set(controllers.split(",")) & _QUOTA_FILES.keys():
            top = root / _CGROUPS / controller
            # A container sees its own group as the top, under the path that it has outside.
            for folder in [PurePosixPath(path), *PurePosixPath(path).parents]:
                yield top / folder.relative_to("/"), _QUOTA_FILES[controller]


def _quota(folder: Path, files: tuple[str, ...]) -> float:
    with suppress(OSError, ValueError):
        text = " ".join((folder / file).read_text() for file in files)
        quota, period = map(int, text.split())  # "max" is no number, and -1 no quota
        if quota > 0 and period > 0:
            return quota / period
    return math.inf
