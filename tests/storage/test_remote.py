"""Reading over HTTP and S3: these bytes and no others, whatever the server does, and nothing left
behind.
"""

import contextlib
import errno
import gc
import multiprocessing
import random
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time

import fsspec
import pytest
import servers
import torch
import webdataset as wds
from msgspec.structs import replace
from servers import Fault
from support import pieces, within

import pcrshard
from pcrshard import encode, memory, storage
from pcrshard.cli.main import main
from pcrshard.errors import (
    CorruptPiece,
    EncodeError,
    PCRError,
    StorageError,
    TruncatedShard,
)
from pcrshard.reading.prefix_cache import PrefixCache
from pcrshard.reading.shard import Shard
from pcrshard.storage.retry import Cancelled, Retry

HASTY = Retry(attempts=4, first_delay=0.01, timeout=1.5, deadline=10)
DATA = random.Random(7).randbytes(3 << 20)


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """A folder with 3 MiB of noise."""
    folder = tmp_path_factory.mktemp("raw")
    (folder / "a.bin").write_bytes(DATA)
    return folder


@pytest.fixture(scope="module")
def index(dataset):
    return pcrshard.open_dataset(dataset)[0]


@pytest.fixture(scope="module")
def truth(index, dataset):
    """Samples by scan and key."""
    return {
        scan: samples_of(pipeline([f"{dataset}/{e.name}" for e in index.shards], scan))
        for scan in (1, 2, 5, "full")
    }


@pytest.fixture(scope="module")
def bucket(dataset):
    pytest.importorskip("s3fs", reason="S3FS IS NOT INSTALLED: pip install -c constraints.txt s3fs")
    with servers.s3(dataset) as server:
        yield server


def test_a_signature_for_a_folder(dataset, capsys):
    """A query behind a dataset's URL, such as a token for its folder, goes with each request for a
    file of it.
    """
    with servers.faulty(
        dataset, lambda ask: None if ask.query == "sig=a/b" else Fault(status=403)
    ) as server:
        url = f"{server.url()}?sig=a/b"
        _, urls = pcrshard.open_dataset(url)
        ds = wds.WebDataset(urls, shardshuffle=False).pcr_scan(2, index=url, retry=HASTY)
        assert samples_of(ds) == samples_of(
            wds.WebDataset(sorted(map(str, dataset.glob("*.tar"))), shardshuffle=False).pcr_scan(2)
        )
        assert main(["verify", url, "--workers", "1"]) == main(["info", urls[0]]) == 0
        with pytest.raises(StorageError, match="403"):
            pcrshard.open_dataset(server.url())


def test_shards_with_signatures_of_their_own(dataset, index):
    """Shards are a dataset even if their signatures do not open its pcr.json."""
    deny = lambda ask: Fault(status=403) if "pcr.json" in ask.path else None
    with servers.faulty(dataset, deny) as server:
        urls = [f"{server.url(entry.name)}?sig=secret{entry.name}" for entry in index.shards]
        assert pcrshard.open_dataset(urls)[0].num_samples == index.num_samples


@pytest.mark.parametrize("name", ["pcr.json", "data-000000.tar"])
def test_a_server_that_asks_for_a_pause_gets_it(dataset, name):
    """A store that limits requests says when to come again; earlier requests would only be refused,
    and counted.
    """
    with servers.faulty(dataset, [Fault(status=429, headers={"Retry-After": "1"})]) as server:
        begun = time.monotonic()
        if name == "pcr.json":
            assert pcrshard.open_dataset(server.url(name))[0].num_samples == 24
        else:
            assert len(read(server.url(name), 0, 2000)) == 2000
        assert time.monotonic() - begun >= 1
        assert [request.status for request in server.requests()][:1] == [429]
        assert len(server.requests()) == 2


