"""pcrshard index: what is written, what is read for it, and what is refused."""

import bz2
import gzip
import io
import json
import lzma
import re
import tarfile

import numpy as np
import pytest
import servers
from support import read_samples, stock_samples, write_files, write_tar

from pcrshard import IndexOptions, PCRDataset, PCRLoader, encode, index_tars, open_dataset
from pcrshard.encoding import tar_index
from pcrshard.errors import EncodeError, PCRError, StorageError
from pcrshard.jpeg.picture_size import picture_size
from pcrshard.testing import make_jpeg

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
CLASSES = IndexOptions(classes=("a", "b", "c"))


def members_of(start, count, **more):
    """Members of samples of a picture and a label, by name."""
    found = {}
    for i in range(start, start + count):
        found |= {f"k{i:03d}.jpg": make_jpeg(i, 24, 24), f"k{i:03d}.cls": b"%d" % (i % 3)}
        found |= {f"k{i:03d}.{name}": value for name, value in more.items()}
    return found


@pytest.fixture
def tars(tmp_path):
    """Four tars of five samples."""
    for number in range(4):
        write_tar(tmp_path / f"t{number}.tar", members_of(5 * number, 5))
    return tmp_path


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_parts_and_repeated_runs_write_the_same(tars, tmp_path):
    """Indexes made in parts, in any order, or by a run that was interrupted, are those of one run;
    only the last part writes pcr.json.
    """
    index_tars(tars, tmp_path / "whole", CLASSES)
    parts = tmp_path / "parts"
    for part in (2, 0):
        assert index_tars(tars, parts, CLASSES, part=(part, 3)).dataset is None
    assert not (parts / "pcr.json").exists()
    assert index_tars(tars, parts, CLASSES, part=(1, 3)).dataset is not None
    assert files(parts) == files(tmp_path / "whole")
    (parts / "t2.tar.pcr").unlink()
    (parts / "pcr.json").unlink()
    done = index_tars(tars, parts, CLASSES)
    assert (done.num_tars, done.num_listed) == (4, 1)
    assert files(parts) == files(tmp_path / "whole")
    dataset = PCRDataset(parts)
    assert (len(dataset), dataset.classes, dataset.num_classes) == (20, ("a", "b", "c"), 3)
    with pytest.raises(EncodeError, match="a part I/N"):
        index_tars(tars, parts, part=(3, 3))


def test_tars_of_other_fields_have_one_schema(tmp_path):
    """Fields that only some tars have, and values that are large in some, are fields of all; tars
    that were indexed before are not read again.
    """
    write_tar(tmp_path / "a.tar", members_of(0, 2, txt=b"short"))
    first = index_tars(tmp_path)
    assert [field.name for field in first.dataset.schema.fields] == ["jpg", "cls", "txt"]
    assert first.dataset.schema.by_name["txt"].scan == 0
    large = {"txt": b"long " * 500, "bin": b"x", "mask.png": b"p"}
    write_tar(tmp_path / "b.tar", members_of(2, 2, **large))
    write_tar(tmp_path / "c.tar", members_of(4, 2, txt=b"short"))
    second = index_tars(tmp_path)
    assert second.num_listed == 2
    fields = second.dataset.schema.by_name
    assert [fields[name].scan for name in ("jpg", "cls", "txt", "bin")] == [1, 0, 1, 0]
    dataset = PCRDataset(tmp_path, decoder=8)
    assert [dataset[i]["txt"] for i in (0, 2, 4)] == ["short", large["txt"].decode(), "short"]
    assert {len(batch["cls"]) for batch in PCRLoader(dataset, 3)} == {3}
    index_tars(tmp_path, options=IndexOptions(kinds={"mask.png": "mask"}))
    assert open_dataset(tmp_path)[0].schema.by_name["mask.png"].kind == "mask"
    with pytest.raises(EncodeError, match="kinds of fields among"):
        index_tars(tmp_path, options=IndexOptions(kinds={"none.png": "mask"}))


