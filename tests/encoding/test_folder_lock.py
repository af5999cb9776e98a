"""One writer a folder."""

import concurrent.futures
import contextlib
import fcntl
import signal
import threading

import pytest
from encode_support import start_encode
from support import read_all, run_encode, wait_for

from pcrshard import EncodeOptions, encode
from pcrshard.encoding.encode_run import LOCK
from pcrshard.errors import EncodeError


@contextlib.contextmanager
def encoding(src, dst, *options):
    """An encode in another process, stopped while it is at work."""
    with start_encode(src, dst, "--workers", "1", *options) as process:
        wait_for(lambda: any(dst.glob("*.tar")))
        process.send_signal(signal.SIGSTOP)
        assert process.poll() is None
        yield


def test_two_encodes_in_one_folder(larger_folder, tmp_path):
    """The second is refused while the first is at work, and not after that was killed."""
    with encoding(larger_folder, tmp_path):
        for how in ({}, {"resume": True}):
            with pytest.raises(EncodeError, match=r"another encode.*is writing to"):
                run_encode(larger_folder, tmp_path, num_shards=12, **how)
        with pytest.raises(EncodeError, match="another encode"):
            encode(larger_folder, tmp_path, EncodeOptions(num_shards=12), part=(0, 2))
    run_encode(larger_folder, tmp_path, num_shards=12, resume=True)
    assert not (tmp_path / LOCK).exists()


def test_a_part_and_another_encode(larger_folder, tmp_path):
    """While a part is at work other parts may start, but no run without parts."""
    with encoding(larger_folder, tmp_path, "--part", "0/2"):
        options = EncodeOptions(num_shards=12)
        assert encode(larger_folder, tmp_path, options, part=(1, 2), workers=1) is None
        with pytest.raises(EncodeError, match="another encode"):
            encode(larger_folder, tmp_path, options, resume=True)


def test_a_part_that_starts_twice(synthetic_folder, tmp_path):
    """A part that a cluster starts again takes over: the first one stops, the second completes."""
    options = EncodeOptions(num_shards=8)
    how = {"part": (0, 2), "resume": True, "workers": 1}
    begun, taken_over = threading.Event(), threading.Event()

    def wait(done, total):
        if done:
            begun.set()
            taken_over.wait(20)

    def wait_for_the_end_of_the_first(done, total):
        if done:
            taken_over.set()
            assert isinstance(first.exception(20), EncodeError)

    encode(synthetic_folder, tmp_path, options, part=(1, 2), workers=1)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        first = threads.submit(encode, synthetic_folder, tmp_path, options, progress=wait, **how)
        assert begun.wait(20)
        how["progress"] = wait_for_the_end_of_the_first
        assert encode(synthetic_folder, tmp_path, options, **how).num_samples == 24


def test_a_file_system_without_locks(synthetic_folder, dataset, tmp_path, monkeypatch):
    """There it works as well, with a warning."""

    def refuse(*args):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    run_encode(synthetic_folder, tmp_path, num_shards=4)
    assert read_all(tmp_path) == read_all(dataset)