def test_encode_to_a_place_that_is_not_there(bucket, synthetic_folder, dataset):
    """Object stores have no folders to make: a part and a resumed run write to a fresh prefix."""
    dst, options = f"s3://{bucket.bucket}/fresh/deep", pcrshard.EncodeOptions(num_shards=4)
    how = {"workers": 1, "dst_options": bucket.storage_options}
    assert encode(synthetic_folder, dst, options, part=(1, 2), **how) is None
    index = encode(synthetic_folder, dst, options, resume=True, **how)
    assert index == pcrshard.open_dataset(dataset)[0]
    with pytest.raises(EncodeError, match="already holds"):
        encode(synthetic_folder, dst, options, **how)
    for entry in index.shards:
        url, local = f"{dst}/{entry.name}", f"{dataset}/{entry.name}"
        shard = Shard(url, entry=entry, storage_options=bucket.storage_options)
        assert list(shard.samples()) == list(Shard(local).samples())


def pipeline(urls, scan, **reading):
    return wds.WebDataset(urls, shardshuffle=False).pcr_scan(scan, **({"retry": HASTY} | reading))


def samples_of(samples):
    """Samples by key; asserts that each comes once."""
    found = {}
    for sample in samples:
        assert sample["__key__"] not in found, sample["__key__"]
        found[sample["__key__"]] = {
            name: value for name, value in sample.items() if not name.startswith("__")
        }
    return found


def read(url, start, stop, retry=HASTY, options=None):
    return storage.read(url, start, stop, options=storage.Store.of(options, retry)).tobytes()


def bodies(server):
    return [
        (r.method, r.path.rpartition("/")[2], r.range, r.status, r.body_bytes)
        for r in server.requests()
    ]


# What goes over the wire


@pytest.mark.parametrize("store", ["http", "s3"])
def test_one_request_of_exactly_the_prefix(request, dataset, index, truth, store):
    """With the dataset index a shard costs one GET for its prefix, to the byte, by the log of nginx
    and of an object store; without it, one more.
    """
    with contextlib.ExitStack() as stack:
        reading = {"index": index, "retry": Retry()}
        if store == "s3":
            server = request.getfixturevalue("bucket")
            reading["storage_options"] = server.storage_options
        else:
            server = stack.enter_context(servers.nginx(dataset))
        urls = [server.url(entry.name) for entry in index.shards]
        for scan, prefetch in ((1, 0), (5, 2), ("full", 2)):
            server.reset()
            assert samples_of(pipeline(urls, scan, prefetch=prefetch, **reading)) == truth[scan]
            expected = [
                ("GET", e.name, (0, e.prefix_stop(scan)), 206, e.prefix_stop(scan))
                for e in index.shards
            ]
            assert sorted(bodies(server)) == sorted(expected)
            assert sum(r.body_bytes for r in server.requests()) == index.prefix_bytes(scan)
        del reading["index"]
        server.reset()
        samples_of(pipeline(urls, 2, **reading))
        assert len(bodies(server)) == 2 * len(urls)


# One range against every fault

FAULTS = {
    "drop": Fault(drop=True),
    "drop by RST": Fault(drop=True, reset=True),
    "cut before the body": Fault(cut_after=0),
    "cut in the body": Fault(cut_after=100_000),
    "cut in the body by RST": Fault(cut_after=100_001, reset=True),
    "stall before the answer": Fault(stall=30),
    "stall in the body": Fault(stall=30, stall_after=70_000),
    **{
        str(status): Fault(status=status, body=b"busy")
        for status in (408, 425, 429, 500, 502, 503, 504)
    },
    "200 with an error page": Fault(
        headers={"Content-Range": None}, status=503, body=b"<html>sorry</html>"
    ),
    "longer Content-Length": Fault(length_error=1000),
    "shorter Content-Length": Fault(length_error=-1000),
    "no Content-Length": Fault(headers={"Content-Length": None}),
    "no Content-Length, cut": Fault(headers={"Content-Length": None}, cut_after=100_000),
    "another range": Fault(shift=512),
    "an earlier range": Fault(shift=-512),
    "more than asked": Fault(more=4096),
    "less than asked": Fault(more=-4096),
    "more than asked, says as asked": Fault(more=4096, as_asked=True),
    "less than asked, says as asked": Fault(more=-4096, as_asked=True),
    "no Content-Range": Fault(headers={"Content-Range": None}),
    "nonsense in Content-Range": Fault(headers={"Content-Range": "bytes */*"}),
    "Content-Range of another unit": Fault(
        headers={"Content-Range": f"lines 1000-249999/{len(DATA)}"}
    ),
    "unit in capitals": Fault(headers={"Content-Range": f"Bytes 1000-249999/{len(DATA)}"}),
    "unknown total": Fault(headers={"Content-Range": "bytes 1000-249999/*"}),
    "no Range": Fault(ignore_range=True),
    "no Range, cut": Fault(ignore_range=True, cut_after=150_000),
    "no ETag": Fault(headers={"ETag": None, "Last-Modified": None}),
}


