"""Staging: a local copy that is right, grows by the difference, and survives any crash."""

import contextlib
import io
import logging
import multiprocessing
import pathlib
import random
import shutil
import signal
import tarfile
import threading
import time

import pytest
import servers
from servers import Fault
from support import read_samples, run_encode

import pcrshard
from pcrshard import open_dataset
from pcrshard.cli.main import main
from pcrshard.errors import EncodeError, PCRError, ScanUnavailable, StorageError
from pcrshard.storage.retry import Retry
from pcrshard.testing import make_jpeg
from pcrshard.upkeep.stage import stage

HASTY = Retry(attempts=3, first_delay=0.01, timeout=1)


@pytest.fixture(scope="module")
def index(dataset):
    return open_dataset(dataset)[0]


def size_at(entry, scan):
    return entry.shard_bytes if scan == "full" else entry.prefix_stop(scan)


def assert_staged(dst, dataset, index, scan):
    """Files, index, samples, and the verify command agree that the copy is what was asked for."""
    for entry in index.shards:
        whole = pathlib.Path(dataset, entry.name).read_bytes()
        assert pathlib.Path(dst, entry.name).read_bytes() == whole[: size_at(entry, scan)]
    assert open_dataset(dst)[0].scan == (None if scan == "full" else scan)
    assert read_samples(dst, scan) == read_samples(dataset, scan)
    names = sorted([*(e.name for e in index.shards), "pcr.columns", "pcr.json"])
    assert sorted(path.name for path in pathlib.Path(dst).iterdir()) == names


def moved(server):
    return sum(
        r.body_bytes for r in server.requests() if r.method == "GET" and r.path.endswith(".tar")
    )


def test_grows_by_the_difference(dataset, index, tmp_path):
    """From scan 2 to 5 to full only what is missing moves; going down moves and removes nothing."""
    with servers.nginx(dataset) as server:
        previous = 0
        for scan in (2, 5, "full"):
            server.reset()
            seen = []
            stage(server.url(), tmp_path, scan, retry=HASTY, on_shard=seen.append)
            # The two empty blocks at the end of a whole shard are known.
            total = sum(entry.prefix_stop(scan) for entry in index.shards)
            assert moved(server) == total - previous == sum(staged.copied_bytes for staged in seen)
            assert sum(staged.kept_bytes for staged in seen) == previous
            assert_staged(tmp_path, dataset, index, scan)
            assert main(["verify", str(tmp_path), "--workers", "1"]) == 0
            previous = total
        server.reset()
        assert stage(server.url(), tmp_path, 1).scan is None
        assert moved(server) == 0
        assert_staged(tmp_path, dataset, index, "full")


def test_shards_without_an_index_are_staged(dataset, tmp_path, capsys):
    """Shards that somebody named one by one can be copied, and the copy is a dataset."""
    for path in dataset.glob("*.tar"):
        shutil.copy(path, tmp_path)
    names = sorted(tmp_path.glob("*.tar"))
    for scan in (2, "full"):
        stage(names, tmp_path / "copy", scan)
        assert main(["verify", str(tmp_path / "copy")]) == 0
    whole = [path.read_bytes() for path in names]
    assert [(tmp_path / "copy" / path.name).read_bytes() for path in names] == whole


def test_more_than_is_there_names_both_numbers(dataset, tmp_path):
    """Staging too high a scan from a staged copy raises an error with both scan numbers."""
    stage(dataset, tmp_path, 2)
    with pytest.raises(ScanUnavailable, match=r"scan 5.*scans 1 to 2 of 10"):
        stage(tmp_path, tmp_path / "more", 5)


def test_a_staged_copy_can_be_staged_on(dataset, index, tmp_path):
    """A copy is a source for lower scans, also where the target already has more."""
    stage(dataset, tmp_path / "a", 5)
    stage(tmp_path / "a", tmp_path / "b", 2)
    assert_staged(tmp_path / "b", dataset, index, 2)
    stage(dataset, tmp_path / "c", "full")
    assert stage(tmp_path / "a", tmp_path / "c", 2).scan is None
    assert_staged(tmp_path / "c", dataset, index, "full")


