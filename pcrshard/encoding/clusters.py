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
from collections.abc import Callable, Container, Iterator, Mapping
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
    """Connect to a running Dask cluster, whose workers run the tasks of lost workers again.

    Args:
        scheduler: Address of the scheduler, or path to its JSON scheduler file.
        timeout: Seconds until the scheduler, and then its first worker, must have answered.

    Raises:
        EncodeError: The cluster cannot be reached, or is lost.
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
        except TimeoutError as error:
            raise EncodeError(
                f"the Dask scheduler {scheduler} has no workers: "
                f"start `dask worker {scheduler} --nthreads 1`"
            ) from error
        except KilledWorker as error:
            raise EncodeError(f"a shard's task killed several Dask workers: {error}") from error
        except CancelledError as error:
            raise EncodeError(
                f"lost the Dask scheduler {scheduler}; run again with --resume"
            ) from error


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
    """Encode a dataset by an array of SLURM jobs, each of which encodes one part of the shards.

    SLURM requeues jobs of lost nodes, and jobs that reach their time limit requeue themselves; both
    keep the shards that are whole. Job files and logs are in a folder below the current one, which
    all nodes must see; it is removed if all went well.

    Args:
        src: The source, as for :func:`encode`.
        dst: Folder for the shards, which all nodes must see.
        options: As for :func:`encode`.
        jobs: Number of jobs; each runs as many worker processes as it has CPUs.
        sbatch: Options for ``sbatch`` by their long names (``partition``, ``account``, ``time`` in
            minutes, ``cpus_per_task``...).
        resume: Whether to resume an earlier run.
        progress: Called with (samples done, samples in all) when the jobs have saved progress.
        src_options: fsspec storage options of the source; in the job files, for their owner alone.
        dst_options: fsspec storage options of the destination.
        poll: Seconds between two looks at the journals and the queue.

    Raises:
        EncodeError: SLURM refuses the jobs, or one failed; the message has the end of its log.
        MissingDependency: ``submitit`` is not installed.
    """
    if jobs < 1:
        raise EncodeError(f"expected at least one job, got {jobs}")
    try:
        from submitit.slurm.slurm import SlurmExecutor
    except ImportError as error:
        message = "--engine slurm needs submitit: pip install 'pcrshard[slurm]'"
        raise MissingDependency(message) from error
    planned = plan(src, options, src_options)
    if not resume:
        with Journal(dst, planned, dst_options).open(resume=False):
            pass  # refuses a folder that holds something before jobs wait for it in the queue
    journal = Journal(dst, planned, dst_options, (0, jobs))
    folder = os.path.abspath(tempfile.mkdtemp(prefix="pcrshard-slurm-", dir="."))
    try:
        executor = SlurmExecutor(folder, max_num_timeout=100)
        executor.update_parameters(**_parameters(executor._valid_parameters(), sbatch or {}))
        parts = [(number, jobs) for number in range(jobs)]
        call = functools.partial(
            encode, src, dst, options, resume=True, src_options=src_options, dst_options=dst_options
        )
        submitted = executor.map_array(_PartEncoder(call), parts)
    except Exception as error:
        shutil.rmtree(folder)
        raise EncodeError(f"cannot submit SLURM jobs: {error}") from error
    array = submitted[0].job_id.partition("_")[0]
    total = sum(map(len, planned.shards))
    try:
        while _is_queued(array):
            if progress is not None:
                progress(sum(len(planned.shards[n]) for n in journal.written()), total)
            time.sleep(poll)
    except BaseException:
        _run("scancel", "--quiet", array)
        raise
    index = commit(journal)
    if index is None:
        logs = [job.stderr() or "" for job in submitted]
        log = max(logs, key=lambda log: ("Traceback" in log, len(log)))
        ends = log[-1000:].strip() or f"it left no log: do all nodes see {folder}?"
        raise EncodeError(f"a SLURM job failed; the logs are in {folder}; one ends with: {ends}")
    shutil.rmtree(folder, ignore_errors=True)
    return index


def _parameters(known: Container[str], sbatch: Mapping[str, str]) -> dict[str, Any]:
    """The options of ``sbatch`` as submitit takes them."""
    parameters: dict[str, Any] = {"job_name": "pcrshard-encode", "time": 60}
    others: dict[str, Any] = {"requeue": True}
    for name, text in sbatch.items():
        key = name.replace("-", "_")
        if key in ("ntasks", "ntasks_per_node", "tasks_per_node"):
            raise EncodeError(f"expected cpus_per_task, the worker processes of a job, got {name}")
        value = int(text) if text.isdecimal() else text
        if key in known:
            parameters[key] = value
        else:
            others[key] = True if value == "" else value
    return parameters | {"additional_parameters": others}


def _is_queued(array: str) -> bool:
    """Whether SLURM still has jobs of an array; also if it does not answer."""
    listed = _run("squeue", "--noheader", f"--jobs={array}")
    if listed.returncode:
        return "Invalid job id" not in listed.stderr
    return bool(listed.stdout.strip())


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    # SLURM's own commands, by our own names.
    return subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603


class _PartEncoder:
    """Encodes one part in a SLURM job."""

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __call__(self, part: Part) -> None:
        # submitit ignores it, so that scancel would have to wait.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        cpus = int(os.environ.get("SLURM_CPUS_PER_TASK", "1"))
        self._call(part=part, workers=cpus)

    def checkpoint(self, part: Part) -> Any:
        """Let submitit requeue the job near its time limit; the journal has the rest."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, part)
