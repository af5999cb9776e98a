"""Samples to shards in one process: what can be kept is kept, the rest is refused."""

import tarfile

import pytest
import servers
from support import read_all, read_samples, run_encode, write_shard

from pcrshard import Shard, ShardFormat, ShardWriter, open_dataset, storage
from pcrshard.encoding.shard_writer import encode_sample
from pcrshard.errors import EncodeError, PCRError, StorageError
from pcrshard.testing import make_jpeg


@pytest.mark.parametrize(
    "wrong",
    [{"script": "none"}, {"layout": "flat"}, {"base": 0}, {"base": 11}],
)
def test_wrong_formats(wrong):
    """Invalid shard formats are refused."""
    with pytest.raises(EncodeError):
        ShardFormat(**wrong)


@pytest.mark.parametrize(("count", "script"), [(20, "q95"), (70, "levels")])
def test_a_writer_chooses_by_its_first_samples(tmp_path, count, script):
    """A writer whose script the images decide writes what it does with that script."""
    for name in ("auto", script):
        fmt = ShardFormat(name)
        with ShardWriter(tmp_path / name, fmt=fmt, samples_per_shard=3) as writer:
            for number in range(count):
                writer.write({"__key__": f"{number}", "jpg": make_jpeg(number, quality=95)})
    assert read_all(tmp_path / "auto") == read_all(tmp_path / script)


def test_shard_writer_and_encode_agree(synthetic_folder, dataset, tmp_path):
    """A ShardWriter given the same samples in the same order writes the same bytes."""
    samples = read_samples(dataset)
    index, _ = open_dataset(dataset)
    with ShardWriter(tmp_path, samples_per_shard=6, classes=index.classes) as writer:
        for key, sample in samples.items():
            writer.write(
                sample
                | {"jpg": (synthetic_folder / f"{key}.jpg").read_bytes(), "cls": int(sample["cls"])}
            )
    assert read_all(tmp_path) == read_all(dataset)


@pytest.mark.parametrize(
    "sample",
    [
        {},
        {"jpg": b""},
        {"__key__": 3, "jpg": b""},
        {"__key__": "a.b", "jpg": b""},
        {"__key__": "../a", "jpg": b""},
        {"__key__": "\udcff", "jpg": b""},
        {"__key__": "a", "JPG": b""},
        {"__key__": "a", "\udcff": b""},
        {"__key__": "a", "cls": None},
        {"__key__": "a", "json": {"x": {1}}},
        {"__key__": "a", "jpg": None},
        {"__key__": "a", "cls": "\udcff"},
    ],
    ids=repr,
)
def test_shard_writer_refuses(tmp_path, sample):
    """A sample that cannot be kept, or no sample at all, is one of our errors."""
    with pytest.raises(PCRError), ShardWriter(tmp_path) as writer:
        if sample:
            writer.write(sample)
    assert list(tmp_path.iterdir()) == []


def test_a_closed_writer_takes_no_sample(tmp_path):
    """A sample that no shard would ever hold is refused."""
    with ShardWriter(tmp_path) as writer:
        writer.write({"__key__": "a", "jpg": make_jpeg()})
    with pytest.raises(EncodeError, match="open writer"):
        writer.write({"__key__": "b", "jpg": make_jpeg()})


@pytest.mark.parametrize(("kind", "number"), [("jpg", 17), ("txt", 257)])
def test_more_fields_than_a_shard_can_name(tmp_path, kind, number):
    """What a reader would refuse is refused when it is written."""
    jpeg = make_jpeg()
    sample = {"__key__": "a", "jpg": jpeg} | {f"f{i}.{kind}": jpeg for i in range(number)}
    with pytest.raises(EncodeError), ShardWriter(tmp_path) as writer:
        writer.write(sample)


def test_the_smallest_indexes(tmp_path):
    """A sample of hardly more than its key is read as written, whether compression makes the index
    smaller, larger, no smaller, or so small that a reader would not trust it.
    """
    url = str(tmp_path / "a.tar")
    for fields in ({"png": b"x"}, *({"txt": bytes(size)} for size in (*range(40), 4000))):
        write_shard(url, [encode_sample({"__key__": "a"} | fields)], ShardFormat("standard"))
        assert list(Shard(url).samples()) == [{"__key__": "a"} | fields]


@pytest.mark.parametrize("base", [1, 2, 10])
def test_preview_layout(synthetic_folder, dataset, tmp_path, base):
    """The preview layout holds the same samples, and any tar tool sees images of its base scans
    with their labels.
    """
    fmt = ShardFormat(layout="preview", base=base, preview_fields=("cls",))
    run_encode(synthetic_folder, tmp_path, num_shards=2, fmt=fmt)
    assert read_samples(tmp_path) == read_samples(dataset)
    with tarfile.open(tmp_path / "data-000000.tar") as tar:
        members = {
            info.name: tar.extractfile(info).read()
            for info in tar
            if not info.name.startswith("__")
        }
    shard = {s["__key__"]: s for s in Shard(tmp_path / "data-000000.tar").samples(base)}
    assert members == {
        f"{key}.{field}": s[field] for key, s in shard.items() for field in ("jpg", "cls")
    }


