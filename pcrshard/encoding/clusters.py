"""Where shard tasks run: worker processes here, a Dask cluster, SLURM jobs. The one door to ``distributed`` and ``submitit``."""

from __future__ import annotations

import concurrent.futures
import contextlib
import glob
import itertools
import logging
import os
import pickle
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from ..errors import EncodeError, MissingDependency

R = TypeVar("R")
ENGINES = ("local", "dask", "slurm")
_log = logging.getLogger("pcrshard")
_SECONDS_TO_CONNECT = 30
_SECONDS_PER_LOOK = 0.5
_SECONDS_PER_SQUEUE = 5.0
_MAX_LOSSES = 3


@contextlib.contextmanager
def open_engine(
    name: str,
    *,
    workers: int | None = None,
    scheduler: str | None = None,
    slurm: Mapping[str, str] | None = None,
) -> Iterator[concurrent.futures.Executor | None]:
    """An executor for :func:`pcrshard.encode`; ``None`` stands for worker processes of this machine.

    Args:
        name: One of ``ENGINES``.
        workers: SLURM jobs at a time, 8 by default. Worker processes are ``encode``'s own, and those of a Dask cluster are the cluster's.
        scheduler: Address of the Dask scheduler, or its scheduler file (``.json``).
        slurm: ``sbatch`` options of the jobs by their long names (``partition``, ``account``, ``time``, ``tasks_per_node``...).

    Raises:
        EncodeError: An option does not fit the engine, or the cluster is lost.
        MissingDependency: The engine's package is not installed.
    """
    if name not in ENGINES:
        raise EncodeError(f"expected an engine of {', '.join(ENGINES)}, got {name!r}")
    for given, option, engine in (
        (scheduler, "--scheduler", "dask"),
        (slurm, "--slurm-option", "slurm"),
    ):
        if given and name != engine:
            raise EncodeError(f"{option} needs --engine {engine}, got --engine {name}")
    if name == "local":
        yield None
    elif name == "dask":
        if workers is not None:
            raise EncodeError(
                "--workers is for the engines local and slurm; a Dask cluster brings its own"
            )
        with _dask(scheduler) as executor:
            yield executor
    else:
        with SlurmPool(8 if workers is None else workers, slurm or {}) as pool:
            yield pool


@contextlib.contextmanager
def _dask(scheduler: str | None) -> Iterator[concurrent.futures.Executor]:
    try:
        import distributed
    except ImportError as error:
        raise MissingDependency(
            "--engine dask needs distributed: pip install 'pcrshard[dask]'"
        ) from error
    if not scheduler:
        raise EncodeError(
            "--engine dask needs --scheduler: start `dask scheduler` here and `dask worker ADDRESS --nthreads 1` on each node, then give ADDRESS"
        )
    where = {"scheduler_file": scheduler} if scheduler.endswith(".json") else {"address": scheduler}
    try:
        client_type: Any = distributed.Client
        client = client_type(**where, timeout=_SECONDS_TO_CONNECT, set_as_default=False)
    except (OSError, ValueError) as error:
        raise EncodeError(f"cannot reach the Dask scheduler {scheduler}: {error}") from error
    with client:
        try:
            client.wait_for_workers(1, timeout=_SECONDS_TO_CONNECT)
        except TimeoutError as error:
            raise EncodeError(
                f"the Dask scheduler {scheduler} has no workers: start `dask worker {scheduler} --nthreads 1`"
            ) from error
        try:
            # Dask runs the tasks of lost workers again by itself; `retries` would do so with bad images too.
            yield client.get_executor(pure=False)
        except distributed.KilledWorker as error:
            raise EncodeError(f"a shard's task killed several Dask workers: {error}") from error
        except ModuleNotFoundError as error:
            raise EncodeError(
                f"a Dask worker cannot import {error.name}: install the same pcrshard on all nodes"
            ) from error
        except RuntimeError as error:
            if "deserialization" not in str(error):
                raise
            raise EncodeError(
                "the Dask scheduler cannot read our tasks: install the same pcrshard and dask on all nodes"
            ) from error
        except concurrent.futures.CancelledError as error:
            raise EncodeError(
                f"lost the Dask scheduler {scheduler}; run again with --resume"
            ) from error


