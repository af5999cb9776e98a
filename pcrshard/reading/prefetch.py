"""Load the next items while the current one is in use."""

from __future__ import annotations

import atexit
import itertools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from functools import partial
from threading import Event, Thread, current_thread
from typing import Any, Protocol, TypeVar

Item = TypeVar("Item")


class Loaded(Protocol):
    """The result of a load; it holds memory until it is closed."""

    num_bytes: int

    def close(self) -> None:
        """Release the memory."""
        ...


Result = TypeVar("Result", bound=Loaded)
Load = Callable[[Item, Event], Result]
_JOIN_SECONDS = 2.0


def prefetch(
    items: Iterable[Item],
    load: Load[Item, Result],
    *,
    depth: int,
    max_bytes: int,
) -> Generator[tuple[Item, Future[Result]], None, None]:
    """Load items in order, up to ``depth`` of them ahead of the caller.

    Items are drawn in the caller's thread; each load runs in its own daemon thread. When the caller
    stops, for whatever reason, running loads are canceled and unclaimed results are closed.

    Args:
        items: Items to load; may be infinite.
        load: Called with an item and an event that is set when the result is no longer needed.
        depth: Loads ahead; 0 loads in the caller's thread.
        max_bytes: Upper bound on the bytes of the results loaded ahead, estimated by the largest
            result so far; at least one is always loaded ahead.

    Yields:
        Each item and a future of its result, which the caller closes.
    """
    cancel = Event()
    if depth == 0:
        for item in items:
            future: Future[Result] = Future()
            _run(load, item, cancel, future)
            yield item, future
        return
    pending: deque[tuple[Item, Future[Result], Thread]] = deque()
    end = partial(_end, cancel, pending)
    # The interpreter may exit before the caller's loop ends.
    atexit.register(end)
    try:
        source = iter(items)
        ahead = depth
        largest = 0
        while True:
            # Including the one that the caller takes next.
            for item in itertools.islice(source, max(ahead + 1 - len(pending), 0)):
                future = Future()
                thread = Thread(
                    target=_run,
                    args=(load, item, cancel, future),
                    name="pcrshard-prefetch",
                    daemon=True,
                )
                pending.append((item, future, thread))
                thread.start()
            if not pending:
                return
            item, future, _ = pending.popleft()
            yield item, future
            if not future.exception():
                largest = max(largest, future.result().num_bytes)
                ahead = min(depth, max(max_bytes // max(largest, 1), 1))
    finally:
        atexit.unregister(end)
        end()


def _run(load: Load[Item, Result], item: Item, cancel: Event, future: Future[Result]) -> None:
    try:
        future.set_result(load(item, cancel))
    except BaseException as error:
        future.set_exception(error)


def _end(cancel: Event, pending: deque[tuple[Any, Future[Any], Thread]]) -> None:
    """Cancel loads, wait for their threads, and close unclaimed results."""
    cancel.set()
    for _, future, _ in pending:
        future.add_done_callback(_close)
    end = time.monotonic() + _JOIN_SECONDS  # for all threads together
    for _, _, thread in pending:
        # This thread may be the one that collected an abandoned generator.
        if thread is not current_thread():
            thread.join(max(end - time.monotonic(), 0))


def _close(future: Future[Any]) -> None:
    if not future.exception():
        future.result().close()
