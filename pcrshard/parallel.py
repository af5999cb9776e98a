"""Tasks on worker processes, or on any executor."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from .errors import EncodeError

T = TypeVar("T")
R = TypeVar("R")


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
    with concurrent.futures.ProcessPoolExecutor(workers, context, _die_with_parent) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _die_with_parent() -> None:
    """End this worker when its parent is killed, which cannot tell it so."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_tasks(
    pool: concurrent.futures.Executor | None, function: Callable[[T], R], tasks: dict[int, T], *, in_flight: int | None = None
) -> Iterator[tuple[int, R]]:
    """Run tasks on an executor, or here, and yield (number, result) as they end; the first error is raised.

    ``in_flight`` tasks are submitted at a time, four for each core by default, so that a million of them do not wait in memory twice.
    """
    if pool is None:
        for number, task in tasks.items():
            yield number, function(task)
        return
    waiting = iter(tasks.items())
    limit = in_flight or 4 * len(os.sched_getaffinity(0))
    running: dict[concurrent.futures.Future[R], int] = {}
    try:
        while True:
            while len(running) < limit and (item := next(waiting, None)):
                running[pool.submit(function, item[1])] = item[0]
            if not running:
                return
            ended, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in ended:
                yield running.pop(future), future.result()
    except concurrent.futures.BrokenExecutor as error:
        raise EncodeError(f"a worker process died ({error}); run again with --resume") from error
    finally:
        for future in running:
            future.cancel()
