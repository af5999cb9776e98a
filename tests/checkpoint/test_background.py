"""Work in the background keeps its order, and its errors are not lost."""

import logging
import threading

import pytest

from pcrshard.checkpoint.background import Background


def test_work_is_done_in_order_and_not_by_the_caller():
    """Two pieces; the second one waits for the first."""
    done = []
    background = Background()
    gate = threading.Event()
    background.submit(lambda: (gate.wait(10), done.append(threading.current_thread().name)))
    assert done == []
    gate.set()
    background.submit(lambda: done.append("second"))
    background.close()
    assert done[0].startswith("pcrshard-checkpoint")
    assert done[1] == "second"


def test_an_error_is_logged_and_raised_once(caplog):
    """By the next call, whichever it is."""

    def fail():
        raise OSError("full")

    background = Background()
    with caplog.at_level(logging.ERROR):
        background.submit(fail)
        with pytest.raises(OSError, match="full"):
            background.wait()
    assert "a checkpoint was not saved" in caplog.text
    background.wait()
    background.submit(fail)
    with pytest.raises(OSError, match="full"):
        background.submit(lambda: None)
    background.close()
