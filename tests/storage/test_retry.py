"""What is tried again, how often, and how long the pauses are."""

import datetime
import email.utils
import random

import pytest
from imported_later import Later

from pcrshard.storage.retry import Retry, asked_pause, is_hopeless

aiohttp = Later("aiohttp")


def status(code, headers=None):
    return aiohttp.ClientResponseError(None, (), status=code, headers=headers)


def test_a_server_may_ask_for_a_pause():
    """Retry-After counts, in seconds and as a date; a date that is past, or nonsense, asks for
    nothing.
    """

    def asks(value):
        return asked_pause(status(429, {"Retry-After": value}))

    assert asks("20") == 20
    assert (
        50
        < asks(
            email.utils.format_datetime(
                datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=1)
            )
        )
        <= 60
    )
    assert asks("Sat, 01 Jan 2000 00:00:00 GMT") == asks("soon") == asks("-5") == asks("") == 0
    assert asked_pause(status(503)) == asked_pause(OSError()) == 0


def test_garbage_on_a_connection_is_tried_again():
    """aiohttp's status 400 for an answer that it could not parse is not taken for the server's own
    400.
    """
    error = status(400)
    error.__cause__ = aiohttp.http_exceptions.BadStatusLine("x")
    assert not is_hopeless(error)


def test_pauses_double_up_to_the_longest_with_jitter():
    """Pauses grow to ``max_delay`` and no further, and a thousand workers do not come back at the
    same moment.
    """
    random.seed(0)
    retry = Retry(first_delay=0.5, max_delay=3)
    for failures, longest in [(1, 0.5), (2, 1), (3, 2), (4, 3), (5, 3), (10_000, 3)]:
        delays = [retry.delay(failures) for _ in range(1000)]
        assert longest / 2 <= min(delays) < longest * 0.55, failures
        assert longest * 0.95 < max(delays) <= longest, failures


@pytest.mark.parametrize("name", ["attempts", "first_delay", "max_delay", "timeout", "deadline"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_refuses_nonsense(name, value):
    """A wrong number is refused where it is written, by its name."""
    with pytest.raises(ValueError, match=name):
        Retry(**{name: value})
