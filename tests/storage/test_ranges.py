"""Range reads: exact bytes, and failures that name the file."""

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pcrshard import storage
from pcrshard.errors import StorageError, TruncatedShard
from pcrshard.storage.retry import Retry

HASTY = Retry(attempts=2, first_delay=0.01)

DATA = bytes(range(256)) * 64


class Foreign(Exception):
    """As botocore's and aiohttp's errors: neither OSError nor RuntimeError."""


class OddServer(MemoryFileSystem):
    """A store that cuts answers, or fails in its own way; the file name says which."""

    protocol = "odd"
    store: dict = {}

    @classmethod
    def _strip_protocol(cls, path):
        return str(super()._strip_protocol(str(path).replace("odd://", "memory://")))

    def size(self, path):
        return len(DATA)

    def cat_file(self, path, start=None, end=None, **kwargs):
        if "foreign" in path:
            raise Foreign("no credentials")
        assert start != end  # S3 ignores an empty range
        if "drips" in path:
            end = start + 1
        if "cuts" in path and end - start > 1:
            end -= 1
        return DATA[start:end]


@pytest.fixture(autouse=True, scope="module")
def _file_systems():
    fsspec.register_implementation("odd", OddServer, clobber=True)


@pytest.fixture
def data_file(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(DATA)
    return str(path)


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, 1), (0, 1024), (512, 513), (100, 100), (0, len(DATA)), (len(DATA), len(DATA))],
)
@pytest.mark.parametrize("scheme", ["", "file://", "memory://", "counting://"])
def test_a_read_gives_exactly_the_bytes_asked_for(data_file, scheme, start, stop):
    """A range read returns exactly the requested bytes on any store."""
    url = scheme + data_file
    if scheme == "memory://":
        fsspec.filesystem("memory").pipe_file(data_file, DATA)
    assert storage.read(url, start, stop).tobytes() == DATA[start:stop]


@pytest.mark.parametrize("url", ["{}", "counting://{}"])
def test_a_file_that_ends_early_is_a_truncated_shard(data_file, url):
    """A file that is shorter than its index says is named, with both sizes."""
    url = url.format(data_file)
    with pytest.raises(TruncatedShard, match=f"0 to {len(DATA) + 512}.*{len(DATA)}.*{url}"):
        storage.read(url, 0, len(DATA) + 512)


def test_a_store_that_answers_too_shortly_is_given_up():
    """The error says how far it came, and in how many requests."""
    with pytest.raises(
        StorageError, match=r"0 of 9 bytes received \(requests: 2\).*got them up to 1.*odd:///drips"
    ):
        storage.read("odd:///drips", 0, 9, options=storage.Store(retry=HASTY))


CALLS = {
    "read": lambda url: storage.read(url, 0, 8),
    "read_bytes": storage.read_bytes,
    "open_stream": lambda url: storage.open_stream(url).__enter__(),
    "list_files": storage.list_files,
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("url", ["{}/none", "memory:///none", "nosuch://x/y"])
def test_missing_is_a_storage_error(tmp_path, call, url):
    """What is not there is one error class that names it, for every kind of access and URL."""
    url = url.format(tmp_path)
    with pytest.raises(StorageError, match=url):
        CALLS[call](url)


@pytest.mark.parametrize("call", ["read", "read_bytes"])
def test_errors_of_other_libraries_are_mapped(call, monkeypatch):
    """A cloud library's own exception (no credentials, lost connection) comes as StorageError,
    too.
    """
    monkeypatch.setattr(Retry, "delay", lambda *_: 0)
    with pytest.raises(StorageError, match="no credentials"):
        CALLS[call]("odd:///foreign")


def test_a_folder_is_not_a_file(tmp_path):
    """Opening a folder as a file raises a StorageError."""
    with pytest.raises(StorageError):
        storage.read(str(tmp_path), 0, 8)


def test_read_ranges_reports_each_range_by_itself(data_file):
    """One list of ranges can span several stores, and a bad file does not affect the others."""
    asked = [
        (data_file, 0, 4),
        (data_file, 0, None),
        (data_file + "x", 0, 4),
        (data_file, 0, 1 << 20),
    ]
    fsspec.filesystem("memory").pipe_file("/b", b"remote")
    asked += [("memory:///b", 0, None), ("odd:///right", 5, 5)]
    first, rest, missing, short, remote, empty = storage.read_ranges(asked)
    assert (first, rest, remote, empty) == (DATA[:4], DATA, b"remote", b"")
    assert isinstance(missing, StorageError)
    assert isinstance(short, TruncatedShard)
    assert storage.read_ranges([]) == []
