"""When to try again, and how long to wait: plain decisions about failed requests."""

from __future__ import annotations

import email.utils
import random
import threading
import time
from dataclasses import asdict, dataclass

from ..errors import PCRError, StorageError

_HOPELESS = (
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    NotImplementedError,
    ImportError,
    TypeError,
)
# Of libraries that are not imported here.
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
    """What to do about a bad network.

    Attributes:
        attempts: Failures in a row after which a read is given up.
        first_delay: Seconds of the first pause; each next one is twice as long.
        max_delay: Seconds of the longest pause.
        timeout: Seconds until a request for a part of a file, or a small one, has failed. Parts
            are halved then, down to 64 KiB.
        deadline: Seconds without a part after which a read is given up.

    Raises:
        ValueError: A number is not positive.
    """

    attempts: int = 8
    first_delay: float = 0.1
    max_delay: float = 10.0
    timeout: float = 30.0
    deadline: float = 300.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"expected {name} to be positive, got {value!r}")

    def delay(self, failures: int) -> float:
        """Return the seconds to wait after a number of failures in a row.

        Exponential, with jitter, so that a thousand workers do not return at once.
        """
        longest = min(self.first_delay * 2 ** min(failures - 1, 30), self.max_delay)
        return float(random.uniform(0.5, 1.0) * longest)


def asked_pause(error: BaseException) -> float:
    """Return the seconds that an HTTP server asks clients to wait; 0 if it says nothing.

    ``Retry-After`` is in RFC 9110, section 10.2.3.
    """
    headers = getattr(error, "headers", None) or {}
    value = str(headers.get("Retry-After", "")).strip()
    return float(value) if value.isdecimal() else _seconds_until(value)


def _seconds_until(date: str) -> float:
    try:
        return max(0.0, email.utils.parsedate_to_datetime(date).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


# Ends a read or a wait from another thread.
Cancel = threading.Event | None


class Cancelled(StorageError):
    """The reader no longer wants what it asked for."""


class Refused(StorageError):
    """An answer that another request would not change."""


def is_hopeless(error: BaseException) -> bool:
    """Return whether another request would fail alike: no file, no permission, HTTP 4xx."""
    status = getattr(error, "status", None)
    # aiohttp gives an answer that is no HTTP the status 400, with a cause; what a server says
    # has none.
    if isinstance(status, int) and 400 <= status < 500 and error.__cause__ is None:
        return status not in _PASSING_STATUS
    if isinstance(error, StorageError):
        return isinstance(error, Refused)
    if type(error) is ValueError:
        # A URL that is none; its sub-classes may be about an answer.
        return True
    return isinstance(error, (PCRError, *_HOPELESS)) or type(error).__name__ in _HOPELESS_NAMES
