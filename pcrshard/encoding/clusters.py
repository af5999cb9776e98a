"""Where shard tasks run: worker processes of this machine, a Dask cluster, or SLURM jobs.

The only module that imports ``distributed`` and ``submitit``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future
from concurrent.futures import wait as wait_for
from typing import Any, TypeVar

from ..errors import EncodeError, MissingDependency
from ..redaction import get_logger

R = TypeVar("R")
Call = functools.partial[Any]
ENGINES = ("local", "dask", "slurm")
_log = get_logger("pcrshard")
_MAX_LOSSES = 3
# To start a job costs 3 s even on an idle cluster, to lose one costs what it had done.
_JOBS_PER_WORKER = 4


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long to wait for a cluster, in seconds.

    Attributes:
        connect: Until a Dask scheduler, and then its first worker, must have answered.
        results: Between two looks for results of SLURM jobs.
        queue: Between two calls of ``squeue``.
    """

    connect: float = 30
    results: float = 0.5
    queue: float = 5.0


def open_engine(
    name: str,
    *,
    workers: int | None = None,
    scheduler: str | None = None,
    slurm: Mapping[str, str] | None = None,
    patience: Patience = Patience(),
) -> contextlib.AbstractContextManager[Executor | None]:
    """Open an executor for :func:`pcrshard.encode`, for a ``with`` statement.

    Args:
        name: One of ``ENGINES``.
        workers: SLURM jobs at a time, 8 by default. Worker processes are started by ``encode``
            itself, and a Dask cluster has its own workers.
        scheduler: Address of the Dask scheduler, or its scheduler file (``.json``).
        slurm: ``sbatch`` options of the jobs by their long names (``partition``, ``account``,
            ``time``, ``tasks_per_node``...).
        patience: How long to wait for the cluster.

    Returns:
        The executor, or ``None`` for worker processes of this machine.

    Raises:
        EncodeError: An option does not fit the engine, or the cluster is lost.
        MissingDependency: The engine's package is not installed.
    """
    if name not in ENGINES:
        raise EncodeError(f"expected an engine of {', '.join(ENGINES)}, got {name!r}")
    if scheduler and name != "dask":
        raise EncodeError(f"--scheduler needs --engine dask, got --engine {name}")
    if slurm and name != "slurm":
        raise EncodeError(f"--slurm-option needs --engine slurm, got --engine {name}")
    if workers is not None and name == "dask":
        raise EncodeError(
            "--workers is for the engines local and slurm; a Dask cluster brings its own"
        )

    if name == "local":
        return contextlib.nullcontext()
    if name == "dask":
        return _open_dask(scheduler, patience)
    return SlurmPool(8 if workers is None else workers, slurm or {}, patience)


@contextlib.contextmanager
def _open_dask(scheduler: str | None, patience: Patience) -> Iterator[Executor]:
    try:
        import distributed
    except ImportError as error:
        raise MissingDependency(
            "--engine dask needs distributed: pip install 'pcrshard[dask]'"
        ) from error
    if not scheduler:
        raise EncodeError(
            "--engine dask needs --scheduler: start `dask scheduler` here and "
            "`dask worker ADDRESS --nthreads 1` on each node, then give ADDRESS"
        )
    where = "scheduler_file" if scheduler.endswith(".json") else "address"
    options: Any = {where: scheduler, "timeout": patience.connect}
    try:
        client_type: Any = distributed.Client
        client = client_type(**options, set_as_default=False)
    except (OSError, ValueError) as error:
        raise EncodeError(f"cannot reach the Dask scheduler {scheduler}: {error}") from error

    with client:
        try:
            client.wait_for_workers(1, timeout=patience.connect)
        except TimeoutError as error:
            raise EncodeError(
                f"the Dask scheduler {scheduler} has no workers: "
                f"start `dask worker {scheduler} --nthreads 1`"
            ) from error
        with _named_dask_errors(scheduler, distributed.KilledWorker):
            # Dask runs the tasks of lost workers again by itself; `retries` would run those of bad
            # images again as well.
            yield client.get_executor(pure=False)


@contextlib.contextmanager
def _named_dask_errors(scheduler: str, killed: type[Exception]) -> Iterator[None]:
    """Say what Dask's own errors mean for whoever encodes."""
    try:
        yield
    except killed as error:
        raise EncodeError(f"a shard's task killed several Dask workers: {error}") from error
    except CancelledError as error:
        raise EncodeError(
            f"lost the Dask scheduler {scheduler}; run again with --resume"
        ) from error