DAMAGES = {
    "flipped": lambda data: data[:-600] + bytes([data[-600] ^ 0xFF]) + data[-599:],
    "cut": lambda data: data[:2000],
    "empty": lambda data: b"",
    "foreign": lambda data: random.Random(0).randbytes(30_000),
    "zeros": lambda data: bytes(len(data)),
    "longer": lambda data: data + b"more",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("scan", [1, "full"])
def test_whatever_is_in_the_destination_is_made_right(dataset, index, tmp_path, scan, damage):
    """Damaged, cut, foreign and unfinished files are replaced; sound bytes are kept."""
    stage(dataset, tmp_path, scan)
    (tmp_path / f".pcrshard-{'0' * 16}.tmp").write_bytes(b"unfinished")
    path, gone, other, _ = (tmp_path / entry.name for entry in index.shards)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    gone.unlink()
    shutil.copy(dataset / path.name, other)
    seen = []
    assert stage(dataset, tmp_path, "full", on_shard=seen.append).scan is None
    assert_staged(tmp_path, dataset, index, "full")
    (sound,) = [staged for staged in seen if staged.entry.name == index.shards[3].name]
    assert sound.kept_bytes == size_at(index.shards[3], scan)


def test_other_data_in_the_destination_is_not_touched(dataset, index, tmp_path, synthetic_folder):
    """A folder that holds another dataset is refused as it is, and so is a tar or a shard of
    something else that has the name of a shard.
    """
    other, dst = tmp_path / "other", tmp_path / "dst"
    options = pcrshard.EncodeOptions(num_shards=3)
    pcrshard.encode(synthetic_folder, other, options, workers=1)
    before = {path.name: path.read_bytes() for path in other.iterdir()}
    with pytest.raises(EncodeError, match=r"another dataset.*remove it"):
        stage(dataset, other, 2)
    assert {path.name: path.read_bytes() for path in other.iterdir()} == before
    name = index.shards[0].name
    dst.mkdir()
    with tarfile.open(tmp_path / "plain.tar", "w") as tar:
        tar.add(__file__)
    for foreign in (other / name, tmp_path / "plain.tar"):
        shutil.copy(foreign, dst / name)
        with pytest.raises(EncodeError, match=f"{name} is not of this dataset"):
            stage(dataset, dst, 2)
        assert (dst / name).read_bytes() == foreign.read_bytes()


def test_replaced_source_is_noticed(dataset, index, tmp_path):
    """Growing a copy of a dataset that was replaced meanwhile never mixes versions."""
    source, dst = tmp_path / "src", tmp_path / "dst"
    shutil.copytree(dataset, source)
    with servers.faulty(source) as server:
        stage(server.url(), dst, 2, retry=HASTY)
        name = index.shards[1].name
        shutil.copy(source / index.shards[0].name, source / name)
        with pytest.raises(PCRError, match=name):
            stage(server.url(), dst, 5, retry=HASTY)
    assert open_dataset(dst)[0].scan == 2
    assert read_samples(dst, 2) == read_samples(dataset, 2)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(cut_after=3000),
        Fault(flip=3000),
        Fault(flip=-700),
        Fault(shift=512, as_asked=True),
    ],
    ids=repr,
)
def test_a_fault_of_the_network_costs_a_request(dataset, index, tmp_path, fault, caplog):
    """Each shard's first transfer fails in this way, and the copy is right all the same."""
    seen = set()

    def policy(ask):
        first = ask.path.endswith(".tar") and ask.path not in seen
        seen.add(ask.path)
        return fault if first else None

    with servers.faulty(dataset, policy) as server:
        stage(server.url(), f"file://{tmp_path}", "full", retry=HASTY)
    assert_staged(tmp_path, dataset, index, "full")


