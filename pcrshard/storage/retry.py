"""Decide when to retry a failed request and how long to wait."""

from __future__ import annotations

import email.utils
import math
import random
import threading
import time
from dataclasses import dataclass

from ..errors import PCRError, StorageError

_HOPELESS = (
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    NotImplementedError,
    ImportError,
    TypeError,
)
# Names of exceptions of libraries that are not imported here.
_HOPELESS_NAMES = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "InvalidURL",
    "NonHttpUrlClientError",
    "DefaultCredentialsError",
)
# 408 Request Timeout, 425 Too Early, 429 Too Many Requests (RFC 9110, RFC 8470, RFC 6585).
_PASSING_STATUS = (408, 425, 429)


@dataclass(frozen=True)
class Retry:
    """How to retry failed requests.

    Attributes:
        attempts: Consecutive failures after which a read fails.
        first_delay: Seconds of the first pause; each following pause is twice as long.
        max_delay: Seconds of the longest pause.
        timeout: Seconds after which a request for a part counts as failed, and parts are halved,
            down to 64 KiB. For other files over HTTP and S3, seconds without a byte.
        deadline: Seconds without a new part after which a read fails.

    Raises:
        ValueError: A number is not positive.
    """

    attempts: int = 8
    first_delay: float = 0.1
    max_delay: float = 10.0
    timeout: float = 30.0
    deadline: float = 300.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"expected {name} to be positive, got {value!r}")

    def delay(self, failures: int) -> float:
        """Return the seconds to wait after a number of consecutive failures.

        Exponential with jitter, so that a thousand workers do not return at once.
        """
        longest = min(self.first_delay * 2 ** min(failures - 1, 30), self.max_delay)
        return float(random.uniform(0.5, 1.0) * longest)


def asked_pause(error: BaseException) -> float:
    """Return the seconds of an answer's ``Retry-After`` (RFC 9110, 10.2.3); 0 without it."""
    headers = getattr(error, "headers", None) or {}
    value = str(headers.get("Retry-After", "")).strip()
    try:
        if value.isdecimal():
            return float(value)
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


# Set by another thread to end a read or a wait.
Cancel = threading.Event | None


class Cancelled(StorageError):
    """The reader no longer needs the result."""


class Refused(StorageError):
    """An answer that a retry would not change."""


def is_hopeless(error: BaseException) -> bool:
    """Return whether a retry would fail the same way: no file, no permission, HTTP 4xx."""
    status = getattr(error, "status", None)
    # aiohttp reports an answer that is not HTTP as status 400 with a cause; a server's own 400 has
    # none.
    if isinstance(status, int) and 400 <= status < 500 and error.__cause__ is None:
        return status not in _PASSING_STATUS
    if isinstance(error, StorageError):
        return isinstance(error, Refused)
    if type(error) is ValueError:
        # An invalid URL; subclasses may be about an answer.
        return True
    return isinstance(error, (PCRError, *_HOPELESS)) or type(error).__name__ in _HOPELESS_NAMES


class Attempts:
    """The failures of a request since its last progress.

    Args:
        retry: When to give up.

    Attributes:
        failures: Consecutive failures.
    """

    def __init__(self, retry: Retry) -> None:
        self.retry = retry
        self._failed = 0.0
        self.note_progress()

    def note_progress(self) -> None:
        """Reset the failures and the deadline."""
        self.failures = 0
        self._progress = time.monotonic()

    def pause_after(self, error: BaseException, sent: float = math.inf) -> float | None:
        """Return the seconds to wait before a retry, ``None`` to give up.

        Args:
            error: The failure.
            sent: When the request was sent. Requests sent before the last failure was detected fail
                for the same reason and count once.
        """
        self.failures += sent >= self._failed
        self._failed = time.monotonic()
        left = self._progress + self.retry.deadline - self._failed
        if is_hopeless(error) or self.failures >= self.retry.attempts or left <= 0:
            return None
        return max(self.retry.delay(self.failures), min(asked_pause(error), left))
