"""One thread that does work in the order in which it was given."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


class Background:
    """Work behind the caller's back, one piece at a time, with errors that are not lost.

    An error is logged at once, and raised by the next call.
    """

    def __init__(self) -> None:
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._pending: concurrent.futures.Future[object] | None = None

    def submit(self, work: Callable[[], object]) -> None:
        """Start work as soon as the piece before has ended, which is waited for.

        One piece at a time bounds the memory of snapshots.

        Raises:
            Exception: The piece before has failed.
        """
        self.wait()
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(1, "pcrshard-checkpoint")
        self._pending = self._pool.submit(_logged, work)

    def wait(self) -> None:
        """Wait for all work.

        Raises:
            Exception: It has failed; it is raised once.
        """
        pending = self._pending
        if pending is not None:
            concurrent.futures.wait([pending])
            self._pending = None
            pending.result()

    def close(self) -> None:
        """Wait for all work, and end the thread."""
        try:
            self.wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None


def _logged(work: Callable[[], object]) -> object:
    try:
        return work()
    except Exception:
        log.exception("a checkpoint was not saved")
        raise
