"""An end to waiting for lists that never come: a thread waits for the store, and we for the thread.

Nothing else ends a call of the system that does not return, such as one to a dead network drive.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

from ..errors import StorageError
from .retry import Retry
from .stores import ANY_NETWORK

T = TypeVar("T")
# Stores that list a folder in one call do not tell how far they are; a million files take a minute.
LISTING_SECONDS = 3600.0


def collect(
    items: Iterator[T],
    url: str,
    *,
    retry: Retry = ANY_NETWORK,
    seconds: float | None = None,
) -> list[T]:
    """All items, unless for too long none comes.

    Args:
        items: What a store lists, one by one; it is run in another thread, which is left to
            itself when it is given up.
        url: What is listed, for the error.
        retry: ``deadline`` is the longest time without an item.
        seconds: This time instead.

    Raises:
        StorageError: None came for so long.
    """
    patience = retry.deadline if seconds is None else seconds
    listing = _Listing(items)
    listing.start()
    before = 0
    while not listing.ended.wait(patience):
        count = len(listing.found)
        if count == before:
            listing.given_up = True
            raise StorageError(
                f"cannot list: nothing came for {patience:g} s after {count} entries", url=url
            )
        before = count
    listing.join()
    if listing.error is not None:
        raise listing.error
    return listing.found


class _Listing(threading.Thread, Generic[T]):
    """Runs an iterator to its end."""

    def __init__(self, items: Iterator[T]) -> None:
        super().__init__(name="pcrshard listing", daemon=True)
        self.items = items
        self.found: list[T] = []
        self.error: BaseException | None = None
        self.given_up = False
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            for item in self.items:
                self.found.append(item)
                if self.given_up:
                    break
        except BaseException as error:
            self.error = error
        finally:
            self.ended.set()
