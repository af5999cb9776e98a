"""Load the next items while the current one is in use."""

from __future__ import annotations

import atexit
import itertools
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, wait
from functools import partial
from threading import Event
from typing import TypeVar

from ..storage.stores import in_thread

Item = TypeVar("Item")
Result = TypeVar("Result")
_END_SECONDS = 2.0


def prefetch(
    items: Iterable[Item],
    load: Callable[[Item, Event], Result],
    *,
    depth: int,
) -> Generator[tuple[Item, Future[Result]], None, None]:
    """Load items in order, up to ``depth`` of them ahead of the caller.

    Items are drawn in the caller's thread; each load runs in its own daemon thread. When the caller
    stops, for whatever reason, running loads are canceled.

    Args:
        items: Items to load; may be infinite.
        load: Called with an item and an event that is set when the result is no longer needed.
        depth: Loads ahead; with 0, a load starts when the caller asks for its item.

    Yields:
        Each item and a future of its result. The memory of a result that the caller has dropped
        is available to the next load.
    """
    cancel = Event()
    pending: deque[tuple[Item, Future[Result]]] = deque()

    def end() -> None:
        cancel.set()
        wait([future for _, future in pending], _END_SECONDS)

    # The interpreter may exit before the caller's loop ends, and then this module is gone.
    atexit.register(end)
    is_exiting = sys.is_finalizing
    try:
        source = iter(items)
        while True:
            # Including the one that the caller takes next.
            for item in itertools.islice(source, depth + 1 - len(pending)):
                pending.append((item, in_thread(partial(load, item, cancel))))
            if not pending:
                return
            yield pending.popleft()
    finally:
        if not is_exiting():
            atexit.unregister(end)
            end()
