"""A run that stops goes on: whole shards are kept, nothing is mixed, nothing is left over."""

import os
import pathlib
import re
import shutil
import tarfile

import fsspec
import pytest
import servers
from encode_support import encode_parts, make_tar, start_encode
from support import read_all, read_samples, run_encode, wait_for

from pcrshard import EncodeOptions, ShardFormat, ShardWriter, encode, storage
from pcrshard.encoding.encode_run import new_run
from pcrshard.encoding.resume_journal import JOURNAL
from pcrshard.encoding.shard_plan import plan
from pcrshard.encoding.shard_task import ShardTask, encode_shard
from pcrshard.errors import EncodeError, FormatError, StorageError
from pcrshard.testing import make_jpeg


def overwrite(data, offset):
    changed = bytearray(data)
    changed[offset] ^= 1
    return changed


DAMAGES = {
    "cut": lambda data: data[:-512],
    "empty": lambda data: b"",
    "longer": lambda data: data + bytes(512),
    "head": lambda data: overwrite(data, 530),
    "tar header": lambda data: overwrite(data, 0),
    "scan": lambda data: overwrite(data, -5000),
    "trailer": lambda data: overwrite(data, -1),
}


@pytest.fixture
def copy(dataset, tmp_path):
    """A copy of the synthetic dataset in the test's folder."""
    return pathlib.Path(shutil.copytree(dataset, tmp_path, dirs_exist_ok=True))