def test_an_unknown_preview_field_is_refused(synthetic_folder, tmp_path):
    """A mistyped --preview-fields is an error, not a shard without it."""
    fmt = ShardFormat("standard", layout="preview", preview_fields=("clss",))
    with pytest.raises(EncodeError, match="clss"):
        run_encode(synthetic_folder, tmp_path, fmt=fmt)


def test_the_entry_describes_the_file(tmp_path):
    """Size and checksum in the dataset index are those of the file, so that a damaged copy is
    found.
    """
    samples = [encode_sample({"__key__": f"k{i}", "jpg": make_jpeg(i), "cls": i}) for i in range(3)]
    entry = write_shard(tmp_path / "a.tar", samples, ShardFormat("standard"))
    assert (entry.name, entry.num_samples) == ("a.tar", 3)
    assert entry.shard_bytes == (tmp_path / "a.tar").stat().st_size
    assert entry.head_crc32c == Shard(tmp_path / "a.tar").head.crc32c


def test_a_key_twice_in_a_shard(tmp_path):
    """Two samples of one key could not be told apart; the file is not written."""
    sample = encode_sample({"__key__": "k", "jpg": make_jpeg()})
    with pytest.raises(EncodeError, match="got 'k' more than once"):
        write_shard(str(tmp_path / "a.tar"), [sample, sample], ShardFormat("standard"))
    assert list(tmp_path.iterdir()) == []


def test_other_fields_become_bytes_as_webdataset_reads_them():
    """Numbers and text are kept as text, JSON as JSON."""
    fields = {"cls": 7, "txt": "é", "json": {"a": [1]}, "npy": bytearray(b"x")}
    fields |= {"box.json": (1, 2.5), "no.json": None}
    encoded = encode_sample({"__key__": "k", "__url__": "left out"} | fields)
    assert encoded.images == {}
    assert encoded.fields == {
        "cls": b"7",
        "txt": "é".encode(),
        "json": b'{"a": [1]}',
        "npy": b"x",
        "box.json": b"[1, 2.5]",
        "no.json": b"null",
    }


@pytest.fixture(params=["local", "s3", "memory"])
def destination(request, tmp_path):
    """An empty folder and its storage options."""
    if request.param == "s3":
        with servers.s3() as server:
            yield server.url("out"), server.storage_options
    else:
        name = f"memory://{tmp_path.name}/out"
        yield (str(tmp_path / "out") if request.param == "local" else name), {}


def test_two_writers_never_share_a_folder(destination):
    """The ranks of a job that all write to one folder: one of them has it, the others are told so
    at once, and no sample is lost.
    """
    url, options = destination
    with ShardWriter(url, storage_options=options) as writer:
        writer.write({"__key__": "first", "jpg": make_jpeg(0)})
        with pytest.raises(StorageError, match="use another folder"):
            ShardWriter(url, storage_options=options)
    with pytest.raises(StorageError, match="use another folder"):
        ShardWriter(url, storage_options=options)
    index, [shard] = open_dataset(url, storage_options=options)
    assert index.num_samples == 1
    assert [sample["__key__"] for sample in Shard(shard, storage_options=options)] == ["first"]


def test_a_writer_replaces_no_shard(destination):
    """A file that appeared in the folder meanwhile, under the name of a shard, stays what it is."""
    url, options = destination
    with (
        pytest.raises(StorageError),
        ShardWriter(url, samples_per_shard=1, storage_options=options) as writer,
    ):
        writer.write({"__key__": "a", "jpg": make_jpeg(0)})
        with storage.atomic_write(storage.join(url, "data-000001.tar"), options=options) as file:
            file.write(b"of another program")
        writer.write({"__key__": "b", "jpg": make_jpeg(1)})
    found = storage.read_bytes(storage.join(url, "data-000001.tar"), options=options)
    assert found == b"of another program"


def test_a_writer_takes_empty_folders_only(tmp_path):
    """Shards are not mixed with other files, and a writer that wrote nothing leaves nothing."""
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"it holds notes\.txt: use another folder"):
        ShardWriter(tmp_path)
    with pytest.raises(EncodeError, match="no sample"), ShardWriter(tmp_path / "out"):
        pass
    with ShardWriter(tmp_path / "out") as writer:
        writer.write({"__key__": "a", "jpg": make_jpeg()})
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "data-000000.tar", "pcr.columns", "pcr.json",
    ]  # fmt: skip
