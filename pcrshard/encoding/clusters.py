"""Dask and SLURM clusters; the only module that imports ``distributed`` and ``submitit``."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Executor
from typing import Any

from ..errors import EncodeError, MissingDependency
from ..format.dataset_index import DatasetIndex
from .encode_dataset import EncodeOptions, commit, encode
from .encode_run import Part, new_run
from .resume_journal import read_script, scratch_of
from .samples import StorageOptions
from .shard_plan import plan


@contextlib.contextmanager
def dask_executor(scheduler: str, *, timeout: float = 30) -> Iterator[Executor]:
    """Connect to a Dask cluster; yields an executor for :func:`encode`.

    Args:
        scheduler: Address of the scheduler, or the path to its JSON file.
        timeout: Seconds to wait for the scheduler, and then for a worker.

    Raises:
        EncodeError: No scheduler or worker answered in time, or the cluster was lost.
        MissingDependency: Dask is not installed.
    """
    try:
        from distributed import Client, KilledWorker
    except ImportError as error:
        raise MissingDependency("Dask is missing: pip install 'pcrshard[dask]'") from error
    where = "scheduler_file" if scheduler.endswith(".json") else "address"
    how: Any = {where: scheduler, "timeout": timeout, "set_as_default": False}
    try:
        client: Any = Client(**how)  # type: ignore[no-untyped-call]  # Dask does not annotate it
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
    progress: Callable[[int, int], object] = lambda *_: None,
    poll: float = 5,
    **storage_options: StorageOptions,
) -> DatasetIndex:
    """Encode a dataset as an array of SLURM jobs, each of which encodes one part of the shards.

    All nodes must see ``dst`` and the current folder, where a subfolder holds job files and logs
    until the run succeeds. The other arguments are those of :func:`encode`.

    Args:
        src: The sources.
        dst: The folder of the shards.
        options: How to encode.
        jobs: Number of jobs, each with as many workers as CPUs.
        sbatch: Options of ``sbatch`` by their long names; the value of a flag is empty.
        resume: Whether to continue an earlier run.
        progress: Called with the number of finished samples and the total, see :func:`encode`.
        poll: Seconds between polls of the journal and the queue.
        storage_options: ``src_options`` and ``dst_options``.

    Returns:
        The dataset index.

    Raises:
        EncodeError: SLURM rejected the jobs, or one failed; the message has the end of its log.
        StorageError: The sources cannot be listed, or the journal cannot be read.
        MissingDependency: submitit is not installed.
    """
    try:
        from submitit.helpers import Checkpointable
        from submitit.slurm.slurm import SlurmExecutor
    except ImportError as error:
        raise MissingDependency("submitit is missing: pip install 'pcrshard[slurm]'") from error
    how: Any = storage_options

    class EncodePart(Checkpointable):
        """A job that requeues itself at its time limit; the journal holds its state."""

        def __call__(self, part: Part) -> None:
            # submitit ignores SIGTERM, which would delay scancel.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            cpus = int(os.environ.get("SLURM_CPUS_PER_TASK", "1"))
            encode(src, dst, options, part=part, resume=True, workers=cpus, **how)

    dst_options = storage_options.get("dst_options")
    known = read_script(dst, options=dst_options) if resume else None
    src_options = storage_options.get("src_options")
    planned = plan(
        src, options, src_options, scratch=scratch_of(dst), known=known, progress=progress
    )
    run = new_run(dst, planned, dst_options=dst_options)
    if not resume:
        with run.open(range(len(planned.shards)), resume=resume):
            pass  # refuse a folder that is in use now, not after jobs have waited in the queue
    parameters: dict[str, Any] = {"job_name": "pcrshard-encode", "time": 60, "requeue": True}
    parameters |= {name.replace("-", "_"): value or True for name, value in (sbatch or {}).items()}
    folder = os.path.abspath(f"pcrshard-slurm-{run.token}")
    try:
        executor: Any = SlurmExecutor(folder, max_num_timeout=100)
        executor.update_parameters(additional_parameters=parameters)
        parts = [(number, jobs) for number in range(jobs)]
        queued = executor.map_array(EncodePart(), parts)  # type: ignore[no-untyped-call]  # untyped
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise EncodeError(f"cannot submit SLURM jobs: {error}") from error
    try:
        while _is_queued(queued[0].job_id.partition("_")[0]):
            done = sum(len(planned.shards[number]) for number in run.journal.finished())
            progress(done, sum(map(len, planned.shards)))
            time.sleep(poll)
    except BaseException:
        for job in queued:
            job.cancel()
        raise
    if (index := commit(run, planned)) is None:
        log = max((job.stderr() or "" for job in queued), key=lambda log: "Traceback" in log)
        ends = log[-1000:].strip() or f"it left no log: do all nodes see {folder}?"
        raise EncodeError(f"a SLURM job failed; the logs are in {folder}; one ends with: {ends}")
    shutil.rmtree(folder, ignore_errors=True)
    return index


def _is_queued(array: str) -> bool:
    """Return whether SLURM still has jobs of an array; True if it does not answer."""
    command = ("squeue", "--noheader", f"--jobs={array}")
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    return bool(listed.stdout or (listed.returncode and "Invalid job id" not in listed.stderr))
