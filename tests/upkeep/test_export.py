"""Shards back to ordinary files: nothing lost, nothing outside the target folder."""

import pathlib
import shutil

import pytest
import webdataset as wds
from PIL import Image
from support import damage, read_samples, saved, stock_samples, write_files

from pcrshard import EncodeOptions, Shard, ShardWriter, encode, open_dataset
from pcrshard.cli.main import main
from pcrshard.errors import CorruptIndex, CorruptJpeg, EncodeError, PCRError
from pcrshard.jpeg.markers import map_jpeg
from pcrshard.testing import make_jpeg
from pcrshard.upkeep.export import export_shard

SCANS = [1, 5, "full"]


def export(src, dst, scan="full", **options):
    index, urls = open_dataset(src)
    return sum(
        export_shard(Shard(url), str(dst), scan=scan, classes=index.classes, **options)
        for url in urls
    )


def files_of(folder):
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in pathlib.Path(folder).rglob("*")
        if p.is_file()
    }


def read_stock(folder):
    """What unmodified WebDataset makes of tars, by key."""
    urls = sorted(map(str, folder.glob("*.tar")))
    return {sample["__key__"]: sample for sample in stock_samples(urls)}


@pytest.mark.parametrize("scan", SCANS)
def test_a_folder_at_a_scan(dataset, tmp_path, scan):
    """A folder has each image once, at its own path, with that scan's bytes, and nothing else."""
    assert export(dataset, tmp_path, scan) == 24
    expected = {f"{key}.jpg": sample["jpg"] for key, sample in read_samples(dataset, scan).items()}
    assert files_of(tmp_path) == expected


@pytest.mark.parametrize("scan", SCANS)
def test_tars_at_a_scan_are_stock_webdataset(dataset, tmp_path, scan):
    """Unmodified WebDataset reads the exported tars, and gets the samples that the shards give."""
    assert export(dataset, tmp_path, scan, form="wds") == 24
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in dataset.glob("*.tar")}
    assert read_stock(tmp_path) == read_samples(dataset, scan)


@pytest.mark.parametrize("prefix", ["images.", ""])
def test_numbered_images_of_a_webdataset_are_a_list_and_come_back(tmp_path, prefix):
    """Stock WebDataset writes a, b, c with 3, 0 and 12 images; PCR has lists; export gives the same
    fields to stock WebDataset again.
    """
    (tmp_path / "src").mkdir()
    with wds.TarWriter(str(tmp_path / "src" / "x.tar")) as writer:
        for key, count in {"a": 3, "b": 0, "c": 12}.items():
            images = {f"{prefix}{i}.jpg": make_jpeg(i, 24, 16) for i in reversed(range(count))}
            writer.write({"__key__": key, **images, "json": b'{"n": 1}'})
    encode(tmp_path / "src", tmp_path / "pcr", workers=1)
    shown = read_samples(tmp_path / "pcr", 2)
    assert {key: len(sample[f"{prefix}jpg"]) for key, sample in shown.items()} == {
        "a": 3, "b": 0, "c": 12,
    }  # fmt: skip

    export(tmp_path / "pcr", tmp_path / "out", form="wds")
    source, exported = read_stock(tmp_path / "src"), read_stock(tmp_path / "out")
    assert {key: sample.keys() for key, sample in exported.items()} == {
        key: sample.keys() for key, sample in source.items()
    }


@pytest.mark.parametrize("scan", [1, 9, "full"])
def test_baseline_of_a_prefix_has_the_same_coefficients(dataset, tmp_path, jpegtran, djpeg, scan):
    """At lower scans the baseline file is what jpegtran makes of the prefix."""
    export(dataset, tmp_path, scan, baseline=True)
    prefixes = read_samples(dataset, scan)
    for name, jpeg in sorted(files_of(tmp_path).items())[::4]:
        assert (map_jpeg(jpeg).frame.sof, len(map_jpeg(jpeg).scans)) == (0xC0, 1)
        prefix = prefixes[name.removesuffix(".jpg")]["jpg"]
        assert djpeg(jpeg) == djpeg(jpegtran(prefix, "-copy", "none"))


def test_kept_files_have_their_own_extension_and_are_never_called_baseline(tmp_path, capsys):
    """A kept PNG comes back as a PNG; baseline leaves it out and counts it."""
    png = saved(Image.new("RGB", (8, 8)), "PNG")
    files = {"a.jpg": make_jpeg(), "b.png": png, "c.jpg": png, "d.jpg": make_jpeg()[:200]}
    encode(
        write_files(tmp_path / "src", files),
        tmp_path / "pcr",
        EncodeOptions(on_error="keep"),
        workers=1,
    )
    export(tmp_path / "pcr", tmp_path / "out")
    found = files_of(tmp_path / "out")
    assert found.keys() == {"a.jpg", "b.png", "c.png", "d.jpg"}
    assert (found["b.png"], found["c.png"], found["d.jpg"]) == (png, png, files["d.jpg"])
    folders = [str(tmp_path / "pcr"), str(tmp_path / "baseline")]
    assert main(["export", *folders, "--baseline", "--on-error", "skip"]) == 1
    assert files_of(folders[1]).keys() == {"a.jpg"}
    assert "left out: 3\n" in capsys.readouterr().out
    with pytest.raises(CorruptJpeg, match="key="):
        export(tmp_path / "pcr", tmp_path / "stopped", baseline=True)


def write_dataset(folder, samples, classes=()):
    with ShardWriter(folder, classes=classes) as writer:
        for key, fields in samples.items():
            writer.write({"__key__": key, "jpg": make_jpeg()} | fields)
    return folder


