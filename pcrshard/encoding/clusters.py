"""Clusters that encode shards: Dask workers, or an array of SLURM jobs.

The only module that imports ``distributed`` and ``submitit``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Executor
from typing import Any

from ..errors import EncodeError, MissingDependency
from ..format.dataset_index import DatasetIndex
from .encode_dataset import EncodeOptions, commit, encode
from .resume_journal import Journal, Part
from .samples import StorageOptions
from .shard_plan import plan

ENGINES = ("local", "dask", "slurm")


@contextlib.contextmanager
def dask_executor(scheduler: str, *, timeout: float = 30) -> Iterator[Executor]:
    """Connect to a Dask cluster, by the scheduler's address or the path to its JSON file.

    Raises:
        EncodeError: Scheduler and a worker do not answer within ``timeout`` seconds each, or
            the connection is lost.
        MissingDependency: ``distributed`` is not installed.
    """
    try:
        from distributed import Client, KilledWorker
    except ImportError as error:
        message = "--engine dask needs distributed: pip install 'pcrshard[dask]'"
        raise MissingDependency(message) from error
    where = "scheduler_file" if scheduler.endswith(".json") else "address"
    options: Any = {where: scheduler, "timeout": timeout, "set_as_default": False}
    try:
        make_client: Any = Client
        client = make_client(**options)
    except (OSError, ValueError) as error:
        raise EncodeError(f"cannot reach the Dask scheduler {scheduler}: {error}") from error
    with client:
        try:
            client.wait_for_workers(1, timeout=timeout)
            yield client.get_executor(pure=False)
        except (TimeoutError, KilledWorker, CancelledError) as error:
            reason = f"{type(error).__name__}: {error}; run again with --resume"
            raise EncodeError(f"lost the Dask cluster {scheduler}: {reason}") from error


def encode_on_slurm(
    src: str,
    dst: str,
    options: EncodeOptions = EncodeOptions(),
    *,
    jobs: int = 8,
    sbatch: Mapping[str, str] | None = None,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
    poll: float = 5,
    **storage_options: StorageOptions,
) -> DatasetIndex:
    """Encode a dataset as an array of SLURM jobs, each of which encodes one part of the shards.

    Takes the arguments of :func:`encode`, including ``src_options`` and ``dst_options``; the number
    of jobs, each of which runs as many worker processes as it has CPUs; options for ``sbatch`` by
    their long names; and the interval in seconds between polls of the journal and the queue. All
    nodes must see ``dst`` and the current folder, where a private subfolder holds job files and
    logs until the run succeeds.

    Raises:
        EncodeError: SLURM rejects the jobs, or one failed; the message includes its log's end.
        MissingDependency: ``submitit`` is not installed.
    """
    try:
        from submitit.helpers import Checkpointable
        from submitit.slurm.slurm import SlurmExecutor
    except ImportError as error:
        message = "--engine slurm needs submitit: pip install 'pcrshard[slurm]'"
        raise MissingDependency(message) from error

    class EncodePart(Checkpointable):
        """A job that requeues itself at its time limit; the journal holds its state."""

        def __call__(self, part: Part) -> None:
            # submitit ignores SIGTERM, which would delay scancel.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            cpus = int(os.environ.get("SLURM_CPUS_PER_TASK", "1"))
            how: Any = {"resume": True, "workers": cpus} | storage_options
            encode(src, dst, options, part=part, **how)

    planned = plan(src, options, storage_options.get("src_options"))
    journal = Journal(dst, planned, dst_options=storage_options.get("dst_options"))
    if not resume:
        with journal.open(resume):
            pass  # refuse a folder that is in use now, not after jobs have waited in the queue
    parameters: dict[str, Any] = {"job_name": "pcrshard-encode", "time": 60, "requeue": True}
    parameters |= {name.replace("-", "_"): value or True for name, value in (sbatch or {}).items()}
    folder = os.path.abspath(tempfile.mkdtemp(prefix="pcrshard-slurm-", dir="."))
    try:
        executor = SlurmExecutor(folder, max_num_timeout=100)
        executor.update_parameters(additional_parameters=parameters)
        parts = [(number, jobs) for number in range(jobs)]
        # submitit does not annotate map_array.
        submitted: Any = executor.map_array(EncodePart(), parts)  # type: ignore[no-untyped-call]
    except Exception as error:
        shutil.rmtree(folder)
        raise EncodeError(f"cannot submit SLURM jobs: {error}") from error
    total = sum(map(len, planned.shards))
    try:
        while _is_queued(submitted[0].job_id.partition("_")[0]):
            if progress is not None:
                progress(sum(len(planned.shards[n]) for n in journal.written()), total)
            time.sleep(poll)
    except BaseException:
        for job in submitted:
            job.cancel()
        raise
    index = commit(journal)
    if index is None:
        log = max((job.stderr() or "" for job in submitted), key=lambda log: "Traceback" in log)
        ends = log[-1000:].strip() or f"it left no log: do all nodes see {folder}?"
        raise EncodeError(f"a SLURM job failed; the logs are in {folder}; one ends with: {ends}")
    shutil.rmtree(folder, ignore_errors=True)
    return index


def _is_queued(array: str) -> bool:
    """Return whether SLURM still has jobs of an array; True if it does not answer."""
    command = ("squeue", "--noheader", f"--jobs={array}")
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    return bool(listed.stdout or (listed.returncode and "Invalid job id" not in listed.stderr))
