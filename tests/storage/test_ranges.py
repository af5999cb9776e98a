"""Range reads: exact bytes, and failures that name the file."""

import pathlib
import threading

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pcrshard import Shard, memory, storage
from pcrshard.errors import StorageError, TruncatedShard
from pcrshard.storage.retry import Retry
from pcrshard.testing import CountingFS

HASTY = Retry(attempts=2, first_delay=0.01)

DATA = bytes(range(256)) * 64


class Foreign(Exception):
    """As botocore's and aiohttp's errors: neither OSError nor RuntimeError."""


class OddServer(MemoryFileSystem):
    """A store behind a server that ignores Range, cuts answers, or fails in its own way; the file
    name says which.
    """

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
        if (
            "ignores" in path or start == end
        ):  # S3 ignores an empty Range as not satisfiable by syntax
            start, end = None, None
        if "drips" in path:
            end = start + 1
        if "cuts" in path and end - start > 1:
            end -= 1
        return DATA[start:end]


@pytest.fixture(autouse=True, scope="module")
def _file_systems():
    fsspec.register_implementation("odd", OddServer, clobber=True)
    fsspec.register_implementation("counting", CountingFS, clobber=True)


@pytest.fixture
def data_file(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(DATA)
    return str(path)


def temporaries(folder):
    return [
        path.name
        for path in pathlib.Path(folder).rglob("*")
        if "tmp" in path.name or path.name.startswith(".")
    ]


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


def test_a_range_is_one_request(data_file):
    """Object stores bill by request: one range, one request, of exactly these bytes."""
    CountingFS.requests.clear()
    storage.read(f"counting://{data_file}", 1024, 4096)
    assert CountingFS.requests == [(data_file, 1024, 4096)]


def test_no_more_is_read_from_the_disk(data_file):
    """A prefix of a local file costs its own bytes, with no read-ahead: counted by the kernel."""
    storage.read(data_file, 0, 1024)  # imports and pools are warm

    def bytes_read():
        fields = pathlib.Path("/proc/self/io").read_text().split()
        return int(fields[fields.index("rchar:") + 1])

    before = bytes_read()
    own = bytes_read() - before
    before = bytes_read()
    storage.read(data_file, 512, 5000)
    assert bytes_read() - before - own == 5000 - 512


@pytest.mark.parametrize("scan", [1, 5, 10, "full"])
def test_a_shard_moves_prefix_stop_bytes(shard_urls, dataset, scan):
    """With a dataset index, a scan moves exactly ``prefix_stop(scan)`` bytes in one request."""
    entry = next(e for e in pcr_index(dataset).shards if shard_urls[0].endswith(e.name))
    CountingFS.requests.clear()
    list(Shard(f"counting://{shard_urls[0]}", entry=entry).samples(scan))
    assert [(a, b) for _, a, b in CountingFS.requests] == [(0, entry.prefix_stop(scan))]


def pcr_index(folder):
    from pcrshard import open_dataset

    return open_dataset(str(folder))[0]


@pytest.mark.parametrize("url", ["{}", "counting://{}"])
def test_a_file_that_ends_early_is_a_truncated_shard(data_file, url):
    """A file that is shorter than its index says is named, with both sizes."""
    url = url.format(data_file)
    with pytest.raises(TruncatedShard, match=f"0 to {len(DATA) + 512}.*{len(DATA)}.*{url}"):
        storage.read(url, 0, len(DATA) + 512)


def test_a_store_that_answers_too_shortly_is_given_up():
    """The error says how far it came, and in how many requests."""
    with pytest.raises(StorageError, match=r"0 of 9 came in 2 requests.*got 1.*odd:///drips"):
        storage.read("odd:///drips", 0, 9, retry=HASTY)


def test_a_claimed_size_takes_no_memory(data_file):
    """A hostile head that claims 8 EiB is refused by the file's size, before anything is
    allocated.
    """
    with pytest.raises(TruncatedShard):
        storage.read(data_file, 512, 1 << 62)


@pytest.mark.parametrize("stop", [100, len(DATA) - 1])
def test_a_store_that_ignores_ranges(stop):
    """If a store ignores ranges, the range is cut out of the whole response."""
    assert storage.read("odd:///ignores", 10, stop).tobytes() == DATA[10:stop]
    ranges = [("odd:///ignores", 0, stop), ("odd:///right", 0, stop)]
    assert storage.read_ranges(ranges) == [DATA[:stop]] * 2


CALLS = {
    "read": lambda url: storage.read(url, 0, 8),
    "read_bytes": storage.read_bytes,
    "open_file": lambda url: storage.open_file(url).__enter__(),
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
    """A bad file in a batch of ranges does not affect the others."""
    asked = [
        (data_file, 0, 4),
        (data_file, 0, None),
        (data_file + "x", 0, 4),
        (data_file, 0, 1 << 20),
    ]
    first, rest, missing, short = storage.read_ranges(asked)
    assert (first, rest) == (DATA[:4], DATA)
    assert isinstance(missing, StorageError)
    assert isinstance(short, TruncatedShard)
    assert storage.read_ranges([]) == []


def test_read_ranges_of_several_stores(data_file):
    """One list of ranges can span several stores."""
    fsspec.filesystem("memory").pipe_file("/b", b"remote")
    assert storage.read_ranges([(data_file, 0, 4), ("memory:///b", 0, None)]) == [
        DATA[:4],
        b"remote",
    ]


def test_an_empty_range_needs_no_answer():
    """An empty field of a tar is empty, although S3 answers an empty Range with the whole
    object.
    """
    assert storage.read_ranges([("odd:///right", 5, 5)]) == [b""]


def test_buffers_are_reused_without_leaking(tmp_path):
    """A view never shows bytes of an earlier, larger read; nested reads do not share a buffer."""
    large, small = tmp_path / "large", tmp_path / "small"
    large.write_bytes(b"S" * 4096)
    small.write_bytes(b"x" * 100)
    for _ in range(3):
        outer = storage.read(str(large), 0, 4096)
        inner = storage.read(str(small), 0, 100)
        assert (outer.tobytes(), inner.tobytes()) == (b"S" * 4096, b"x" * 100)
        del outer, inner
        assert storage.read(str(small), 10, 90).tobytes() == b"x" * 80


def test_threads_share_the_buffers(data_file):
    """Reads from many threads at once each get their own bytes."""
    failures = []

    def read(start):
        try:
            for _ in range(150):
                found = storage.read(data_file, start, start + 2000)
                if found.tobytes() != DATA[start : start + 2000]:
                    failures.append("wrong bytes")
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=read, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_thread_may_take_the_last_buffer_first(data_file, monkeypatch):
    """The pool being emptied by another thread between look and take is no error."""
    pool = memory.BufferPool(max_idle=1)
    pool.borrow_array(100)

    class Faster(int):
        """A size that another thread's request overtakes when it is compared."""

        def __le__(self, other):
            pool.borrow_array(50)
            return int(self) <= other

    assert len(pool.borrow_array(Faster(90))) == 90
