"""Tasks on worker processes, or on any executor."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import logging
import multiprocessing
import multiprocessing.context
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ..errors import EncodeError

T = TypeVar("T")
R = TypeVar("R")
_MAX_DEATHS = 3
_log = logging.getLogger("pcrshard")


@contextlib.contextmanager
def worker_pool(
    workers: int | None, num_tasks: int, given: concurrent.futures.Executor | None = None
) -> Iterator[concurrent.futures.Executor | None]:
    """The executor given, or worker processes; ``None`` means to run in this process."""
    if workers is not None and workers < 1:
        raise EncodeError(f"expected at least one worker, got {workers}")
    workers = min(workers or len(os.sched_getaffinity(0)), num_tasks)
    if given is not None or workers <= 1:
        yield given
        return
    # A forked worker starts at once, a spawned one imports everything anew; but threads and torch do not survive a fork.
    safe = threading.active_count() == 1 and "torch" not in sys.modules
    context = multiprocessing.get_context("fork" if safe else "spawn")
    pool = WorkerProcesses(workers, context)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


class WorkerProcesses(concurrent.futures.Executor):
    """A process pool that can be made anew after one of its workers has died, which breaks Python's own for good."""

    def __init__(self, workers: int, context: multiprocessing.context.BaseContext) -> None:
        self._how = (workers, context, _die_with_parent)
        self._pool = concurrent.futures.ProcessPoolExecutor(*self._how)

    def submit(
        self, fn: Callable[..., R], /, *args: Any, **kwargs: Any
    ) -> concurrent.futures.Future[R]:
        """Run ``fn`` in a worker."""
        return self._pool.submit(fn, *args, **kwargs)

    def renew(self) -> None:
        """Other workers; what the old ones had is lost."""
        self._pool.shutdown()
        self._pool = concurrent.futures.ProcessPoolExecutor(*self._how)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers."""
        self._pool.shutdown(wait, cancel_futures=cancel_futures)


def _die_with_parent() -> None:
    """End this worker when its parent is killed, which cannot tell it so."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_tasks(
    pool: concurrent.futures.Executor | None,
    function: Callable[[T], R],
    tasks: dict[int, T],
    *,
    in_flight: int | None = None,
) -> Iterator[tuple[int, R]]:
    """Run tasks on an executor, or here, and yield (number, result) as they end; the first error is raised.

    ``in_flight`` tasks are submitted at a time, four for each core by default, so that a million of them do not wait in memory twice. When a worker
    process dies (out of memory, say), its tasks run again.
    """
    if pool is None:
        for number, task in tasks.items():
            yield number, function(task)
        return
    waiting = collections.deque(tasks)
    limit = in_flight or 4 * len(os.sched_getaffinity(0))
    running: dict[concurrent.futures.Future[R], int] = {}
    deaths = 0
    try:
        while waiting or running:
            try:
                while waiting and len(running) < limit:
                    future = pool.submit(function, tasks[waiting[0]])
                    running[future] = waiting.popleft()
                ended, _ = concurrent.futures.wait(
                    running, return_when=concurrent.futures.FIRST_COMPLETED
                )
                for future in ended:
                    result = future.result()
                    yield running.pop(future), result
            except concurrent.futures.BrokenExecutor as error:
                deaths += 1
                if not isinstance(pool, WorkerProcesses) or deaths > _MAX_DEATHS:
                    raise EncodeError(
                        f"a worker process died ({error}); run again with --resume"
                    ) from error
                _log.warning(
                    "a worker process died; the %d tasks that were under way run again",
                    len(running),
                )
                waiting.extendleft(running.values())
                running.clear()
                pool.renew()
    finally:
        for future in running:
            future.cancel()
