"""The rank of this process, and the world size."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NamedTuple

from ..redaction import get_logger

log = get_logger(__name__)


class Rank(NamedTuple):
    """The rank of this process, from 0, and the number of processes that share an epoch."""

    rank: int
    world: int


# In order of precedence. torchrun sets the first pair, srun the second, even if nothing else is
# set: splitters that know only the first pair give every task of a plain `srun python train.py` the
# same data. IDRIS's idr_torch also reads the second pair.
_PAIRS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))


def from_environment(environment: Mapping[str, str]) -> Rank | None:
    """Return the rank set by a launcher, if any: a pure function of the variables.

    Raises:
        ValueError: The variables are inconsistent.

    >>> from_environment({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"})
    Rank(rank=3, world=8)
    >>> from_environment({"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "3", "SLURM_NTASKS": "8"})
    Rank(rank=0, world=2)
    """
    for names in _PAIRS:
        rank, world = map(environment.get, names)
        if rank is None or world is None:
            continue
        if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
            raise ValueError(f"expected {names[0]} below {names[1]}, got {rank!r} and {world!r}")
        if names[0] == "SLURM_PROCID" and world != "1" and "SLURM_STEP_ID" not in environment:
            log.warning(
                "rank %s of %s, by SLURM_PROCID and SLURM_NTASKS, but this is not a task of srun: "
                "start the job by srun",
                rank,
                world,
            )
        return Rank(int(rank), int(world))
    return None


def current(rank: int | None = None, world_size: int | None = None) -> Rank:
    """Return the rank of this process.

    The arguments take precedence, then an initialized ``torch.distributed``, then the environment;
    the default is rank 0 of 1.

    Args:
        rank: The rank, if the caller knows it.
        world_size: The number of ranks; given together with ``rank``.

    Raises:
        ValueError: The arguments or the environment are inconsistent.
    """
    if rank is not None and world_size is not None and 0 <= rank < world_size:
        return Rank(rank, world_size)
    if rank is not None or world_size is not None:
        raise ValueError(f"expected a rank from 0 to below world_size, got {rank} of {world_size}")
    # Looked up, not imported: a job that uses torch.distributed has imported it, and reading data
    # does not require torch.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return Rank(distributed.get_rank(), distributed.get_world_size())
    return from_environment(os.environ) or Rank(0, 1)