class SlurmPool(concurrent.futures.Executor):
    """An executor whose workers are SLURM jobs (submitit arrays) that take tasks out of a shared folder.

    A task is a file in ``todo/``; a worker takes it by renaming it into ``taken/``, and leaves the result in ``done/``. So a thousand tasks need as many
    jobs as there are workers, a slow node holds up only its own task, and what a lost job had taken (node failure, time limit, preemption) is put
    back, three times at most. The state of jobs comes from ``squeue``: it needs no accounting database.

    Args:
        jobs: Jobs at a time.
        options: For ``sbatch``.
        folder: For tasks and logs, on a disk that all nodes see; by default a new one in the current folder. It is removed if all went well.
        seconds: Between two looks at the folder, and at the queue.
    """

    def __init__(
        self,
        jobs: int,
        options: Mapping[str, str],
        folder: str | None = None,
        seconds: tuple[float, float] = (_SECONDS_PER_LOOK, _SECONDS_PER_SQUEUE),
    ) -> None:
        if jobs < 1:
            raise EncodeError(f"expected at least one worker, got {jobs}")
        slurm = _submitit()
        self._jobs, self._seconds = jobs, seconds
        self.folder = os.path.abspath(folder or tempfile.mkdtemp(prefix="pcrshard-slurm-", dir="."))
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        _check_private(self.folder)
        for name in ("todo", "taken", "done", "new"):
            os.makedirs(os.path.join(self.folder, name), mode=0o700, exist_ok=True)
        self._submitter = _submitter(slurm, os.path.join(self.folder, "jobs"), options)
        self._futures: dict[str, concurrent.futures.Future[Any]] = {}
        self._losses: dict[str, int] = {}
        self._submitted: dict[str, Any] = {}  # jobs by their names in the queue
        self._suspects: set[str] = set()
        self._fruitless = 0
        self._numbers = itertools.count()
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._watch, name="pcrshard-slurm", daemon=True)
        self._thread.start()

    def submit(
        self, fn: Callable[..., R], /, *args: Any, **kwargs: Any
    ) -> concurrent.futures.Future[R]:
        """Put a task into the folder."""
        if self._stop.is_set():
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: concurrent.futures.Future[R] = concurrent.futures.Future()
        name = f"{next(self._numbers):08d}"
        with self._lock:
            self._futures[name] = future
        _write(self.folder, "todo", name, (fn, args, kwargs))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel what has not begun if asked, wait for the rest if asked, and end the jobs."""
        if wait and not cancel_futures:
            with self._lock:
                waiting = list(self._futures.values())
            concurrent.futures.wait(waiting)
        self._stop.set()
        self._thread.join()
        if cancel_futures:
            self._cancel()
        if self._submitted:
            _command(
                "scancel", "--quiet", *sorted({name.partition("_")[0] for name in self._submitted})
            )
        if not self._failed:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _cancel(self) -> None:
        with self._lock:
            for future in self._futures.values():
                future.cancel()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._failed = self._failed or (
            kind is not None and not issubclass(kind, KeyboardInterrupt)
        )
        self.shutdown(cancel_futures=kind is not None)
        if self._failed:
            _log.warning("the SLURM jobs' logs are in %s", os.path.join(self.folder, "jobs"))

    def _watch(self) -> None:
        """Collect results, put back lost tasks and keep enough jobs in the queue, until the end."""
        asked = -self._seconds[1]
        seen = 0
        try:
            while not self._stop.wait(self._seconds[0]):
                self._collect()
                with self._lock:
                    count = len(self._futures)
                # While tasks still come in, wait: one array for all is better than several.
                settled, seen = count == seen, count
                if count and settled and time.monotonic() - asked >= self._seconds[1]:
                    asked = time.monotonic()
                    if (alive := _queue()) is not None:
                        self._put_back(alive)
                        self._add_jobs(
                            count - len(alive & self._submitted.keys()),
                            len(alive & self._submitted.keys()),
                        )
        except Exception as error:
            self._failed = True
            self._fail(error)

    def _collect(self) -> None:
        for name in os.listdir(os.path.join(self.folder, "done")):
            with self._lock:
                future = self._futures.pop(name, None)
            path = os.path.join(self.folder, "done", name)
            if future is None or not future.set_running_or_notify_cancel():
                os.unlink(path)
                continue
            self._fruitless = 0
            try:
                with open(path, "rb") as file:
                    good, value = pickle.load(file)  # noqa: S301  # by our own jobs, in a folder that nobody else may write
            except Exception as error:
                good, value = (
                    False,
                    EncodeError(
                        f"cannot read the result of a SLURM job: {type(error).__name__}: {error}",
                        url=path,
                    ),
                )
            os.unlink(path)
            if good:
                future.set_result(value)
            else:
                future.set_exception(value)

    def _put_back(self, alive: set[str]) -> None:
        """Make tasks free again whose job is gone since the last look: the file system may show its last result late."""
        taken = {
            name
            for name in os.listdir(os.path.join(self.folder, "taken"))
            if name.partition("@")[2].rpartition(".")[0] not in alive
        }
        for entry in taken & self._suspects:
            name, _, job = entry.partition("@")
            path = os.path.join(self.folder, "taken", entry)
            future = self._futures.get(name)
            if future is None:
                os.unlink(path)
                continue
            self._losses[name] = self._losses.get(name, 0) + 1
            if self._losses[name] > _MAX_LOSSES:
                os.unlink(path)
                future.set_exception(
                    EncodeError(
                        f"a task was lost with its SLURM job {_MAX_LOSSES + 1} times; {self._last_words()}"
                    )
                )
                with self._lock:
                    self._futures.pop(name, None)
                continue
            _log.warning("SLURM job %s is gone; its task runs again", job)
            os.rename(path, os.path.join(self.folder, "todo", name))
        self._suspects = taken

    def _add_jobs(self, tasks: int, alive: int) -> None:
        """Fill the queue up, to at most one job for a task; give up if jobs end without doing anything."""
        number = min(self._jobs - alive, tasks)
        if number < 1 or not os.listdir(os.path.join(self.folder, "todo")):
            return
        if not alive:
            self._fruitless += 1
            if self._fruitless > _MAX_LOSSES:
                raise EncodeError(
                    f"SLURM jobs ended {_MAX_LOSSES} times without finishing a task; {self._last_words()}"
                )
        try:
            jobs = self._submitter.map_array(work, [self.folder] * number)
        except Exception as error:
            raise EncodeError(f"cannot submit SLURM jobs: {error}") from error
        self._submitted |= {job.job_id: job for job in jobs}

    def _last_words(self) -> str:
        """The end of the newest log that says something."""
        logs = glob.glob(os.path.join(glob.escape(self.folder), "jobs", "*_log.err"))
        logs = sorted((log for log in logs if os.path.getsize(log)), key=os.path.getmtime)
        if not logs:
            return f"they left no log in {self.folder}/jobs: is that folder on a disk that all nodes see?"
        with open(logs[-1], errors="replace") as file:
            return f"{logs[-1]} ends with: {file.read()[-1000:].strip()}"

    def _fail(self, error: Exception) -> None:
        with self._lock:
            futures, self._futures = list(self._futures.values()), {}
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)


def _submitit() -> Any:
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


def _submitter(slurm: Any, folder: str, options: Mapping[str, str]) -> Any:
    """The executor of submitit; what it has no word for goes to ``sbatch`` as it is."""
    known = slurm.SlurmExecutor._valid_parameters()
    given = {key.replace("-", "_"): value for key, value in options.items()}
    if "tasks_per_node" in given:
        given["ntasks_per_node"] = given.pop("tasks_per_node")
    typed = {key: int(value) if value.isdecimal() else value for key, value in given.items()}
    own = {key: typed.pop(key) for key in list(typed) if key not in known}
    # Lost jobs are replaced here; were they requeued as well, a task that ends its node would run for ever.
    own = {key: True if value == "" else value for key, value in own.items()} | {"no-requeue": True}
    executor = slurm.SlurmExecutor(folder)
    # submitit's own limit is five minutes; a job that meets its limit is replaced, so that any will do.
    executor.update_parameters(
        **{"job_name": "pcrshard-encode", "time": 60} | typed, additional_parameters=own
    )
    return executor


def _queue() -> set[str] | None:
    """One's jobs that wait or run, as JOB or ARRAY_INDEX and also by what SLURM_JOB_ID is in them; ``None`` if SLURM does not answer."""
    result = _command("squeue", "--me", "--noheader", "--array", "--format=%i %A")
    if result.returncode:
        _log.warning("squeue: %s", result.stderr.strip())
        return None
    return set(result.stdout.split())


