"""Splits: a training and a validation set side by side are two datasets, numbered alike."""

import json

import pytest
from encode_support import make_tar
from support import read_samples, run_encode, write_files

from pcrshard import open_dataset
from pcrshard.cli.main import main
from pcrshard.encoding.sources import find_splits
from pcrshard.errors import EncodeError
from pcrshard.testing import make_jpeg


@pytest.fixture
def root(tmp_path):
    """An ImageFolder whose validation set lacks a class, and a test set without labels."""
    names = ["train/cat/1.jpg", "train/cat/2.jpg", "train/dog/3.jpg", "train/emu/4.jpg"]
    names += ["val/cat/5.jpg", "val/emu/6.jpg", "test/7.jpg", "test/8.jpg"]
    return write_files(tmp_path / "root", {name: make_jpeg(ord(name[-5])) for name in names})


@pytest.fixture
def run(capsys):
    """Run a command; its status and standard output."""

    def run_command(*words):
        status = main(list(map(str, words)))
        return status, capsys.readouterr().out

    return run_command


def test_splits_are_not_mixed(root, tmp_path):
    """Encoding never mixes training and test images, and the error names the next step; a pattern
    that matches several splits mixes them as a folder would.
    """
    with pytest.raises(EncodeError, match=r"splits of .*root \(test, train, val\).*--split all"):
        run_encode(root, tmp_path / "pcr")
    with pytest.raises(EncodeError, match=r"\(train, val\)"):
        run_encode(f"{root}/*/*/*.jpg", tmp_path / "pcr")
    assert not (tmp_path / "pcr").exists()
    assert run_encode(f"{root}/train/*/*.jpg", tmp_path / "pcr").classes == ("cat", "dog", "emu")


def test_all_splits_at_once(root, tmp_path, run):
    """--split all makes a dataset of each split, with one numbering of the classes, and the other
    commands read that folder.
    """
    dst, fast = tmp_path / "pcr", tmp_path / "fast"
    encode = ["encode", root, dst, "--split", "all", "--num-shards", "2", "--workers", "1"]
    assert run(*encode)[0] == 0
    assert sorted(path.name for path in dst.iterdir()) == ["test", "train", "val"]
    for split in ("train", "val", "test"):
        index, _ = open_dataset(dst / split)
        assert (index.classes, index.num_classes) == (("cat", "dog", "emu"), 3)
    val = read_samples(dst / "val")
    assert {key: sample["cls"] for key, sample in val.items()} == {"cat/5": b"0", "emu/6": b"2"}
    assert all("cls" not in sample for sample in read_samples(dst / "test").values())
    assert run(*encode, "--resume")[0] == 0
    for split in ("", "val"):
        assert run("verify", dst / split, "--against", root, "--workers", "1")[0] == 0
    assert run("card", dst)[0] == 0
    assert "val: 2 samples in 2 shards" in (dst / "README.md").read_text()
    assert run("stage", dst, fast, "--scan", "2")[0] == 0
    assert open_dataset(fast / "val")[0].scan == 2
    about = json.loads(run("info", dst, "--json")[1])
    sizes = {split: each["samples"] for split, each in about.items()}
    assert sizes == {"test": 2, "train": 4, "val": 2}
    (dst / "val" / "data-000000.tar").unlink()
    assert run("verify", dst, "--workers", "1")[0] == 1


def test_one_split_from_python(root, tmp_path):
    """From Python, ``split`` selects one split, ``"none"`` takes splits for classes, and a missing
    split raises an error.
    """
    index = run_encode(root, tmp_path / "val", split="val")
    assert (index.num_samples, index.classes) == (2, ("cat", "dog", "emu"))
    assert run_encode(root, tmp_path / "all", split="none").classes == ("test", "train", "val")
    for src, message in ((root, r"\(test, train, val\), got 'dev'"), (root / "train", "has none")):
        with pytest.raises(EncodeError, match=message):
            run_encode(src, tmp_path / "dev", split="dev")


def test_split_all_without_splits(root, tmp_path, capsys):
    """``split="all"`` is refused for a folder of classes without splits."""
    assert main(["encode", str(root / "train"), str(tmp_path / "pcr"), "--split", "all"]) == 1
    assert "omit --split" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["{split}/{n}.tar", "birds-{split}-{n}.tar", "{split}.{n}.tar"])
def test_tars_of_splits(tmp_path, layout):
    """Tars of several splits in one folder are told apart by folder or name."""
    for split in ("train", "validation"):
        members = [(f"{split}.jpg", make_jpeg()), (f"{split}.cls", b"1")]
        make_tar(tmp_path / "tars" / layout.format(split=split, n="000"), members)
    with pytest.raises(EncodeError, match=r"\(train, validation\)"):
        run_encode(tmp_path / "tars", tmp_path / "pcr")
    run_encode(tmp_path / "tars", tmp_path / "pcr", split="validation")
    assert read_samples(tmp_path / "pcr").keys() == {"validation"}


@pytest.mark.parametrize("pattern", ["*/*/*.jpg", "**/*.jpg", "{train,val}/*/*.jpg"])
@pytest.mark.parametrize("is_absolute", [True, False])
def test_a_split_of_a_pattern(root, tmp_path, monkeypatch, pattern, is_absolute):
    """The split is what the pattern matches in it, and not all that its folder holds."""
    write_files(root, {"val/cat/other.png": b"not an image"})
    monkeypatch.chdir(root)
    src = f"{root}/{pattern}" if is_absolute else pattern
    assert run_encode(src, tmp_path / "dst", split="val").classes == ("cat", "dog", "emu")
    assert read_samples(tmp_path / "dst").keys() == {"cat/5", "emu/6"}


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
        if name.endswith(".tar"):
            make_tar(tmp_path / name, [(name.replace("/", "_").replace(".tar", ".jpg"), b"")])
        else:
            write_files(tmp_path, {name: b""})
    assert list(find_splits(str(tmp_path))) == splits
