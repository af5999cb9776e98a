"""Splits: a training and a validation set side by side are two datasets, numbered alike."""

import json

import pytest
from encode_support import make_tar, read_samples
from support import run_encode

from pcrshard import encode, open_dataset
from pcrshard.cli.main import main
from pcrshard.encoding.sources import list_source
from pcrshard.errors import EncodeError
from pcrshard.testing import make_jpeg


@pytest.fixture
def root(tmp_path):
    """An ImageFolder whose validation set lacks a class, and a test set without labels."""
    names = ["train/cat/1.jpg", "train/cat/2.jpg", "train/dog/3.jpg", "train/emu/4.jpg"]
    names += ["val/cat/5.jpg", "val/emu/6.jpg", "test/7.jpg", "test/8.jpg"]
    for number, name in enumerate(names):
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_jpeg(number))
    return tmp_path / "root"


def test_splits_are_not_mixed(root, tmp_path):
    """Encoding never mixes training and test images, and the error names the next step."""
    with pytest.raises(EncodeError, match=r"splits test, train, val.*--split all .*root DST"):
        encode(root, tmp_path / "pcr")
    assert not (tmp_path / "pcr").exists()


def test_all_splits_at_once(root, tmp_path, capsys):
    """--split all makes a dataset of each split, with one numbering of the classes."""
    options = ["--split", "all", "--num-shards", "2", "--workers", "1"]
    assert main(["encode", str(root), str(tmp_path / "pcr"), *options]) == 0
    assert sorted(path.name for path in (tmp_path / "pcr").iterdir()) == ["test", "train", "val"]
    for split in ("train", "val", "test"):
        index, _ = open_dataset(tmp_path / "pcr" / split)
        assert (index.classes, index.num_classes) == (("cat", "dog", "emu"), 3)
    labels = {
        key: int(sample["cls"]) for key, sample in read_samples(tmp_path / "pcr" / "val").items()
    }
    assert labels == {"cat/5": 0, "emu/6": 2}
    assert all("cls" not in sample for sample in read_samples(tmp_path / "pcr" / "test").values())
    assert main(["encode", str(root), str(tmp_path / "pcr"), *options, "--resume"]) == 0


def test_a_folder_of_splits_is_understood(root, tmp_path, capsys):
    """The other commands read the output of ``encode --split all``."""
    dst = tmp_path / "pcr"
    options = ["--num-shards", "1", "--workers", "1"]
    assert main(["encode", str(root), str(dst), "--split", "all", *options]) == 0
    for split in ("", "val"):
        against = ["--against", str(root / split), "--workers", "1"]
        assert main(["verify", str(dst / split), *against]) == 0
    assert main(["card", str(dst)]) == 0
    assert "val: 2 samples in 1 shards" in (dst / "README.md").read_text()
    assert main(["stage", str(dst), str(tmp_path / "fast"), "--scan", "2"]) == 0
    assert open_dataset(tmp_path / "fast" / "val")[0].scan == 2
    capsys.readouterr()
    assert main(["info", str(dst), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert {split: each["samples"] for split, each in about.items()} == {
        "test": 2,
        "train": 4,
        "val": 2,
    }
    (dst / "val" / "data-000000.tar").unlink()
    assert main(["verify", str(dst), "--workers", "1"]) == 1


def test_one_split_from_python(root, tmp_path):
    """From Python, ``split`` selects one split, and a missing split raises an error."""
    index = run_encode(root, tmp_path / "val", split="val")
    assert (index.num_samples, index.classes) == (2, ("cat", "dog", "emu"))
    with pytest.raises(EncodeError, match=r"\(test, train, val\), got 'dev'"):
        run_encode(root, tmp_path / "dev", split="dev")
    with pytest.raises(EncodeError, match="it has none"):
        run_encode(root / "train", tmp_path / "dev", split="train")


def test_folders_may_be_classes_all_the_same(root, tmp_path):
    """``split="none"`` treats folders with split names as classes."""
    assert run_encode(root, tmp_path / "pcr", split="none").classes == ("test", "train", "val")


def test_split_all_without_splits(root, tmp_path, capsys):
    """``split="all"`` is refused for a folder of classes without splits."""
    assert main(["encode", str(root / "train"), str(tmp_path / "pcr"), "--split", "all"]) == 1
    assert "omit --split" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["{split}/{n}.tar", "birds-{split}-{n}.tar", "{split}.{n}.tar"])
def test_tars_of_splits(tmp_path, layout):
    """Tars of several splits in one folder are told apart by folder or name."""
    for split in ("train", "validation"):
        path = tmp_path / "tars" / layout.format(split=split, n="000")
        path.parent.mkdir(parents=True, exist_ok=True)
        make_tar(path, [(f"{split}.jpg", make_jpeg()), (f"{split}.cls", b"1")])
    with pytest.raises(EncodeError, match="splits train, validation"):
        run_encode(tmp_path / "tars", tmp_path / "pcr")
    run_encode(tmp_path / "tars", tmp_path / "pcr", split="validation")
    assert read_samples(tmp_path / "pcr").keys() == {"validation"}


def test_patterns_of_splits(root, tmp_path):
    """A pattern that matches several splits mixes them as a folder would, and is refused alike."""
    with pytest.raises(EncodeError, match="splits train, val"):
        run_encode(f"{root}/*/*/*.jpg", tmp_path / "pcr")
    assert run_encode(f"{root}/train/*/*.jpg", tmp_path / "pcr").classes == ("cat", "dog", "emu")


@pytest.mark.parametrize("pattern", ["*/*/*.jpg", "**/*.jpg", "{train,val}/*/*.jpg"])
def test_a_split_of_a_pattern(root, tmp_path, monkeypatch, pattern):
    """The split is what the pattern matches in it, and not all that its folder holds."""
    (root / "val" / "cat" / "other.png").write_bytes(b"not an image")
    monkeypatch.chdir(root)
    for number, src in enumerate((pattern, f"{root}/{pattern}")):
        dst = tmp_path / str(number)
        assert run_encode(src, dst, split="val").classes == ("cat", "dog", "emu")
        assert read_samples(dst).keys() == {"cat/5", "emu/6"}


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["train/a.jpg", "test/a.jpg"], ["test", "train"]),
        (["Train/a.jpg", "Valid/a.jpg"], ["Train", "Valid"]),
        (["train/cat/a.jpg"], ["train"]),
        (["train/a.jpg", "val/a.jpg", "extra/a.jpg"], ["train", "val"]),
        (["bus/a.jpg", "train/a.jpg"], []),
        (["cat/a.jpg", "test/a.jpg", "val/b.jpg"], []),
        (["cat/train/a.jpg", "dog/val/a.jpg"], []),
        (["train.jpg", "val.jpg"], []),
        (["train-val.tar", "x.tar"], []),
        (["train-0.tar", "train-1.tar"], []),
        (["train/0.tar"], []),
    ],
)
def test_what_a_split_is(tmp_path, names, splits):
    """Splits are folders with the usual names, unless others make them look like classes."""
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".tar"):
            make_tar(tmp_path / name, [(f"{name.replace('/', '_')[:-4]}.jpg", b"")])
        else:
            (tmp_path / name).write_bytes(b"")
    assert list(list_source(str(tmp_path)).splits) == splits