# Other bytes of the right length are for the checksums of a shard to find.
SHIFTED = ["another range", "an earlier range"]
ALWAYS_FINE = ["no Content-Length", "unknown total", "no Range", "no ETag"]


@pytest.mark.parametrize("times", [1, 999])
@pytest.mark.parametrize("name", FAULTS)
def test_a_range_against_a_fault(raw, name, times):
    """Each thing that can go wrong once costs one more request, or two for the halves of a part
    that was cut; what never goes away ends in an error with the file's name; neither in wrong
    bytes.
    """
    with servers.faulty(raw, [FAULTS[name]] * times) as server, within(12):
        try:
            got = read(server.url("a.bin"), 1000, 250_000)
            assert got == DATA[1000:250_000] or name in SHIFTED
        except PCRError as error:
            assert times > 1
            assert name not in ALWAYS_FINE
            assert server.url("a.bin") in str(error)
            assert len(str(error)) > 80
        asked = [request for request in server.requests() if request.method == "GET"]
        # aiohttp itself asks again on a connection that was kept
        assert len(asked) <= (3 if times == 1 else 6 * HASTY.attempts)


def test_a_long_range_is_one_request_a_part(tmp_path):
    """Each byte is asked for once; parts are apart, and none goes beyond the range."""
    (tmp_path / "a.bin").write_bytes(DATA * 8)
    with servers.nginx(tmp_path) as server:
        assert read(server.url("a.bin"), 100, 25_000_000) == (DATA * 8)[100:25_000_000]
        asked = sorted(r.range for r in server.requests())
        assert [start for start, _ in asked] == [100, *(stop for _, stop in asked[:-1])]
        assert asked[-1][1] == 25_000_000
        assert 3 <= len(asked) <= 6
        assert sum(r.body_bytes for r in server.requests()) == 25_000_000 - 100


class SilentFS(fsspec.AbstractFileSystem):
    """A store without timeouts of its own, which answers nothing."""

    protocol = "silent"

    def cat_file(self, path, start=None, end=None, **kwargs):
        time.sleep(30)

    def info(self, path, **kwargs):
        time.sleep(30)


@pytest.mark.parametrize(
    "call",
    [
        lambda url, retry: storage.read(url, 0, 100, options=storage.Store(retry=retry)),
        lambda url, retry: storage.read_bytes(
            url, max_bytes=100, options=storage.Store(retry=retry)
        ),
        lambda url, retry: storage.list_files(url, options=storage.Store(retry=retry)),
        lambda url, retry: storage.look_up(url, options=storage.Store(retry=retry)),
    ],
)
def test_a_store_without_timeouts_ends_at_the_deadline(call):
    """Whichever store hangs, and whatever it was asked, the job gets an error that names it."""
    fsspec.register_implementation("silent", SilentFS, clobber=True)
    with within(10), pytest.raises(StorageError, match="silent://here"):
        call("silent://here", Retry(attempts=2, first_delay=0.01, timeout=0.3, deadline=1))


def test_a_file_without_a_bound_through_a_chain(tmp_path):
    """A file that fsspec buffers takes memory for its own size only."""
    fsspec.filesystem("memory").pipe_file("/chained.txt", b"labels")
    options = {"simplecache": {"cache_storage": str(tmp_path)}}
    assert storage.read_bytes("simplecache::memory://chained.txt", options=options) == b"labels"