@dataclasses.dataclass
class _Task:
    """A call, who waits for its result, and how often its job was lost."""

    call: Call
    future: Future[Any]
    losses: int = 0

    def end(self, good: bool, value: Any) -> None:
        """Hand the result or the error over, unless nobody waits for it any more."""
        if self.future.set_running_or_notify_cancel():
            settle = self.future.set_result if good else self.future.set_exception
            settle(value)


@dataclasses.dataclass
class _Share:
    """The tasks that one process of a SLURM job does; ``job`` is submitit's."""

    job: Any
    tasks: list[_Task]
    is_missing: bool = False


class SlurmPool(Executor):
    """An executor whose tasks run in SLURM jobs, which submitit starts.

    Each job does several tasks. When one is lost (node failure, time limit, preemption), its tasks
    run again in other jobs, three times at most. Whether a job is lost is asked of ``squeue``:
    submitit asks ``sacct``, which needs an accounting database.

    Args:
        jobs: Jobs at a time.
        options: Options for ``sbatch`` by their long names.
        patience: How often to look for results and at the queue.

    Attributes:
        folder: Pickled tasks, results and logs, for its owner alone. It is below the current
            folder, which all nodes must see, and is removed if all went well.
    """

    def __init__(
        self,
        jobs: int,
        options: Mapping[str, str],
        patience: Patience = Patience(),
    ) -> None:
        if jobs < 1:
            raise EncodeError(f"expected at least one worker, got {jobs}")
        slurm = _import_submitit()
        self._jobs = jobs
        self._patience = patience
        self.folder = os.path.abspath(tempfile.mkdtemp(prefix="pcrshard-slurm-", dir="."))
        self._submitit = slurm.SlurmExecutor(os.path.join(self.folder, "jobs"))
        self._processes = _set_parameters(self._submitit, options)

        self._most_tasks = 0
        self._waiting: list[_Task] = []
        self._shares: list[_Share] = []
        self._failed = False
        self._lock = threading.Lock()  # of the two lists
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pcrshard-slurm", daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Let a job do this, when the tasks that come with it are known."""
        if self._stop.is_set():
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[R] = Future()
        with self._lock:
            self._waiting.append(_Task(functools.partial(fn, *args, **kwargs), future))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for all tasks or cancel them, as asked, and end the jobs."""
        if wait and not cancel_futures:
            wait_for([task.future for task in self._tasks()])
        self._stop.set()
        self._thread.join()
        if cancel_futures:
            for task in self._tasks():
                task.future.cancel()
        if self._shares:
            _run("scancel", "--quiet", *{share.job.job_id for share in self._shares})
        if not self._failed:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None and not issubclass(kind, KeyboardInterrupt):
            self._failed = True
        self.shutdown(cancel_futures=kind is not None)
        if self._failed:
            _log.warning("the SLURM jobs' logs are in %s", os.path.join(self.folder, "jobs"))

    def _tasks(self) -> list[_Task]:
        with self._lock:
            running = [task for share in self._shares for task in share.tasks]
            return self._waiting + running

    def _watch(self) -> None:
        """Collect results, find lost jobs and start others, until the end."""
        next_query = 0.0
        seen = 0
        try:
            while not self._stop.wait(self._patience.results):
                self._collect()
                if self._shares and time.monotonic() >= next_query:
                    self._find_lost()
                    next_query = time.monotonic() + self._patience.queue
                # While tasks still come in, wait: few jobs for all are better than one for each.
                if len(self._waiting) == seen:
                    self._add_jobs()
                seen = len(self._waiting)
        except Exception as error:
            self._failed = True
            self._stop.set()
            for task in self._tasks():
                task.end(False, error)

    def _collect(self) -> None:
        for share in list(self._shares):
            if not share.job.paths.result_pickle.exists():
                continue
            try:
                results = share.job.result()
            except Exception as error:  # submitit's own, or one of a result we cannot unpickle
                self._put_back(share, f"{type(error).__name__}: {error}")
                continue
            for task, (good, value) in zip(share.tasks, results, strict=False):
                task.end(good, value)
            # A job whose time limit is near leaves the rest to others.
            self._move(share, share.tasks[len(results) :])

    def _find_lost(self) -> None:
        listed = _run("squeue", "--me", "--noheader", "--array", "--format=%i")
        if listed.returncode:
            _log.warning("squeue: %s", listed.stderr.strip())
            return
        alive = set(listed.stdout.split())
        for share in [share for share in self._shares if share.job.job_id not in alive]:
            # Only when it is missed twice: the file system may show its last result late.
            if share.is_missing:
                log = share.job.stderr() or f"it left no log: do all nodes see {self.folder}?"
                self._put_back(share, log)
            share.is_missing = True

    def _put_back(self, share: _Share, log: str) -> None:
        """Let the tasks of a lost job run again, unless they have been lost too often."""
        _log.warning("SLURM job %s is gone", share.job.job_id)
        for task in share.tasks:
            task.losses += 1
            if task.losses > _MAX_LOSSES:
                message = (
                    f"a task's SLURM job was lost, and those after it ended {_MAX_LOSSES} times "
                    f"without finishing it; the last one's log ends with: {log[-1000:].strip()}"
                )
                task.end(False, EncodeError(message))
        self._move(share, [task for task in share.tasks if task.losses <= _MAX_LOSSES])

    def _move(self, share: _Share, tasks: list[_Task]) -> None:
        """Forget a share, and let these of its tasks wait for another job."""
        with self._lock:
            self._shares.remove(share)
            self._waiting += tasks

    def _add_jobs(self) -> None:
        """Submit as many jobs as there may be, each with some of the tasks."""
        free = self._jobs - len({share.job.job_id for share in self._shares})
        bundles = self._bundles()[:free]
        if not bundles:
            return
        calls = [[task.call for task in bundle] for bundle in bundles]
        try:
            jobs = self._submitit.map_array(functools.partial(run_share, self._processes), calls)
        except Exception as error:
            raise EncodeError(f"cannot submit SLURM jobs: {error}") from error
        with self._lock:
            self._waiting = self._waiting[sum(map(len, bundles)) :]
            for job, bundle in zip(jobs, bundles, strict=True):
                for i in range(min(self._processes, len(bundle))):
                    self._shares.append(_Share(job.task(i), bundle[i :: self._processes]))

    def _bundles(self) -> list[list[_Task]]:
        """The tasks that wait, split into those of one job each."""
        tasks = self._waiting
        running = sum(len(share.tasks) for share in self._shares)
        self._most_tasks = max(self._most_tasks, running + len(tasks))
        size = math.ceil(self._most_tasks / (_JOBS_PER_WORKER * self._jobs * self._processes))
        per_job = size * self._processes
        return [tasks[start : start + per_job] for start in range(0, len(tasks), per_job or 1)]


def _import_submitit() -> Any:
    try:
        from submitit.slurm import slurm
    except ImportError as error:
        raise MissingDependency(
            "--engine slurm needs submitit: pip install 'pcrshard[slurm]'"
        ) from error
    if shutil.which("sbatch") is None:
        raise EncodeError(
            "--engine slurm needs sbatch, squeue and scancel: run it on a login node of the cluster"
        )
    return slurm


def _set_parameters(executor: Any, options: Mapping[str, str]) -> int:
    """Give submitit the options of ``sbatch``; returns the number of processes of a job."""
    # submitit's own limit is five minutes; a job that meets its limit is replaced, so any will do.
    parameters: dict[str, Any] = {"job_name": "pcrshard-encode", "time": 60}
    # Lost jobs are replaced here; requeued as well, a task that ends its node would never end.
    others: dict[str, Any] = {"no-requeue": True}
    known = executor._valid_parameters()
    for name, text in options.items():
        key = name.replace("-", "_")
        value = int(text) if text.isdecimal() else text
        if key == "tasks_per_node":
            parameters["ntasks_per_node"] = value
        elif key in known:
            parameters[key] = value
        else:
            others[key] = True if value == "" else value  # goes through as it is
    executor.update_parameters(**parameters, additional_parameters=others)
    return int(parameters.get("nodes", 1) * parameters.get("ntasks_per_node", 1))


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    # SLURM's own commands, by our own names.
    return subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603


def run_share(processes: int, calls: Sequence[Call]) -> list[tuple[bool, Any]]:
    """Do this process's share of the calls, as one of so many processes of a SLURM job.

    The signal that announces the time limit lets it finish its task and begin no other.

    Returns:
        For each task done (True, result) or (False, error).
    """
    stop = threading.Event()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: stop.set())
    # submitit ignores it, and scancel would have to wait.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    results = []
    for call in calls[int(os.environ["SLURM_PROCID"]) :: processes]:
        try:
            results.append((True, call()))
        except Exception as error:
            _log.exception("a task failed")
            results.append((False, error))
        if stop.is_set():
            break
    return results