PACKERS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("how", PACKERS)
def test_compressed_tars_are_read_as_streams(how, tmp_path):
    """Compressed tars are indexed and read without a copy; damage raises an error with names."""
    write_tar(tmp_path / "plain.tar", members_of(0, 30, bin=bytes(5000)))
    data = (tmp_path / "plain.tar").read_bytes()
    (tmp_path / "plain.tar").unlink()
    path = tmp_path / f"a.tar.{how}"
    path.write_bytes(PACKERS[how](data))
    done = index_tars(tmp_path)
    assert done.dataset.num_samples == 30
    dataset = PCRDataset(tmp_path, decoder=8)
    keys = [key for batch in PCRLoader(dataset, 5, shuffle=False) for key in batch["__key__"]]
    assert keys == [f"k{i:03d}" for i in range(30)]
    stock = stock_samples(str(path))
    for number, sample in enumerate(PCRDataset(tmp_path)[i] for i in range(3)):
        assert sample["jpg"] == stock[number]["jpg"]
    assert PCRDataset(tmp_path).subset([7])[0]["__key__"] == "k007"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(PCRError, match=r"a\.tar"):
        PCRDataset(tmp_path)[29]
    with pytest.raises(PCRError, match=r"a\.tar"):
        index_tars(path, tmp_path / "again")


def cut(path):
    """Cut the last member off in the middle."""
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(b"k004.jpg") + 700])


def other_header(path):
    data = bytearray(path.read_bytes())
    place = data.index(b"k003.jpg")
    data[place + 150] ^= 1
    path.write_bytes(data)


def link(path):
    with tarfile.open(path, "a") as tar:
        info = tarfile.TarInfo("k009.jpg")
        info.type, info.linkname = tarfile.LNKTYPE, "k000.jpg"
        tar.addfile(info)


def joined(path):
    path.write_bytes(path.read_bytes() * 2)


@pytest.mark.parametrize(
    ("damage", "left", "message"),
    [
        (cut, 4, "cut off|unexpected end of data"),
        (other_header, 3, "damaged"),
        (link, 5, "sparse file or a hard link"),
        (joined, 5, "another tar"),
    ],
)
def test_bad_tars(damage, left, message, tmp_path):
    """A damaged tar is refused, or with on_error="skip" indexed up to the damage, and read so."""
    path = write_tar(tmp_path / "a.tar", members_of(0, 5))
    damage(path)
    with pytest.raises(EncodeError, match=message):
        index_tars(tmp_path)
    done = index_tars(tmp_path, options=IndexOptions(on_error="skip"))
    assert re.search(message, done.skipped[0].reason)
    dataset = PCRDataset(tmp_path)
    assert list(dataset.keys) == [f"k{i:03d}" for i in range(left)]
    assert [dataset[i]["__key__"] for i in range(left)] == list(dataset.keys)


def test_a_tar_that_grows_while_it_is_indexed(tars, monkeypatch):
    """A tar that someone still writes gets no index; the next run indexes what is there then."""
    path = tars / "t1.tar"

    def look(read):
        with open(path, "ab") as file:
            file.write(bytes(512))
        return picture_size(read)

    monkeypatch.setattr(tar_index, "picture_size", look)
    with pytest.raises(StorageError, match=r"replaced while it was listed: run again.*t1\.tar"):
        index_tars(path)
    assert not (tars / "t1.tar.pcr").exists()
    monkeypatch.undo()
    assert index_tars(tars).dataset.num_samples == 20