def test_class_folders(tmp_path):
    """Images whose key does not start with their class come under the class's name."""
    labels = {"x/1": 1, "cat/2": 0, "4": 7, "5": "1\n", "6": "x", "7": "9" * 5000}
    samples = {"3": {}} | {key: {"cls": label} for key, label in labels.items()}
    export(write_dataset(tmp_path / "pcr", samples, ["cat", "dog/big"]), tmp_path / "out")
    names = ["dog_big/x/1", "cat/2", "3", "4", "dog_big/5", "6", "7"]
    assert files_of(tmp_path / "out").keys() == {f"{name}.jpg" for name in names}


@pytest.mark.parametrize(
    "samples",
    [{"a": {"cls": 0}, "cat/a": {"cls": 0}}, {"d/a": {}, "d/./a": {}}, {"d/b": {}, "d//b": {}}],
)
def test_no_image_overwrites_another(tmp_path, samples):
    """Two samples never become one file: they are told apart, or refused."""
    try:
        write_dataset(tmp_path / "pcr", samples, ["cat"])
        export(tmp_path / "pcr", tmp_path / "out")
    except PCRError as error:
        assert "a" in str(error)
    else:
        assert len(files_of(tmp_path / "out")) == 2


@pytest.mark.parametrize("name", ["..", ".", "../..", "a/../../b", "\\", "a\0b", "/abs"])
def test_a_class_name_cannot_leave_the_folder(tmp_path, name):
    """Anyone may have written the class names: an image never lands outside the target."""
    write_dataset(tmp_path / "pcr", {"escaped": {"cls": 0}}, [name])
    before = files_of(tmp_path)
    try:
        export(tmp_path / "pcr", tmp_path / "deep" / "out")
    except PCRError:
        assert files_of(tmp_path) == before
    else:
        new = files_of(tmp_path).keys() - before.keys()
        assert all(path.startswith("deep/out/") for path in new)


@pytest.mark.parametrize("key", ["../a", "/aaa", "x/..", "..\\a", "a/../", "aa\0a", "....", "x.jp"])
def test_a_key_cannot_leave_the_folder(tmp_path, monkeypatch, key):
    """A key that leads out of a folder is refused when it is read, before a file is made."""
    monkeypatch.setattr("pcrshard.encoding.shard_writer.valid_key", lambda key: True)
    write_dataset(tmp_path / "pcr", {key: {}})
    with pytest.raises(CorruptIndex, match=r"key .* is not legal.*data-000000\.tar"):
        export(tmp_path / "pcr", tmp_path / "deep" / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"pcr"}


def test_a_damaged_shard_leaves_no_half_tar(dataset, tmp_path):
    """An export that fails half-way leaves no tar that looks whole."""
    shutil.copytree(dataset, tmp_path / "pcr")
    path = tmp_path / "pcr" / "data-000000.tar"
    damage(path, Shard(path).head.prefix_stops[-2] - 600)
    with pytest.raises(PCRError, match="key="):
        export_shard(Shard(path), str(tmp_path / "out"), form="wds")
    assert files_of(tmp_path / "out") == {}


def test_a_shard_is_not_replaced_by_its_own_export(dataset, tmp_path):
    """From Python as from the command line: the folder of the shard is no target for its tar."""
    path = tmp_path / "data-000000.tar"
    path.write_bytes((dataset / path.name).read_bytes())
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(EncodeError, match="another folder"):
        export_shard(Shard(f"file://{path}"), f"{tmp_path}/link", form="wds", overwrite=True)
    assert path.read_bytes() == (dataset / path.name).read_bytes()


@pytest.mark.parametrize("form", ["folder", "wds"])
def test_nothing_is_replaced_unasked(dataset, tmp_path, form):
    """A second export to a folder is refused, and what is there stays, unless it is asked for."""
    shard = Shard(dataset / "data-000000.tar")
    export_shard(shard, str(tmp_path), form=form)
    path = next(path for path in sorted(tmp_path.rglob("*")) if path.is_file())
    path.write_bytes(b"mine")
    with pytest.raises(EncodeError, match="the file exists"):
        export_shard(shard, str(tmp_path), form=form)
    assert path.read_bytes() == b"mine"
    export_shard(shard, str(tmp_path), form=form, overwrite=True)
    assert path.read_bytes() != b"mine"


@pytest.mark.parametrize("options", [[], ["--overwrite"]])
def test_nothing_is_written_through_a_link(dataset, tmp_path, options):
    """A subfolder that is a symlink is refused, since it may lead to someone else's files."""
    target, elsewhere = tmp_path / "target", tmp_path / "elsewhere"
    target.mkdir()
    elsewhere.mkdir()
    for name in ("cat", "dog"):
        (target / name).symlink_to(elsewhere)
    assert main(["export", str(dataset), str(target), *options]) == 1
    assert list(elsewhere.iterdir()) == []


def test_keys_that_no_file_can_have(tmp_path, capsys):
    """``--on-error skip`` leaves them out by name and writes all others."""
    write_dataset(tmp_path / "in", {key: {} for key in ("a", "a.jpg/b", "k" * 300, "good")})
    args = ["export", str(tmp_path / "in"), str(tmp_path / "out")]
    assert main(args) == 1
    shutil.rmtree(tmp_path / "out")
    capsys.readouterr()
    assert main([*args, "--on-error=skip"]) == 1
    said = capsys.readouterr()
    assert "left out: 2\n" in said.out
    assert len(said.err.splitlines()) == 2
    assert sorted(files_of(tmp_path / "out")) == ["a.jpg", "good.jpg"]
