"""The CPUs that this process may use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def usable_cpus(root: str = "/") -> int:
    """Return the number of CPUs that the affinity and the container's quota allow, at least one.

    Args:
        root: Root of the file system.
    """
    cpus = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cpus = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        # In microseconds, of cgroup v2, as a container sees its own; "max" is not a number.
        quota, period = map(int, Path(root, "sys/fs/cgroup/cpu.max").read_text().split())
        cpus = min(cpus, quota // period)
    return max(cpus, 1)


def decoding_threads() -> int:
    """Return the decoding threads for one rank: its CPUs minus one for training, at least one.

    torchrun sets ``LOCAL_WORLD_SIZE``, the number of ranks that share the CPUs.
    """
    return max(usable_cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1, 1)