class BusyFS(fsspec.AbstractFileSystem):
    """A store that is busy six times, in the words of s3fs."""

    protocol = "busy"
    asked = 0

    def cat_file(self, path, start=None, end=None, **kwargs):
        BusyFS.asked += 1
        if BusyFS.asked <= 6:
            raise OSError(errno.EBUSY, "Please reduce your request rate")
        return bytes(end - start)


def test_a_busy_store_is_not_asked_for_smaller_parts():
    """More requests would make it busier."""
    fsspec.register_implementation("busy", BusyFS, clobber=True)
    storage.read("busy://here", 0, 20 << 20, options=storage.Store(retry=Retry(first_delay=0.01)))
    assert BusyFS.asked <= 6 + 5 + 3


def test_reads_share_the_requests_of_a_process(raw):
    """However many shards are prefetched, a server gets a bounded number of requests at a time."""
    busy, most, lock = 0, 0, threading.Lock()

    def policy(ask):
        nonlocal busy, most
        with lock:
            busy += 1
            most = max(most, busy)
        time.sleep(0.05)
        with lock:
            busy -= 1

    with servers.faulty(raw, policy) as server:
        threads = [
            threading.Thread(target=read, args=(server.url("a.bin"), 0, len(DATA), Retry()))
            for _ in range(48)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert 8 < most <= 32


@pytest.mark.parametrize("look_up", [storage.exists, storage.look_up, storage.file_bytes])
def test_a_busy_server_is_not_taken_for_a_missing_file(raw, look_up):
    """A look-up is repeated if the server refuses it for a moment."""
    policy = lambda ask: Fault(status=503) if ask.number < 2 else None
    with servers.faulty(raw, policy) as server:
        assert look_up(server.url("a.bin"))
        assert not storage.exists(server.url("b.bin"))


def test_a_folder_that_cannot_be_listed_is_not_left_out(tmp_path):
    """No class is missing because a server dropped a connection."""
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "a.jpg").write_bytes(b"")
    drop = lambda ask: Fault(drop=True, reset=True) if "class" in ask.path else None
    with servers.nginx(tmp_path) as origin, servers.proxy(origin.url(), drop) as server:
        assert storage.list_files(origin.url()) == [("class/a.jpg", None, "")]
        with pytest.raises(StorageError, match="cannot list"):
            storage.list_files(server.url(), options=storage.Store(retry=HASTY))


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 412])
def test_hopeless_answers_are_asked_for_once(raw, status):
    """A missing file or a wrong password is reported at once."""
    with servers.faulty(raw, lambda ask: Fault(status=status)) as server:
        with pytest.raises(StorageError, match=r"a\.bin"):
            read(server.url("a.bin"), 0, 100)
        assert len(server.requests()) == 1


@pytest.mark.parametrize("store", ["http", "s3"])
@pytest.mark.parametrize("start", [0, 3_000_000, 3 << 20])
def test_a_short_file_is_truncated(request, raw, start, store):
    """A file that ends before the range is a truncated shard, at once and from the first answer."""
    with servers.nginx(raw) if store == "http" else servers.s3(raw) as server:
        how = {} if store == "http" else {"options": server.storage_options}
        stop = (3 << 20) + 1
        with pytest.raises(TruncatedShard, match=f"bytes .* to {stop}"):
            read(server.url("a.bin"), start, stop, Retry(), **how)
        asked = [r for r in server.requests() if r.method == "GET"]
        assert len(asked) == 1


def test_many_cuts_are_survived_as_long_as_there_is_progress(raw):
    """A line that drops every 100 kB still delivers 3 MB, in smaller parts."""
    retry = Retry(attempts=6, first_delay=0.01, timeout=5)
    with servers.faulty(raw, lambda ask: Fault(cut_after=100_000)) as server:
        assert read(server.url("a.bin"), 0, len(DATA), retry) == DATA


