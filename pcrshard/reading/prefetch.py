"""Load the next items while the current one is in use."""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Thread, current_thread
from typing import (
    Any,
    Generic,
    Protocol,
    Self,
    TypeVar,
)

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

    Items are drawn in the caller's thread; loads run in ``depth`` daemon threads. When the caller
    stops, for whatever reason, running loads are canceled, unclaimed results are closed, and the
    threads end.

    Args:
        items: Items to load; may be infinite.
        load: Called with an item and an event that is set when the result is no longer needed.
        depth: Loads ahead; 0 loads in the caller's thread.
        max_bytes: Bound of the results loaded ahead, estimated by the largest result so far; at
            least one is always loaded ahead.

    Yields:
        Each item and a future of its result, which the caller closes.
    """
    if depth == 0:
        for item in items:
            yield item, _run(load, item, Event(), Future())
        return
    with _Loader(load, depth, max_bytes) as loader:
        source = iter(items)
        while loader.fill(source):
            item, future = loader.pending.popleft()
            yield item, future
            loader.note(future)


def _run(
    load: Load[Item, Result],
    item: Item,
    cancel: Event,
    future: Future[Result],
) -> Future[Result]:
    try:
        future.set_result(load(item, cancel))
    except BaseException as error:
        future.set_exception(error)
    return future


@dataclass(eq=False)
class _Loader(Generic[Item, Result]):
    """The threads and the unclaimed loads."""

    load: Load[Item, Result]
    depth: int
    max_bytes: int
    largest: int = 0
    pending: deque[tuple[Item, Future[Result]]] = field(default_factory=deque)
    jobs: SimpleQueue[tuple[Item, Future[Result]] | None] = field(default_factory=SimpleQueue)
    cancel: Event = field(default_factory=Event)
    threads: list[Thread] = field(default_factory=list)

    def fill(self, source: Iterator[Item]) -> bool:
        """Start loads up to the bounds, including the one that the caller takes next.

        Returns:
            Whether any are pending.
        """
        missing = self._most_ahead() + 1 - len(self.pending)
        for item in itertools.islice(source, max(missing, 0)):
            future: Future[Result] = Future()
            self.pending.append((item, future))
            self.jobs.put((item, future))
            if len(self.threads) < self.depth:
                self._start_thread()
        return bool(self.pending)

    def _most_ahead(self) -> int:
        if self.largest == 0:
            return self.depth
        return min(self.depth, max(self.max_bytes // self.largest, 1))

    def _start_thread(self) -> None:
        thread = Thread(
            target=self._work,
            name="pcrshard-prefetch",
            daemon=True,
        )
        self.threads.append(thread)
        thread.start()

    def note(self, future: Future[Result]) -> None:
        """Record the size of a result."""
        if not future.exception():
            self.largest = max(self.largest, future.result().num_bytes)

    def _work(self) -> None:
        while job := self.jobs.get():
            item, future = job
            if future.set_running_or_notify_cancel():
                _run(self.load, item, self.cancel, future)

    def __enter__(self) -> Self:
        # Also at interpreter exit, which may come before the caller's loop ends.
        self._end = weakref.finalize(self, _end, self.cancel, self.pending, self.jobs, self.threads)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()


def _end(
    cancel: Event,
    pending: deque[tuple[Item, Future[Result]]],
    jobs: SimpleQueue[tuple[Item, Future[Result]] | None],
    threads: list[Thread],
) -> None:
    """End the threads and close unclaimed results."""
    cancel.set()
    for _item, future in pending:
        if not future.cancel():
            future.add_done_callback(_close)
    for _thread in threads:
        jobs.put(None)
    end = time.monotonic() + _JOIN_SECONDS  # for all threads together
    for thread in threads:
        # This thread may be the one that collected an abandoned generator.
        if thread is not current_thread():
            thread.join(max(end - time.monotonic(), 0))


def _close(future: Future[Any]) -> None:
    if not future.exception():
        future.result().close()
