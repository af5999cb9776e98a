"""Clusters that encode shards: Dask workers, or an array of SLURM jobs.

The only module that imports ``distributed`` and ``submitit``.
"""

from __future__ import annotations

import contextlib
import functools
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
    """Connect to a running Dask cluster, which reruns the tasks of lost workers.

    Args:
        scheduler: Address of the scheduler, or path to its JSON scheduler file.
        timeout: Seconds to wait for the scheduler, and then for its first worker.

    Raises:
        EncodeError: The cluster cannot be reached or has no workers, or the connection is lost.
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
            # `retries` would also repeat tasks that fail because of a bad image.
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
    src_options: StorageOptions = None,
    dst_options: StorageOptions = None,
    poll: float = 5,
) -> DatasetIndex:
    """Encode a dataset with an array of SLURM jobs, each of which encodes one part of the shards.

    SLURM requeues the jobs of lost nodes, and jobs that reach their time limit requeue themselves;
    both keep complete shards. Job files, which include the storage options, and logs go to a
    subfolder of the current folder, which all nodes must see; only its owner can read it, and it is
    removed on success.

    Args:
        src: The source, as for :func:`encode`.
        dst: Folder for the shards, visible to all nodes.
        options: How the dataset is split, ordered and encoded.
        jobs: Number of jobs; each runs as many worker processes as it has CPUs.
        sbatch: Options for ``sbatch`` by their long names (``partition``, ``account``, ``time`` in
            minutes, ``cpus_per_task``...).
        resume: Whether to resume an earlier run.
        progress: Called with (samples done, total samples) as the jobs save their journals.
        src_options: fsspec storage options of the source.
        dst_options: fsspec storage options of the destination.
        poll: Interval in seconds for polling the journals and the queue.

    Raises:
        EncodeError: SLURM rejects the jobs, or a job failed; the message includes the end of its
            log.
        MissingDependency: ``submitit`` is not installed.
    """
    try:
        from submitit.slurm.slurm import SlurmExecutor
    except ImportError as error:
        message = "--engine slurm needs submitit: pip install 'pcrshard[slurm]'"
        raise MissingDependency(message) from error
    planned = plan(src, options, src_options)
    if not resume:
        with Journal(dst, planned, dst_options).open(resume=False):
            pass  # refuse a folder that is in use now, not after jobs have waited in the queue
    journal = Journal(dst, planned, dst_options, (0, jobs))
    how = {"resume": True, "src_options": src_options, "dst_options": dst_options}
    encode_part = _PartEncoder(functools.partial(encode, src, dst, options, **how))
    parameters: dict[str, Any] = {"job_name": "pcrshard-encode", "time": 60, "requeue": True}
    for name, value in (sbatch or {}).items():
        parameters[name.replace("-", "_")] = value or True
    folder = os.path.abspath(tempfile.mkdtemp(prefix="pcrshard-slurm-", dir="."))
    try:
        executor = SlurmExecutor(folder, max_num_timeout=100)
        executor.update_parameters(additional_parameters=parameters)
        submitted = executor.map_array(encode_part, [(number, jobs) for number in range(jobs)])
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


class _PartEncoder:
    """A callable that encodes one part in a SLURM job."""

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __call__(self, part: Part) -> None:
        # submitit ignores SIGTERM, which would delay scancel.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._call(part=part, workers=int(os.environ.get("SLURM_CPUS_PER_TASK", "1")))

    def checkpoint(self, part: Part) -> Any:
        """Return the submission that requeues this job; the journal holds all other state."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, part)
