"""Tasks on worker processes, or on any executor."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import BaseContext
from typing import Any, TypeVar

from .. import storage
from ..errors import EncodeError
from ..redaction import get_logger

T = TypeVar("T")
R = TypeVar("R")
_MAX_DEATHS = 3
_log = get_logger("pcrshard")


@contextlib.contextmanager
def worker_pool(
    workers: int | None,
    num_tasks: int,
    given: Executor | None = None,
) -> Iterator[Executor | None]:
    """Open the executor that tasks run on.

    Args:
        workers: Number of worker processes; by default one for each core.
        num_tasks: Number of tasks; there are no more workers than that.
        given: Executor to use instead of worker processes.

    Yields:
        The executor, or ``None`` if the tasks are to run in this process.
    """
    if workers is not None and workers < 1:
        raise EncodeError(f"expected at least one worker, got {workers}")
    workers = min(workers or len(os.sched_getaffinity(0)), num_tasks)
    if given is not None or workers <= 1:
        yield given
        return
    pool = WorkerProcesses(workers, _fastest_context())
    try:
        yield pool
        pool.shutdown()
    except Exception:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    except BaseException:
        pool.stop()
        raise


def _fastest_context() -> BaseContext:
    # A forked worker starts at once, a spawned one imports everything again; but threads and torch
    # do not survive a fork.
    is_safe = threading.active_count() == 1 and "torch" not in sys.modules
    return multiprocessing.get_context("fork" if is_safe else "spawn")


class WorkerProcesses(Executor):
    """A process pool that can be renewed after a worker has died, which breaks Python's own.

    Args:
        workers: Number of worker processes.
        context: How they are started.
    """

    def __init__(self, workers: int, context: BaseContext) -> None:
        self._workers = workers
        self._context = context
        self._told, self._tell = context.Pipe(duplex=False)
        self._pool = self._open()

    def _open(self) -> ProcessPoolExecutor:
        told = (self._told,)
        return ProcessPoolExecutor(self._workers, self._context, _prepare_worker, told)

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Run ``fn`` in a worker."""
        # A new worker must not show a traceback for a Ctrl-C that comes before it is ready for one.
        with _ctrl_c_waits():
            return self._pool.submit(fn, *args, **kwargs)

    def renew(self) -> None:
        """Start other workers; what the old ones had is lost."""
        _log.warning("a worker process died; the tasks that were under way run again")
        self._pool.shutdown()
        self._pool = self._open()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers."""
        self._pool.shutdown(wait, cancel_futures=cancel_futures)

    def stop(self) -> None:
        """End the workers at once, whatever they do; what they have begun to write is removed."""
        # No worker takes it out of the pipe, so that all see it.
        self._tell.send_bytes(b"stop")
        self._pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Keep a Ctrl-C until the end of the block; processes that start inside keep it on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare_worker(told: Connection) -> None:
    """End this worker when its parent is killed, or says so.

    A Ctrl-C, which comes to all processes of a terminal, is the parent's matter. As an exception it
    could come anywhere: in a destructor, which shows it, or beside a lock that is then never free.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_when_told, args=(told,), daemon=True).start()


def _end_when_told(told: Connection) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a worker"
    wait_for_any([parent.sentinel, told])
    storage.abandon_writes()
    os._exit(1)


def run_tasks(
    pool: Executor | None,
    function: Callable[[T], R],
    tasks: dict[int, T],
    *,
    in_flight: int | None = None,
) -> Iterator[tuple[int, R]]:
    """Run tasks and yield (number, result) as they end; the first error is raised.

    When a worker process dies (out of memory, say), its tasks run again, three times at most.

    Args:
        pool: Executor to run them on, or ``None`` to run them here.
        function: Called with each task.
        tasks: The tasks by number; they start in this order.
        in_flight: Tasks submitted at a time, by default four for each core, so that a million of
            them do not wait in memory twice.

    Raises:
        EncodeError: Workers died too often.
    """
    if pool is None:
        for number, task in tasks.items():
            yield number, function(task)
        return
    limit = in_flight or 4 * len(os.sched_getaffinity(0))
    left = dict(tasks)
    deaths = 0
    while left:
        try:
            for number, result in _run_on(pool, function, list(left.items()), limit):
                del left[number]
                yield number, result
        except BrokenExecutor as error:
            deaths += 1
            if not isinstance(pool, WorkerProcesses) or deaths > _MAX_DEATHS:
                message = f"a worker process died ({error}); run again with --resume"
                raise EncodeError(message) from error
            pool.renew()


def _run_on(
    pool: Executor,
    function: Callable[[T], R],
    tasks: list[tuple[int, T]],
    limit: int,
) -> Iterator[tuple[int, R]]:
    """Run tasks on an executor, at most ``limit`` at a time, until they are done or it breaks."""
    waiting = iter(tasks)
    running: dict[Future[R], int] = {}
    try:
        while True:
            for number, task in itertools.islice(waiting, limit - len(running)):
                running[pool.submit(function, task)] = number
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                result = future.result()
                yield running.pop(future), result
    finally:
        # Our own pool does it itself when it is shut down; Python 3.11 shows a traceback where a
        # cancelled task is still in a pool whose workers have ended.
        for future in [] if isinstance(pool, WorkerProcesses) else running:
            future.cancel()