@pytest.mark.parametrize("fmt", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_tars_of_all_kinds(fmt, tmp_path):
    """PAX and GNU headers of long and foreign names, folders, and hidden files: the samples are
    those of WebDataset.
    """
    long = "a folder/" * (12 if fmt == tarfile.USTAR_FORMAT else 30)
    members = {f"{long}x.jpg": make_jpeg(1), f"{long}x.cls": b"1", "y.jpg": make_jpeg(2)}
    members |= {"y.CLS": b"2", "._y.jpg": b"hidden", "__meta__.json": b"{}", "no_extension": b""}
    if fmt != tarfile.USTAR_FORMAT:
        members["ü/ñ.jpg"] = make_jpeg(3)
    path = write_tar(tmp_path / "a.tar", members, fmt)
    index_tars(tmp_path)
    found = [dict(sample) for sample in read_samples(tmp_path).values()]
    stock = [sample for sample in stock_samples(str(path)) if "._y" not in sample["__key__"]]
    assert [sample["__key__"] for sample in found] == [sample["__key__"] for sample in stock]
    for one, other in zip(found, stock, strict=True):
        assert one == other


def test_what_is_not_indexed(tmp_path, dataset):
    """Shards, folders of images, other datasets' folders and tars of several folders are refused,
    each with what to do.
    """
    with pytest.raises(EncodeError, match="got a PCR shard"):
        index_tars(dataset, tmp_path / "index")
    (tmp_path / "src").mkdir()
    write_tar(tmp_path / "src" / "a.tar", members_of(0, 2))
    with pytest.raises(EncodeError, match="no other dataset there"):
        index_tars(tmp_path / "src", dataset)
    write_files(tmp_path / "images", {"cat/a.jpg": make_jpeg(1)})
    with pytest.raises(EncodeError, match=r"expected \.tar files"):
        index_tars(tmp_path / "images")
    for name in ("one", "two"):
        (tmp_path / "both" / name).mkdir(parents=True)
        write_tar(tmp_path / "both" / name / "a.tar", members_of(0, 2))
    with pytest.raises(EncodeError, match="index each folder by itself"):
        index_tars(f"{tmp_path}/both/{{one,two}}/a.tar")
    with pytest.raises(StorageError):
        index_tars(tmp_path / "nowhere")
    write_tar(tmp_path / "empty.tar", {"folder/": b""})
    with pytest.raises(EncodeError, match="it has no samples"):
        index_tars(tmp_path / "empty.tar")


@pytest.mark.parametrize(
    ("labels", "floats", "most"),
    [(False, False, 900), (True, False, 2100), (False, True, 2100), (True, True, 4200)],
    ids=["pictures", "labels", "PAX headers", "both"],
)
def test_bytes_read_while_indexing(labels, floats, most, tmp_path):
    """Of tars of pictures, indexing reads headers, labels and what says how large a picture is, in
    one request a sample: 1 % of 100 kB where a sample has no more than a header of 512 bytes.
    """
    rng = np.random.default_rng(0)
    head = make_jpeg(1, 100, 120)
    (tmp_path / "tars").mkdir()
    path = tmp_path / "tars" / "a.tar"
    with tarfile.open(path, "w") as tar:
        for i in range(100):
            sample = {"jpg": head + rng.bytes(100_000 - len(head)), "cls": b"1"}
            for name in ["jpg", "cls"][: 1 + labels]:
                info = tarfile.TarInfo(f"{i:04d}.{name}")
                info.size, info.mtime = len(sample[name]), i + 0.5 if floats else i
                tar.addfile(info, io.BytesIO(sample[name]))
    with servers.faulty(tmp_path / "tars") as server:
        index_tars(server.url("a.tar"), tmp_path / "index")
        requests = server.requests()
    read = sum(request.body_bytes for request in requests if request.method == "GET")
    assert read < 100 * most
    assert len(requests) < 120
    sizes = PCRDataset(tmp_path / "index").sizes
    assert sizes.tolist() == [[100, 120]] * 100


def test_tars_that_a_wids_index_lists(tars, tmp_path, caplog):
    """index and encode take the tars that a wids index names, relative to it, to its base, or by
    URL; another number of samples is said, and other JSON files are refused.
    """

    def wids(name, base, *shards):
        shardlist = [{"url": url, "nsamples": count, "filesize": 1} for url, count in shards]
        (tmp_path / name).write_text(json.dumps({"wids_version": 1, "shardlist": shardlist} | base))
        return tmp_path / name

    here = wids("a.json", {}, ("t1.tar", 5), (f"{tars}/t3.tar", 5))
    assert index_tars(here, tmp_path / "a").dataset.num_samples == 10
    assert [sample["__key__"] for sample in PCRDataset(tmp_path / "a")][::5] == ["k005", "k015"]
    assert not caplog.messages
    encode(here, tmp_path / "shards", workers=1)
    assert sorted(PCRDataset(tmp_path / "shards").keys) == sorted(PCRDataset(tmp_path / "a").keys)
    with servers.faulty(tars) as server:
        there = wids("b.json", {"base": server.url("")}, ("t0.tar", 4))
        assert index_tars(there, tmp_path / "b").dataset.num_samples == 5
        assert len(PCRDataset(tmp_path / "b")[4]["jpg"]) > 0
    (warning,) = (each for each in caplog.records if each.levelname == "WARNING")
    assert "4 samples, as the wids index says, got 5" in warning.getMessage()
    with pytest.raises(StorageError, match="t9"):
        index_tars(wids("c.json", {}, ("t9.tar", 1)))
    for other in ('{"images": []}', "[", '{"shardlist": [], "datasets": [{"source_url": "x"}]}'):
        (tmp_path / "d.json").write_text(other)
        with pytest.raises(EncodeError, match="expected a wids index"):
            index_tars(tmp_path / "d.json")


def test_an_indexed_source_can_be_encoded(tars, tmp_path):
    """The day that bytes matter, the same tars are encoded: the same samples, fewer bytes."""
    index_tars(tars)
    encode(f"{tars}/*.tar", tmp_path / "shards", workers=1)
    plain, shards = PCRDataset(tars, decoder=8), PCRDataset(tmp_path / "shards", decoder=8)
    for key in plain.keys:
        one, other = plain[key], shards[key]
        assert one["cls"] == other["cls"]
        assert (one["jpg"] == other["jpg"]).all()
