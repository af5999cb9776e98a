"""Plain tars with an index: read as they are, like shards, but for levels."""

import io
import os
import shutil
import tarfile

import numpy as np
import pytest
import servers
import torch
import webdataset as wds
from numbered import flat, ids, numbered, write, write_tars
from PIL import Image, ImageCms
from support import CountingFS, saved, without_place, write_tar

from pcrshard import (
    Buckets,
    ImageDecoder,
    IndexOptions,
    PCRDataset,
    PCRError,
    PCRLoader,
    index_tars,
    open_dataset,
    stage,
)
from pcrshard.encoding import tar_index
from pcrshard.errors import CorruptPiece, ScanUnavailable, StorageError
from pcrshard.testing import make_jpeg

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The same 60 samples as shards and as plain tars, 6 each."""
    samples = numbered(60)
    tars = write_tars(tmp_path_factory.mktemp("tars"), samples)
    return write(tmp_path_factory.mktemp("shards"), samples), tars


def mixed_samples(count=24):
    """Samples with everything that fields may hold, and some without; no two alike."""
    samples = []
    for i in range(count):
        picture = make_jpeg(i, 40 + i, 70 - i, ("RGB", "L", "CMYK")[i % 3], quality=88)
        sample = {"__key__": f"dir/{i:04d}", "jpg": picture, "cls": str(i % 5).encode()}
        if i % 4:
            sample["json"] = b'{"box": [[1, 2, 20, 30]], "n": %d}' % i
        if i % 5 == 0:
            sample["txt"] = f"a caption {i} ü".encode()
        if i % 7 == 0:
            sample["npy"] = npy(np.arange(i + 600, dtype=np.float32))
        if i % 3 == 0:
            mask = np.full((40 + i, 70 - i), i, np.uint8)
            sample["seg.png"] = saved(Image.fromarray(mask), "PNG")
        samples.append(sample)
    return samples


def npy(array):
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def write_mixed(folder, samples, rows=5):
    """Plain tars of samples of bytes, and their index."""
    for number, start in enumerate(range(0, len(samples), rows)):
        own = samples[start : start + rows]
        members = {
            f"{sample['__key__']}.{name}": value
            for sample in own
            for name, value in sample.items()
            if name != "__key__"
        }
        write_tar(folder / f"part-{number:04d}.tar", members)
    index_tars(folder, options=IndexOptions(kinds={"seg.png": "mask"}))
    return str(folder)


# --- the same as shards, and as stock WebDataset


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 2}, {"threads": 2}, {"shuffle": False}, {"drop_last": "pad"}],
    ids=str,
)
def test_batches_are_those_of_shards(both, options):
    """A loader gives of plain tars, batch by batch and bit by bit, what it gives of shards of the
    same images: order, crops, labels and keys.
    """
    shards, tars = (PCRDataset(url, decoder=ImageDecoder(16, "random", flip=0.5)) for url in both)
    for _ in range(2):
        pairs = zip(
            PCRLoader(shards, 7, seed=3, **options),
            PCRLoader(tars, 7, seed=3, **options),
            strict=True,
        )
        for one, other in pairs:
            assert one["__key__"] == other["__key__"]
            assert torch.equal(one["cls"], other["cls"])
            assert torch.equal(one["jpg"], other["jpg"])


@pytest.mark.parametrize(("workers", "rows"), [(0, 1), (0, 24), (2, 5)])
def test_samples_are_those_of_stock_webdataset(tmp_path, workers, rows):
    """Fields, bytes and order are WebDataset's own, by the loader and by pcr_scan, in workers or
    not, whatever fields samples have or lack.
    """
    folder = write_mixed(tmp_path, mixed_samples(), rows)
    tars = sorted(str(path) for path in tmp_path.glob("*.tar"))
    stock = without_place(wds.WebDataset(tars, shardshuffle=False, empty_check=False))
    piped = wds.WebDataset(tars, shardshuffle=False, empty_check=False).pcr_scan(
        "full", index=folder
    )
    read = without_place(wds.WebLoader(piped, batch_size=None, num_workers=workers))
    by_key = lambda sample: sample["__key__"]
    assert sorted(read, key=by_key) == stock
    dataset = PCRDataset(folder)
    batches = PCRLoader(dataset, 5, shuffle=False, num_workers=workers, threads=0)
    found = []
    for batch in batches:
        columns = {name: list(values) for name, values in batch.items()}
        found += [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        ]
    assert [sample["__key__"] for sample in found] == [sample["__key__"] for sample in stock]
    decoded = list(wds.WebDataset(tars, shardshuffle=False, empty_check=False).decode())
    for number, (sample, raw, plain) in enumerate(zip(found, stock, decoded, strict=True)):
        assert sample["jpg"] == raw["jpg"]
        assert int(sample["cls"]) == plain["cls"]
        assert sample.get("json") == plain.get("json")
        one = dataset[number]
        assert one["jpg"] == raw["jpg"]
        assert one.keys() == raw.keys()
        if "npy" in raw:
            assert np.array_equal(one["npy"], plain["npy"])
        assert one.get("seg.png") == raw.get("seg.png")


@pytest.mark.parametrize(("world", "workers"), [(1, 2), (2, 0), (3, 2)])
def test_ranks_and_workers_share_the_samples(both, world, workers):
    """Each sample of plain tars is read once by all ranks and workers together."""
    seen = []
    for rank in range(world):
        how = {"rank": rank, "world_size": world, "num_workers": workers}
        seen += flat(ids(PCRLoader(PCRDataset(both[1], fields=None), 3, drop_last=False, **how)))
    assert sorted(seen) == list(range(60))


def test_masks_boxes_and_sizes(tmp_path):
    """Typed fields follow the crop of their picture, and sizes are known without reading it."""
    samples = mixed_samples(12)
    folder = write_mixed(tmp_path, samples)
    dataset = PCRDataset(folder, decoder=ImageDecoder(24, "random"))
    assert dataset.sizes.tolist() == [[40 + i, 70 - i] for i in range(12)]
    assert dataset.labels.tolist() == [i % 5 for i in range(12)]
    assert dataset.decodable.all()
    found = dataset[9]
    assert found["seg.png"].shape == (24, 24)
    assert (found["seg.png"] == 9).all()
    buckets = Buckets(pixels=40 * 70 * 3)
    batches = list(PCRLoader(PCRDataset(folder, decoder=ImageDecoder()), 4, buckets=buckets))
    assert sum(len(batch["__key__"]) for batch in batches) == 12


def test_orientation_and_sizes_of_turned_pictures(tmp_path):
    """Sizes are those of the upright picture, also behind a thumbnail of kilobytes; a picture whose
    first bytes do not tell has no size.
    """
    exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"
    xmp = b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta/>"
    plain = make_jpeg(1, 30, 50)
    long = xmp + bytes(3000)
    short, later = (
        plain[:2] + b"\xff\xe1" + (2 + len(text)).to_bytes(2) + text + plain[2:]
        for text in (xmp, long)
    )
    members = {
        "0.jpg": make_jpeg(0, 30, 50, exif=exif),
        "1.jpg": make_jpeg(0, 30, 50, exif=exif + bytes(40000)),
        "2.jpg": make_jpeg(0, 30, 50, icc_profile=bytes(9000)),
        "3.jpg": later,
        "4.png": saved(Image.fromarray(np.zeros((7, 9), np.uint8)), "PNG"),
        "5.webp": saved(Image.fromarray(np.zeros((7, 9, 3), np.uint8)), "WEBP"),
        "6.webp": saved(Image.fromarray(np.zeros((7, 9, 3), np.uint8)), "WEBP", lossless=True),
        "7.gif": saved(Image.fromarray(np.zeros((7, 9), np.uint8)), "GIF"),
        "8.jpg": b"no picture",
        "9.jpg": b"",
        "10.jpg": short,
    }
    write_tar(tmp_path / "a.tar", members)
    index_tars(tmp_path)
    dataset = PCRDataset(tmp_path)
    expected = [[50, 30], [50, 30], [30, 50], [0, 0], *[[7, 9]] * 4, [0, 0], [0, 0]]
    expected.append([30, 50])
    assert dataset.sizes.tolist() == expected
    decoded = PCRDataset(tmp_path, decoder=ImageDecoder(), on_error="replace")
    for number in range(3):
        assert list(decoded[number]["jpg"].shape[1:]) == expected[number]


def test_lists_of_images(tmp_path):
    """Numbered images are a list of the sample, as in shards."""
    images = [make_jpeg(i, 16, 16) for i in range(5)]
    members = {f"a.views.{i}.jpg": image for i, image in enumerate(images[:3])}
    members |= {f"b.views.{i}.jpg": image for i, image in enumerate(images[3:])}
    write_tar(tmp_path / "a.tar", members)
    index_tars(tmp_path)
    dataset = PCRDataset(tmp_path)
    assert [sample["views.jpg"] for sample in map(dataset.__getitem__, range(2))] == [
        images[:3],
        images[3:],
    ]


def test_colors_of_profiles(tmp_path):
    """With color="srgb", the pixels of JPEGs with a profile are those of shards; the threads decode
    them, as they decode others.
    """
    wide = ImageCms.createProfile("LAB")
    profiles = [b"", ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()]
    profiles.append(ImageCms.ImageCmsProfile(wide).tobytes())
    samples = [
        {"__key__": f"{i}", "jpg": make_jpeg(i, 40, 40, icc_profile=profiles[i % 3])}
        for i in range(6)
    ]
    for name in ("tars", "shards"):
        (tmp_path / name).mkdir()
    urls = [write_tars(tmp_path / "tars", samples), write(tmp_path / "shards", samples)]
    decoder = ImageDecoder(24, "random", color="srgb")
    one, other = (next(iter(PCRLoader(PCRDataset(url, decoder=decoder), 6))) for url in urls)
    assert one["__key__"] == other["__key__"]
    assert torch.equal(one["jpg"], other["jpg"])


def test_a_parted_tar_reads_the_same(tmp_path, monkeypatch):
    """A large tar is cut into parts, which are shards of their own: order, names and stages."""
    samples = mixed_samples()
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    write_mixed(tmp_path / "whole", samples, 24)
    monkeypatch.setattr(tar_index, "PART_BYTES", 9000)
    parted = write_mixed(tmp_path / "parts", samples, 24)
    index, urls = open_dataset(parted)
    assert len(index.shards) == len(urls) > 3
    assert set(urls) == {f"{parted}/part-0000.tar"}
    whole = PCRDataset(tmp_path / "whole")
    for dataset in (PCRDataset(parted), PCRDataset(f"{parted}/part-0000.tar")):
        assert dataset.keys == whole.keys
        assert dataset.labels.tolist() == whole.labels.tolist()
        for number in range(24):
            assert str(dataset[number]) == str(whole[number])
    stage(parted, tmp_path / "staged", "full")
    staged = PCRDataset(tmp_path / "staged")
    assert [str(staged[i]) for i in range(24)] == [str(whole[i]) for i in range(24)]
    with pytest.raises(ScanUnavailable, match="only one of plain tars, got 2"):
        PCRDataset(tmp_path / "staged", scan=2)
    piped = wds.WebDataset(f"{parted}/part-0000.tar", shardshuffle=False)
    assert len(list(piped.pcr_scan("full", index=parted))) == 24


# --- what there is not


@pytest.mark.parametrize("scan", [1, 2, 0.5])
def test_other_scans_are_refused_with_advice(both, scan):
    """Plain tars have no levels; the error says what would."""
    with pytest.raises(ScanUnavailable, match=r"only one of plain tars, .*pcrshard encode"):
        PCRDataset(both[1], scan=scan)
    dataset = PCRDataset(both[1], scan=0)
    assert dataset[7] == {"__key__": "k007", "cls": 7}


def test_shards_and_plain_tars_in_one_loader(both):
    """A mixture of both is one dataset, at full fidelity."""
    dataset = PCRDataset(list(both), decoder=ImageDecoder(8))
    assert len(dataset) == 120
    seen = flat(ids(PCRLoader(dataset, 5, weights=[1, 1], num_samples=60, drop_last=False)))
    assert len(seen) == 60
    assert sorted(flat(ids(PCRLoader(dataset, 5, drop_last=False)))) == sorted([*range(60)] * 2)
    # Shards may be read at less; tars have one quality.
    mixed = PCRDataset(list(both), quality=0.9, decoder=ImageDecoder(8))
    assert mixed.scan.scans[1] == "full"
    assert sorted(flat(ids(PCRLoader(mixed, 5, drop_last=False)))) == sorted([*range(60)] * 2)


# --- what is read


def test_a_subset_reads_little(tmp_path):
    """A few samples of large tars are read by themselves, those close to each other at once, also
    at random; the rest of the tar is not.
    """
    rng = np.random.default_rng(0)
    members = {
        f"{i:03d}.{name}": value
        for i in range(200)
        for name, value in (("bin", rng.bytes(100_000)), ("cls", b"%d" % i))
    }
    write_tar(tmp_path / "a.tar", members)
    (tmp_path / "index").mkdir()
    index_tars(f"counting://{tmp_path}/a.tar", tmp_path / "index")
    dataset = PCRDataset(tmp_path / "index")
    picked = dataset.subset([3, 4, 5, 120])
    CountingFS.requests.clear()
    batches = PCRLoader(picked, 2, shuffle=False)
    assert ids(batches) == [[3, 4], [5, 120]]
    assert [len(value) for batch in PCRLoader(picked, 2) for value in batch["bin"]] == [100_000] * 4
    read = sum(stop - start for path, start, stop in CountingFS.requests if path.endswith(".tar"))
    assert read < 2 * 410_000
    CountingFS.requests.clear()
    assert dataset[77]["bin"] == members["077.bin"]
    tar = [stop - start for path, start, stop in CountingFS.requests if path.endswith(".tar")]
    assert tar == [100_000]


def test_tars_on_a_web_server(both, tmp_path):
    """Tars on a server that lists nothing are read by an index in a local folder: each with one
    request, of which the answer says that the tar is still the same.
    """
    with servers.faulty(both[1]) as server:
        index_tars(f"{server.url()}data-{{000000..000009}}.tar", tmp_path)
        dataset = PCRDataset(tmp_path, decoder=8)
        server.reset()
        seen = flat(ids(PCRLoader(dataset, 6, drop_last=False)))
        assert sorted(seen) == list(range(60))
        requests = server.requests()
        assert [request.method for request in requests] == ["GET"] * 10
        assert dataset[33]["cls"] == 33
        server.reset()
        picked = PCRLoader(dataset.subset([1, 20, 44]), 3, shuffle=False)
        assert ids(picked) == [[1, 20, 44]]
        tars = [request for request in server.requests() if request.method == "GET"]
        assert len(tars) == 3
        assert sum(request.body_bytes for request in tars) < 3 * 2000


def test_tars_in_an_object_store(both, s3):
    """Tars and their indexes in a bucket: indexed, read, and refused once one is replaced."""
    for number in range(3):
        name = f"data-{number:06d}.tar"
        with open(f"{both[1]}/{name}", "rb") as file:
            s3.put(f"/plain/{name}", file.read())
    url, options = f"s3://{s3.bucket}/plain", s3.storage_options
    done = index_tars(url, storage_options=options)
    assert done.num_listed == 3
    dataset = PCRDataset(url, decoder=8, storage_options=options)
    assert dataset.labels.tolist() == list(range(18))
    assert sorted(flat(ids(PCRLoader(dataset, 6)))) == list(range(18))
    assert index_tars(url, storage_options=options).num_listed == 0
    with open(f"{both[1]}/data-000007.tar", "rb") as file:
        s3.put("/plain/data-000001.tar", file.read())
    with pytest.raises(StorageError, match="not the version that was indexed"):
        dataset[7]
    assert index_tars(url, storage_options=options).num_listed == 1
    assert PCRDataset(url, storage_options=options)[7]["cls"] == 43


# --- the cache


def test_a_cache_keeps_what_was_read(both, tmp_path):
    """A second epoch, and a second job, read plain tars from the cache; so do subsets, which keep
    only what they need.
    """
    url = f"counting://{both[1]}"
    (tmp_path / "index").mkdir()
    index_tars(url, tmp_path / "index")
    options = {"cache_dir": tmp_path / "cache", "decoder": 8}
    for chosen in (None, [1, 2, 30]):
        for _ in range(2):
            dataset = PCRDataset(tmp_path / "index", **options)
            view = dataset if chosen is None else dataset.subset(chosen)
            CountingFS.requests.clear()
            loader = PCRLoader(view, 3, drop_last=False)
            first, second = flat(ids(loader)), flat(ids(loader))
            assert sorted(first) == sorted(second) == (chosen or list(range(60)))
        assert CountingFS.requests == []
        assert dataset[2]["cls"] == 2


# --- stale and damaged tars


@pytest.fixture
def copies(both, tmp_path):
    """A copy of the plain tars, and of the index that they have."""
    for path in sorted(os.listdir(both[1])):
        shutil.copy2(os.path.join(both[1], path), tmp_path)
    return tmp_path


def test_a_tar_that_changed_is_refused_until_it_is_indexed(copies):
    """Other bytes in the place of a tar are never read by its old index, even of the same size;
    indexing again lists that tar alone.
    """
    path = copies / "data-000003.tar"
    members = {f"new{i}.{name}": b"7" for i in range(4) for name in ("jpg", "cls")}
    size = path.stat().st_size
    write_tar(path, members)
    with open(path, "ab") as file:
        file.write(bytes(size - path.stat().st_size))
    dataset = PCRDataset(copies)
    with pytest.raises(StorageError, match=r"not the version that was indexed.*pcrshard index"):
        dataset[20]
    with pytest.raises(StorageError, match="not the version that was indexed"):
        list(PCRLoader(dataset, 6))
    replaced = PCRLoader(PCRDataset(copies, on_error="replace"), 6, shuffle=False)
    assert flat(ids(replaced))[:18] == list(range(18))
    assert replaced.stats().num_replaced == 6
    done = index_tars(copies)
    assert (done.num_tars, done.num_listed) == (10, 1)
    dataset = PCRDataset(copies)
    assert len(dataset) == 58
    assert dataset["new2"]["jpg"] == b"7"


@pytest.mark.parametrize("how", ["grows", "is cut off"])
def test_a_tar_that_changes_in_an_epoch(copies, how):
    """A tar that grows or loses its end between two batches ends the epoch with its name, or its
    samples are replaced; by an index with checksums one that has grown is read on.
    """
    index_tars(copies, copies / "checked", IndexOptions(checksums=True))
    path = copies / "data-000007.tar"
    before = path.read_bytes()
    changed = before + bytes(10240) if how == "grows" else before[:4000]

    def labels(folder, **options):
        path.write_bytes(before)
        os.utime(path, ns=(0, written))
        loader = PCRLoader(PCRDataset(folder, **options), 6, shuffle=False, threads=0)
        batches = iter(loader)
        found = [next(batches)["cls"].tolist()]
        path.write_bytes(changed)
        return found + [batch["cls"].tolist() for batch in batches], loader.stats()

    written = path.stat().st_mtime_ns
    with pytest.raises(PCRError, match=r"data-000007\.tar"):
        labels(copies)
    found, stats = labels(copies, on_error="replace")
    assert flat(found)[:42] == list(range(42))
    assert (len(flat(found)), stats.num_replaced) == (60, 6)
    if how == "grows":
        assert flat(labels(copies / "checked")[0]) == list(range(60))


def test_an_index_with_checksums_is_of_any_copy(both, tmp_path):
    """With checksums, a copy of another time is read, a damaged sample is found, and the others
    are read; a tar that has grown is read as it was.
    """
    for name in os.listdir(both[1]):
        if name.endswith(".tar"):
            shutil.copy(os.path.join(both[1], name), tmp_path)
    index_tars(tmp_path, options=IndexOptions(checksums=True))
    path = tmp_path / "data-000001.tar"
    data = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        place = tar.getmember("k008.jpg").offset_data + 200
    data[place] ^= 4
    path.write_bytes(data + bytes(5120))
    dataset = PCRDataset(tmp_path, decoder=8)
    with pytest.raises(CorruptPiece, match=r"CRC-32C.*data-000001.tar.*k008"):
        dataset[8]
    assert dataset[9]["cls"] == 9
    replacing = PCRDataset(tmp_path, decoder=8, on_error="replace")
    loader = PCRLoader(replacing, 6, shuffle=False)
    assert flat(ids(loader))[6:12] == [6, 7, 9, 9, 10, 11]
    assert list(loader.stats().replaced) == ["k008"]
    view = replacing.subset([8, 40])
    assert ids(PCRLoader(view, 2, shuffle=False)) == [[9, 40]]


@pytest.mark.parametrize("how", ["shorter", "gone", "another index", "cut index"])
def test_what_is_missing_is_named(copies, how):
    """A tar that was cut off, or is gone, and an index of another tar, are errors that name it."""
    path = copies / "data-000002.tar"
    index = copies / "data-000002.tar.pcr"
    if how == "shorter":
        os.truncate(path, 3000)
    elif how == "gone":
        path.unlink()
    elif how == "cut index":
        os.truncate(index, 1200)
    else:
        shutil.copy(copies / "data-000004.tar.pcr", index)
    dataset = PCRDataset(copies)
    with pytest.raises(PCRError, match=r"data-000002\.tar"):
        dataset[13]
    kept = PCRLoader(PCRDataset(copies, on_error="replace"), 6, shuffle=False)
    assert len(flat(ids(kept))) == 60