def test_a_server_without_range_sends_the_file_once(tmp_path):
    """From a server that ignores Range every byte comes right, by one download of the file."""
    (tmp_path / "big.bin").write_bytes(DATA * 3)
    with servers.faulty(tmp_path, lambda ask: Fault(ignore_range=True)) as server:
        for start, stop in [(0, 100_000), (1 << 20, (1 << 20) + 10), (0, 3 * len(DATA))]:
            server.reset()
            assert read(server.url("big.bin"), start, stop) == (DATA * 3)[start:stop]
            (only,) = [request for request in server.requests() if request.method == "GET"]
            assert only.status == 200
        with pytest.raises(TruncatedShard, match=f"the file has {3 * len(DATA)}"):
            read(server.url("big.bin"), 0, 3 * len(DATA) + 1)


@pytest.mark.parametrize("stall_after", [None, 200])
def test_a_silent_server_holds_a_dataset_for_the_timeout(dataset, index, stall_after):
    """An answer for pcr.json that stalls once is asked for again, as a part of a shard is."""
    with servers.faulty(dataset, [Fault(stall=30, stall_after=stall_after)]) as server, within(10):
        assert pcrshard.open_dataset(server.url(), retry=HASTY)[0] == index


def test_a_drip_is_given_up_at_the_deadline(raw):
    """A server that is never silent but brings next to nothing does not hold a job for longer than
    the deadline.
    """
    with servers.nginx(raw, limit_rate=2000) as server, within(60):
        begin = time.monotonic()
        with pytest.raises(StorageError, match="slow"):
            read(server.url("a.bin"), 0, 200_000, Retry(timeout=2, deadline=1))
        assert time.monotonic() - begin < 30  # of 100


def test_claims_take_no_memory(dataset, index, tmp_path):
    """An index or a header that promises terabytes is an error at once, without the memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    entry = index.shards[0]
    cache = PrefixCache(str(tmp_path))
    with servers.nginx(dataset) as server, within(10):
        for size in (8 << 30, 1 << 40, 1 << 62):
            huge = replace(entry, stops=(*entry.stops[:-1], size))
            for url in (server.url(entry.name), f"{dataset}/{entry.name}"):
                for how in ({}, {"cache": cache}):
                    with pytest.raises(PCRError, match=entry.name):
                        Shard(url, entry=huge, retry=HASTY, **how).load()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_a_failed_read_gives_its_memory_back(raw):
    """A shard that is too short does not hold the memory of the prefix that it should have had."""
    gc.collect()
    gc.disable()
    try:
        with servers.nginx(raw) as server:
            for _ in range(3):
                with pytest.raises(TruncatedShard):
                    read(server.url("a.bin"), 0, 10 * len(DATA))
                idle = memory.pool.num_idle
                array = memory.borrow_array(10 * len(DATA))
                assert memory.pool.num_idle == idle - 1
                del array
    finally:
        gc.enable()


def test_a_canceled_read_writes_no_more(raw):
    """After a canceled read its memory is another's: nothing of the late answer gets into it."""
    with servers.faulty(raw, lambda ask: Fault(stall=5.0, stall_after=100_000)) as server:
        for _ in range(3):
            cancel, view = threading.Event(), bytearray(250_000)
            threading.Timer(0.3, cancel.set).start()
            begin = time.monotonic()
            with pytest.raises(Cancelled):
                storage.read_into(server.url("a.bin"), 0, memoryview(view), cancel=cancel)
            assert time.monotonic() - begin < 4  # of 5
            seen = bytes(view)
            time.sleep(0.2)
            assert bytes(view) == seen


def pieces_end(entry, scan):
    """The byte before the last piece's end, away from padding."""
    found = pieces(Shard(entry))
    return int((found.starts + found.sizes)[:scan].max()) - 1


def test_flipped_bytes_are_fetched_once_more_and_then_an_error(dataset, index):
    """Damage on the way heals by itself; damage in the store is named by shard, key and scan after
    two reads.
    """
    entry = index.shards[1]
    place = pieces_end(f"{dataset}/{entry.name}", 5)
    with servers.faulty(dataset, lambda ask: Fault(flip=place)) as server:
        with pytest.raises(CorruptPiece, match=rf"{entry.name}, key=.*, scan=5"):
            list(Shard(server.url(entry.name), entry=entry, retry=HASTY).samples(5))
        assert len(server.requests()) == 2