def _command(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # SLURM's own, by our own names


def _check_private(folder: str) -> None:
    """Tasks and results are pickles, which execute: who can write to the folder can run anything as its owner."""
    found = os.stat(folder)
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise EncodeError(
            f"expected a folder that is yours and that nobody else may write to: chmod go-w {folder}"
        )


def _write(folder: str, kind: str, name: str, value: Any) -> None:
    """A file that appears whole."""
    path = os.path.join(folder, "new", f"{name}.{os.getpid()}.{threading.get_ident()}")
    with open(path, "wb") as file:
        pickle.dump(value, file)
    os.replace(path, os.path.join(folder, kind, name))


def work(folder: str) -> int:
    """A SLURM job's work: do tasks until there are none; returns how many.

    The signal that announces the time limit lets it finish its task, if there is time, and take no other.
    """
    _check_private(folder)
    me = f"{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_PROCID', '0')}"
    stop = threading.Event()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: stop.set())
    signal.signal(
        signal.SIGTERM, signal.SIG_DFL
    )  # submitit ignores it, and scancel would have to wait
    done = 0
    while not stop.is_set() and (names := os.listdir(os.path.join(folder, "todo"))):
        random.shuffle(names)
        for name in names:
            if not stop.is_set():
                done += _do(folder, name, me)
    return done


def _do(folder: str, name: str, me: str) -> int:
    """Take a task and do it, if no other worker was quicker."""
    taken = os.path.join(folder, "taken", f"{name}@{me}")
    try:
        os.rename(os.path.join(folder, "todo", name), taken)
    except FileNotFoundError:
        return 0
    try:
        with open(taken, "rb") as file:
            function, args, kwargs = pickle.load(file)  # noqa: S301  # by who submitted this job; work has checked the folder
        result = (True, function(*args, **kwargs))
    except Exception as error:
        _log.exception("task %s", name)
        result = (False, _portable(error))
    _write(folder, "done", name, result)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(taken)
    return 1


def _portable(error: Exception) -> Exception:
    """The error, if it can travel; its text otherwise."""
    try:
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301  # our own bytes
    except Exception:
        return EncodeError(f"{type(error).__name__}: {error}")
    return error if type(copy) is type(error) else EncodeError(f"{type(error).__name__}: {error}")
