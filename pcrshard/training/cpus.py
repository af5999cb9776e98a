"""The number of CPUs available to this process."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

# Quota and period in microseconds, of cgroup v2 and v1, as a container sees its own cgroup.
_QUOTA_FILES = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))


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
    """Return the whole CPUs that the affinity and the container's quota allow this process."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cpus = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(int(min(cpus, _container_quota(root))), 1)


def _container_quota(root: str) -> float:
    """Return the CPU quota of this container's cgroup, v1 or v2; infinite if unlimited."""
    for files in _QUOTA_FILES:
        with suppress(OSError, ValueError):
            text = " ".join(Path(root, "sys/fs/cgroup", file).read_text() for file in files)
            quota, period = map(int, text.split())  # "max" is not a number, and -1 means no quota
            if quota > 0 and period > 0:
                return quota / period
    return math.inf