def shard_times(folder):
    """When each shard was written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.tar")}


@pytest.mark.parametrize("damage", DAMAGES)
def test_resume_repairs(synthetic_folder, dataset, copy, damage):
    """After a shard is damaged, --resume gives the bytes of an undisturbed run."""
    shard = copy / "data-000002.tar"
    shard.write_bytes(DAMAGES[damage](shard.read_bytes()))
    run_encode(synthetic_folder, copy, num_shards=4, resume=True)
    assert read_all(copy) == read_all(dataset)


def test_resume_keeps_what_is_whole(synthetic_folder, dataset, copy):
    """Only what is missing is encoded again, and the unfinished shard of a killed run does not stay
    as a hidden file.
    """
    before = shard_times(copy)
    (copy / "data-000001.tar").rename(copy / ".pcrshard-a1b2c3d4.tmp")
    run_encode(synthetic_folder, copy, num_shards=4, resume=True)
    changed = {name for name, time in shard_times(copy).items() if before[name] != time}
    assert changed == {"data-000001.tar"}
    assert read_all(copy) == read_all(dataset)


def test_progress_is_read_while_another_part_merges_the_journal(
    synthetic_folder, copy, monkeypatch
):
    """A file that another run removes between each listing and the reading is no error."""
    planned = plan(str(synthetic_folder), EncodeOptions(num_shards=4))
    list_files = storage.list_files

    def list_removed_file(folder, **options):
        gone = storage.Listed("encode-parts/000000.json", 9, "")
        return [*list_files(folder, **options), gone]

    monkeypatch.setattr(storage, "list_files", list_removed_file)
    assert len(new_run(str(copy), planned).journal.written()) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resume": True, "seed": 1}, "options differ"),
        ({"resume": True, "num_shards": 3}, "options differ"),
        ({"resume": True, "name": "x"}, "options differ"),
        ({"resume": True, "resize_short": 9}, "options differ"),
        ({"resume": True, "fmt": ShardFormat(base=1)}, "options differ"),
        ({"num_shards": 2}, r"already holds .*--resume"),
    ],
)
def test_a_dataset_is_neither_overwritten_nor_mixed(
    synthetic_folder, dataset, copy, options, message
):
    """A run with other options, or without --resume, is refused before a byte is written."""
    with pytest.raises(EncodeError, match=message):
        run_encode(synthetic_folder, copy, **{"num_shards": 4} | options)
    assert read_all(copy) == read_all(dataset)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"fingerprint": "x"}',
        b'{"fingerprint": 1, "shards": {"a": 1}}',
        b"\xff",
    ],
)
def test_a_broken_journal(synthetic_folder, tmp_path, text):
    """A journal that cannot be read is named, with what to do."""
    (tmp_path / JOURNAL).write_bytes(text)
    with pytest.raises(EncodeError, match=f"{JOURNAL}"):
        run_encode(synthetic_folder, tmp_path, resume=True)


def test_resume_does_not_take_over_a_dataset_of_another_maker(synthetic_folder, tmp_path):
    """A ShardWriter's dataset has no journal, so --resume cannot go on with it, and must not write
    over it.
    """
    with ShardWriter(tmp_path, samples_per_shard=2) as writer:
        writer.write({"__key__": "a", "jpg": make_jpeg()})
    before = read_all(tmp_path)
    with pytest.raises(EncodeError):
        run_encode(synthetic_folder, tmp_path, resume=True)
    assert read_all(tmp_path) == before


@pytest.mark.parametrize(("moment", "workers"), [("temporary", 1), (5, 1), (3, 2)])
def test_resume_after_kill(larger_folder, larger_dataset, tmp_path, moment, workers):
    """Killed at any moment and resumed, a run gives the files of an undisturbed one and nothing
    else.
    """

    def reached():
        if moment == "temporary":
            return any(tmp_path.glob(".pcrshard-*"))
        return len(list(tmp_path.glob("*.tar"))) >= moment

    with start_encode(larger_folder, tmp_path, "--workers", str(workers)):
        wait_for(reached)
    assert not (tmp_path / "pcr.json").exists()
    run_encode(larger_folder, tmp_path, num_shards=12, resume=True)
    assert {
        name: found for name, found in read_all(tmp_path).items() if not name.startswith(".")
    } == read_all(larger_dataset)


def test_a_stopped_run_goes_on_with_skip(mixed_folder, tmp_path):
    """After a raise, --resume --on-error skip keeps the shards that were written, and ends as a run
    with skip from the start.
    """
    with pytest.raises(FormatError):
        run_encode(mixed_folder, tmp_path / "a", num_shards=3)
    run_encode(mixed_folder, tmp_path / "a", num_shards=3, resume=True, on_error="skip")
    run_encode(mixed_folder, tmp_path / "b", num_shards=3, on_error="skip")
    assert read_all(tmp_path / "a") == read_all(tmp_path / "b")


@pytest.mark.parametrize("resume", [False, True])
def test_tars_that_are_there_are_not_replaced(synthetic_folder, tmp_path, resume):
    """A shard never takes the place of a file that no run of this dataset has written, such as its
    own source.
    """
    with tarfile.open(tmp_path / "data-000000.tar", "w") as tar:
        tar.add(next(pathlib.Path(synthetic_folder).rglob("*.jpg")), "a.jpg")
    before = (tmp_path / "data-000000.tar").read_bytes()
    with pytest.raises(EncodeError, match=r"already holds data-000000\.tar"):
        run_encode(synthetic_folder, tmp_path, resume=resume)
    with pytest.raises(EncodeError, match="outside the source"):
        run_encode(tmp_path, tmp_path, resume=resume)
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tar"] == [
        "data-000000.tar"
    ]
    assert (tmp_path / "data-000000.tar").read_bytes() == before


def test_parts_may_run_again(synthetic_folder, dataset, tmp_path):
    """A requeued part, before or after the others have ended, changes nothing; without --resume it
    is refused.
    """
    encode_parts(synthetic_folder, tmp_path, 2, (0,))
    with pytest.raises(EncodeError, match=r"already holds .*--resume"):
        encode_parts(synthetic_folder, tmp_path, 2, (0,))
    before = shard_times(tmp_path)
    encode_parts(synthetic_folder, tmp_path, 2, (0, 1, 0, 1), resume=True)
    assert before.items() <= shard_times(tmp_path).items()
    assert read_all(tmp_path) == read_all(dataset)


def test_a_part_mends_its_shards(synthetic_folder, dataset, copy):
    """After damage, that part alone with --resume makes the dataset whole; another part says that
    something is missing.
    """
    (copy / "data-000001.tar").unlink()
    assert encode_parts(synthetic_folder, copy, 2, (0,), resume=True) == [None]
    assert encode_parts(synthetic_folder, copy, 2, (1,), resume=True) != [None]
    assert read_all(copy) == read_all(dataset)


def test_a_run_without_parts_completes_them(synthetic_folder, dataset, tmp_path):
    """``--resume`` without ``--part`` keeps the parts' shards and makes the others, also beside an
    unfinished file of a part that was killed.
    """
    encode_parts(synthetic_folder, tmp_path, 4, (1, 3))
    (tmp_path / "encode-parts" / ".pcrshard-a1b2c3d4.tmp").touch()
    before = shard_times(tmp_path)
    with pytest.raises(EncodeError, match="already holds"):
        run_encode(synthetic_folder, tmp_path, num_shards=4)
    run_encode(synthetic_folder, tmp_path, num_shards=4, resume=True)
    assert before.items() <= shard_times(tmp_path).items()
    assert read_all(tmp_path) == read_all(dataset)


def test_parts_of_different_runs_do_not_mix(synthetic_folder, tmp_path):
    """Another seed or another source in the same folder is refused."""
    encode_parts(synthetic_folder, tmp_path, 4, (0,))
    options = EncodeOptions(num_shards=4, seed=5)
    with pytest.raises(EncodeError, match="options differ"):
        encode(synthetic_folder, tmp_path, options, part=(1, 4), workers=1)


def test_an_encode_that_took_over_a_remote_folder_is_noticed(synthetic_folder, dataset):
    """Object stores have no locks: the first run stops with an error once another has taken over,
    and the other one completes.
    """
    dst = "memory://taken-over"

    def take_over(done, total):
        if done:
            run_encode(synthetic_folder, dst, num_shards=4, resume=True)

    with pytest.raises(EncodeError, match="another encode is writing"):
        run_encode(synthetic_folder, dst, num_shards=4, progress=take_over)
    memory = fsspec.filesystem("memory")
    assert memory.cat_file("/taken-over/pcr.json") == (dataset / "pcr.json").read_bytes()


@pytest.fixture
def label_tar(tmp_path):
    """A tar of 40 images of class 1; writes it again with other labels, as long as before."""

    def write(label=b"1", time=1):
        members = [
            (f"{i:02d}.{name}", data)
            for i in range(40)
            for name, data in (("jpg", make_jpeg(i)), ("cls", label))
        ]
        make_tar(tmp_path / "src" / "a.tar", members)
        os.utime(tmp_path / "src" / "a.tar", (time, time))
        return str(tmp_path / "src" / "a.tar")

    return write


def labels_of(folder):
    return {sample["cls"] for sample in read_samples(folder, 1).values()}


@pytest.mark.parametrize("first", [(0,), (0, 1)])
def test_labels_corrected_between_two_runs(label_tar, tmp_path, caplog, first):
    """Shards whose sources have changed since, though not in size, are named and made again."""
    for part in first:
        encode_parts(label_tar(), tmp_path / "out", 2, (part,))
    run_encode(label_tar(b"2", 2), tmp_path / "out", num_shards=4, resume=True)
    assert labels_of(tmp_path / "out") == {b"2"}
    assert f"{2 * len(first)} shards (data-000000.tar, " in caplog.text
    assert "made again, because their sources have changed" in caplog.text


def test_parts_of_different_sources_do_not_mix(label_tar, tmp_path, caplog):
    """A part is not joined with one that was made of older sources; both are named."""
    encode_parts(label_tar(), tmp_path / "out", 2, (0,))
    assert encode_parts(label_tar(b"2", 2), tmp_path / "out", 2, (1,)) == [None]
    assert "2 shards (data-000000.tar, data-000002.tar) were made from sources" in caplog.text
    encode_parts(label_tar(b"2", 2), tmp_path / "out", 2, (0,), resume=True)
    assert labels_of(tmp_path / "out") == {b"2"}


def test_one_picture_corrected_makes_one_shard_again(synthetic_folder, tmp_path):
    """After a picture is replaced, also by a larger one, only its own shard is made again."""
    src = shutil.copytree(synthetic_folder, tmp_path / "src")
    run_encode(src, tmp_path / "out", num_shards=4)
    before = shard_times(tmp_path / "out")
    (src / "cat" / "003.jpg").write_bytes(make_jpeg(99, 300, 200))
    run_encode(src, tmp_path / "out", num_shards=4, resume=True)
    after = shard_times(tmp_path / "out")
    assert sum(before[name] != after[name] for name in before) == 1
    run_encode(src, tmp_path / "fresh", num_shards=4)
    assert read_all(tmp_path / "out") == read_all(tmp_path / "fresh")


def test_a_tar_replaced_while_it_is_encoded(label_tar, tmp_path):
    """Byte ranges of a tar that is no longer the listed one are not encoded."""
    planned = plan(label_tar(), EncodeOptions(num_shards=1))
    run = new_run(str(tmp_path / "out"), planned)
    label_tar(b"2", 2)
    with run.open(range(1), resume=False):
        with pytest.raises(StorageError, match=r"replaced after it was listed.*a\.tar"):
            encode_shard(ShardTask(run, 0, planned.shards[0]))


def test_parts_leave_the_results_of_others_unread(synthetic_folder):
    """Each of many parts reads the journal of its own shards only; the last one that of all."""
    with servers.s3() as server:
        how = {"dst_options": server.storage_options, "workers": 1}
        for part in range(6):
            server.reset()
            encode(
                synthetic_folder, server.url("out"), EncodeOptions(num_shards=6), part=(part, 6),
                **how,
            )  # fmt: skip
            read = [
                request.path
                for request in server.requests()
                if request.method == "GET" and re.search(r"encode-parts/\d+\.json", request.path)
            ]
            assert len(read) == (6 if part == 5 else 0), part


def test_a_changed_source_on_s3(tmp_path):
    """A store's ETag says that a picture of the same size and second is another one."""
    with servers.s3() as server:
        names = [f"{i}.jpg" for i in range(8)]
        jpeg, other = make_jpeg(0), make_jpeg(0)[:-3] + b"\x00\xff\xd9"
        for name in names:
            server.put(f"/{server.prefix}/src/{name}", jpeg)
        how = {"src_options": server.storage_options, "workers": 1}
        options = EncodeOptions(num_shards=4)
        src = server.url("src")
        encode(src, tmp_path / "out", options, **how)
        before = shard_times(tmp_path / "out")
        encode(src, tmp_path / "out", options, resume=True, **how)
        assert shard_times(tmp_path / "out") == before
        server.put(f"/{server.prefix}/src/3.jpg", other)
        encode(src, tmp_path / "out", options, resume=True, **how)
        after = shard_times(tmp_path / "out")
        assert sum(before[name] != after[name] for name in before) == 1