def test_s3_with_faults_before_it(bucket, index, truth):
    """Cuts, errors and damage between the job and an object store are survived as over HTTP."""
    faults = [
        Fault(cut_after=3000),
        Fault(status=503, body=b"<Error><Code>SlowDown</Code></Error>"),
        Fault(flip=700),
        Fault(stall=30, stall_after=2000),
        Fault(ignore_range=True),
    ]
    entry = index.shards[0]
    url, options = bucket.url(entry.name), bucket.storage_options
    for fault in faults:
        left = [fault]
        bucket.policy = lambda ask, left=left: left.pop() if left and ask.range else None
        with within(20):
            shard = Shard(url, entry=entry, storage_options=options, retry=HASTY)
            found = samples_of(dict(sample) for sample in shard.samples(5))
        assert found.items() <= truth[5].items(), fault
        assert len(found) == entry.num_samples
    bucket.policy = lambda ask: None


# Processes


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_in_the_middle_of_an_epoch(dataset, index, truth, tmp_path, method):
    """Workers that are started while the parent prefetches and caches read all, and the parent goes
    on.
    """
    with servers.nginx(dataset) as server, within(60):
        urls = [server.url(entry.name) for entry in index.shards]
        reading = {"index": index, "cache_dir": str(tmp_path), "cache_bytes": 1 << 30}
        parent = iter(pipeline(urls, 2, **reading))
        first = next(parent)
        loader = torch.utils.data.DataLoader(
            pipeline(urls, 2, **reading),
            batch_size=None,
            num_workers=2,
            multiprocessing_context=method,
        )
        assert samples_of(loader) == truth[2]
        assert samples_of([first, *parent]) == truth[2]


def test_a_lock_does_not_outlive_its_holder_in_a_fork(tmp_path):
    """A child forked while the cache is locked does not keep the lock when the parent is done with
    it.
    """
    cache = PrefixCache(str(tmp_path))

    def fetch(start, view):
        view[:] = bytes(len(view))
        child.start()

    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(20,))
    cache.read("u.tar", "i", memoryview(bytearray(100)), fetch)
    try:
        with within(5):
            view = memoryview(bytearray(200))
            cache.read("u.tar", "i", view, lambda start, view: None)
            assert child.is_alive()
        assert cache.clear() > 0
    finally:
        child.kill()
        child.join()


PROGRAM = """
    import sys, threading
    import pcrshard
    import webdataset as wds
    index, _ = pcrshard.open_dataset(sys.argv[1])
    urls = [sys.argv[2] + entry.name for entry in index.shards]
    pipeline = wds.WebDataset(urls, shardshuffle=False)
    samples = iter(pipeline.pcr_scan(5, index=index, cache_dir=sys.argv[4]))
    print(next(samples)["__key__"], flush=True)
    if sys.argv[3] == "waits": list(samples)
"""


@pytest.mark.parametrize("how", ["ends", "waits"])
def test_interpreter_ends_promptly_while_a_server_stalls(dataset, index, tmp_path, how):
    """A program that ends, or is interrupted with Ctrl-C in a read that stalls, ends within
    seconds.
    """
    stalls = {entry.name for entry in index.shards[1:]}
    with servers.faulty(
        dataset, lambda ask: Fault(stall=60) if ask.path[1:] in stalls else None
    ) as server:
        command = [
            sys.executable,
            "-c",
            textwrap.dedent(PROGRAM),
            str(dataset),
            server.url(),
            how,
            str(tmp_path),
        ]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout.readline().strip()
        begin = time.monotonic()
        if how == "waits":
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert time.monotonic() - begin < 30  # of 60
        assert "Fatal" not in errors
        assert process.returncode == {"ends": 0, "waits": -signal.SIGINT}[how]