def test_damage_that_stays_is_an_error_that_names_the_shard(dataset, index, tmp_path):
    """A source that is damaged is named, `verify` accepts what has grown, readers of the old scan
    go on, and the next run keeps the other shards.
    """
    stage(dataset, tmp_path, 2)
    bad = index.shards[-1].name
    place = index.shards[-1].prefix_stop(5) - 520
    with servers.faulty(
        dataset, lambda ask: Fault(flip=place) if bad in ask.path else None
    ) as server:
        with pytest.raises(PCRError, match=bad):
            stage(server.url(), tmp_path, "full", workers=1, retry=HASTY)
    assert (tmp_path / index.shards[0].name).stat().st_size == index.shards[0].shard_bytes
    assert main(["verify", str(tmp_path)]) == 0
    assert read_samples(tmp_path, 2) == read_samples(dataset, 2)
    with servers.nginx(dataset) as server:
        stage(server.url(), tmp_path, "full", retry=HASTY)
        assert moved(server) < index.shards[-1].shard_bytes
    assert_staged(tmp_path, dataset, index, "full")


def test_destination_that_cannot_be_written_is_an_error(dataset, index, tmp_path):
    """A folder in the place of a file, and a file in that of the folder, are errors of ours."""
    (tmp_path / "dst" / index.shards[0].name).mkdir(parents=True)
    with pytest.raises(StorageError, match="cannot write"):
        stage(dataset, tmp_path / "dst", 2)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="file"):
        stage(dataset, tmp_path / "file", 2)


def _stage_process(url, dst, scan):
    logging.disable()
    stage(url, dst, scan, workers=2, retry=Retry())


def spawn(*args):
    process = multiprocessing.get_context("forkserver").Process(target=_stage_process, args=args)
    process.start()
    return process


def test_processes_of_a_node_stage_to_one_folder(dataset, index, tmp_path):
    """Every rank may call it: one copies, the others wait and find all there."""
    with servers.nginx(dataset) as server:
        processes = [spawn(server.url(), str(tmp_path), 5) for _ in range(3)]
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0, 0]
        assert moved(server) == index.prefix_bytes(5)
    assert_staged(tmp_path, dataset, index, 5)


def test_interrupt_ends_it_soon(dataset, index, tmp_path):
    """Ctrl-C does not wait for a server that stalls."""
    with servers.faulty(
        dataset, lambda ask: Fault(stall=60, stall_after=100) if ".tar" in ask.path else None
    ) as server:
        threading.Timer(
            0.5, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]
        ).start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            stage(server.url(), tmp_path, 5, retry=Retry(timeout=60, deadline=60))
        assert time.monotonic() - begin < 30  # of 60


@pytest.mark.parametrize("field", ["mask.png", "photo.jpg"])
@pytest.mark.parametrize("scan", [2, 8, "full"])
def test_corrected_content_of_the_same_size_is_not_taken_for_staged(tmp_path, field, scan):
    """After a mask or a kept picture is corrected, a stage into the same folder ends with the new
    content or is refused, though no size has changed; another folder gets the new content.
    """
    for version in (b"old", b"new"):
        src, out = tmp_path / f"{version.decode()}.tar", tmp_path / version.decode()
        with tarfile.open(src, "w") as tar:
            for i in range(8):
                for name, data in (("jpg", make_jpeg(i)), (field, b"\x89PNG" + version)):
                    info = tarfile.TarInfo(f"{i}.{name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        run_encode(src, out, num_shards=2, on_error="keep")
    stage(tmp_path / "old", tmp_path / "copy", scan)
    with contextlib.suppress(EncodeError):
        stage(tmp_path / "new", tmp_path / "copy", scan)
    heads = {entry.head_crc32c for entry in open_dataset(tmp_path / "copy")[0].shards}
    of = {"old": b"old", "new": b"new"}
    (version,) = [
        name
        for name in of
        if heads == {entry.head_crc32c for entry in open_dataset(tmp_path / name)[0].shards}
    ]
    held = {sample[field] for sample in read_samples(tmp_path / "copy", scan).values()}
    assert held == {b"\x89PNG" + of[version]}
    stage(tmp_path / "new", tmp_path / "fresh", scan)
    held = {sample[field] for sample in read_samples(tmp_path / "fresh", scan).values()}
    assert held == {b"\x89PNGnew"}
