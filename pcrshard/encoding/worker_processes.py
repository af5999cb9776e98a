"""Execution of tasks on worker processes or on any executor."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from typing import TypeVar

from .. import storage
from ..cpus import usable_cpus
from ..errors import EncodeError

T = TypeVar("T")
R = TypeVar("R")
# Maximum tasks in flight on an executor: enough for a cluster, few enough for memory.
_IN_FLIGHT = 1024


def run_tasks(
    function: Callable[[T], R],
    task: Callable[[int], T],
    numbers: Sequence[int],
    *,
    workers: int | None = None,
    executor: Executor | None = None,
    on_stop: Callable[[], object] = lambda: None,
) -> Generator[tuple[int, R], None, None]:
    """Run tasks and yield (number, result) as they complete; raise the first error.

    Once the iterator has raised or was closed (``contextlib.closing``), no task is running: worker
    processes are killed at once, and an executor's tasks are awaited unless it canceled one.

    Args:
        function: Called with each task.
        task: Makes the task of a number, when it is about to start.
        numbers: The numbers of the tasks; they start in this order.
        workers: Number of worker processes, by default :func:`usable_cpus`. One worker is this
            process.
        executor: Executor to run the tasks on instead; it is left open.
        on_stop: Called after an error, before the executor's tasks are awaited, to make tasks that
            have not started return at once. Tasks are not canceled, because some executors (Dask's)
            then lose track of running tasks.

    Raises:
        EncodeError: A worker process died.
    """
    if workers is not None and workers < 1:
        raise EncodeError(f"expected at least one worker, got {workers}")
    workers = min(workers or usable_cpus(), len(numbers))
    if executor is not None:
        yield from _run_on(executor, function, task, numbers, on_stop, _IN_FLIGHT)
    elif workers <= 1:
        for number in numbers:
            yield number, function(task(number))
    else:
        try:
            with _worker_processes(workers) as (pool, stop):
                yield from _run_on(pool, function, task, numbers, stop, 2 * workers)
        except BrokenExecutor as error:
            raise EncodeError(
                f"a worker process died, maybe out of memory ({error}); run again with fewer "
                "workers, and `encode` with --resume"
            ) from error


def _run_on(
    executor: Executor,
    function: Callable[[T], R],
    task: Callable[[int], T],
    numbers: Sequence[int],
    on_stop: Callable[[], object],
    in_flight: int,
) -> Generator[tuple[int, R], None, None]:
    """Run tasks on an executor, a bounded number at a time, until all are done or it breaks."""
    waiting = iter(numbers)
    running: dict[Future[R], int] = {}
    try:
        while True:
            for number in itertools.islice(waiting, in_flight - len(running)):
                # A Ctrl-C before a new worker has set its handlers must not print a traceback.
                with _ctrl_c_waits():
                    running[executor.submit(function, task(number))] = number
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                result = future.result()
                yield running.pop(future), result
    except BaseException as error:
        on_stop()
        # A lost cluster cancels tasks, and cannot tell when the others end.
        if not isinstance(error, CancelledError):
            wait(running)
        raise


@contextlib.contextmanager
def _worker_processes(workers: int) -> Iterator[tuple[Executor, Callable[[], None]]]:
    """Start a process pool; yield it, and a function that ends its processes at once."""
    # A forked worker starts at once, while a spawned one imports everything again. But forking is
    # unsafe with threads or torch.
    is_safe = threading.active_count() == 1 and "torch" not in sys.modules
    context = multiprocessing.get_context("fork" if is_safe else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    with receiver, sender:
        pool = ProcessPoolExecutor(workers, context, _prepare_worker, (receiver,))
        try:
            # Workers only poll the pipe and never read it, so all of them see this.
            yield pool, lambda: sender.send_bytes(b"stop")
        finally:
            with _ctrl_c_waits():
                pool.shutdown()


@contextlib.contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Defer Ctrl-C until the end of the block; processes started inside inherit the mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # Another thread may get the signal, and Python then handles it in the main thread all the same.
    is_main = threading.current_thread() is threading.main_thread()
    # None for a handler from outside of Python.
    usual = signal.getsignal(signal.SIGINT) if is_main else None
    deferred: list[object] = []
    if usual is not None:
        signal.signal(signal.SIGINT, lambda *_: deferred.append(1))
    try:
        yield
    finally:
        if usual is not None:
            signal.signal(signal.SIGINT, usual)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if deferred:
            signal.raise_signal(signal.SIGINT)


def _prepare_worker(receiver: Connection) -> None:
    """Make this worker exit when its parent dies or tells it to.

    The parent handles Ctrl-C, which reaches all processes of a terminal. In a worker,
    KeyboardInterrupt could arrive anywhere: in a destructor, which prints it, or while a lock is
    held.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A broken pool terminates its workers.
    signal.signal(signal.SIGTERM, lambda *_: _end())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, args=(receiver,), daemon=True).start()


def _end_with_parent(receiver: Connection) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a worker"
    wait_for_any([parent.sentinel, receiver])
    _end()


def _end() -> None:
    storage.abandon_writes()
    os._exit(1)
