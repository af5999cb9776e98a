"""Waiting for lists: as long as they grow, and no longer."""

import threading
import time

import pytest

from pcrshard import Retry
from pcrshard.errors import StorageError
from pcrshard.storage import collect


def slowly(count, seconds):
    for number in range(count):
        time.sleep(seconds)
        yield number


def test_what_grows_is_waited_for():
    """A long list is no error, however long it takes in all."""
    before = threading.active_count()
    assert collect(slowly(8, 0.1), "s3://b/a", retry=Retry(deadline=0.4)) == list(range(8))
    assert threading.active_count() <= before


def test_silence_is_an_error_that_names_the_source():
    """Without its secrets."""
    url = "http://me:hunter2@host/photos/?sig=S3CRET"
    with pytest.raises(
        StorageError, match=r"after 0 entries \(file=http://.*host/photos"
    ) as caught:
        collect(slowly(1, 1), url, seconds=0.1)
    assert "hunter2" not in str(caught.value)
    assert "S3CRET" not in str(caught.value)


def test_a_thread_that_was_given_up_ends_with_its_next_entry():
    """It does not list for ever behind the program's back."""
    reached = []

    def endless():
        yield 0
        time.sleep(0.5)
        yield 1
        reached.append(2)
        yield 2

    before = threading.active_count()
    with pytest.raises(StorageError, match="after 1 entries"):
        collect(endless(), "a", seconds=0.2)
    end = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= before
    assert reached == []


def test_errors_are_those_of_the_list():
    """As if it had been read without a thread."""

    def failing():
        yield 1
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        collect(failing(), "a")
