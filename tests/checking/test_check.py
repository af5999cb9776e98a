"""Checks of datasets: planted faults are found, and nothing in sound sets."""

import io
import itertools
import json
import os
import shutil
import warnings

import pytest
from PIL import Image, ImageCms
from support import damage, saved, write_files

from pcrshard import (
    EncodeOptions,
    PCRDataset,
    ShardFormat,
    ShardWriter,
    encode,
    open_dataset,
    stage,
)
from pcrshard.cli.main import main
from pcrshard.testing import make_jpeg

CLASSES = "abc"


def pictures(split, count, **options):
    """Sound files of a split: ``count`` pictures in each of three classes."""
    first = 0 if split == "train" else 1000
    numbers = itertools.count(first)
    return {
        f"{name}/{split}{number}.jpg": make_jpeg(next(numbers), 64, 80, quality=85, **options)
        for name in CLASSES
        for number in range(count)
    }


def encoded(folder, files, **options):
    """A dataset of files, of which those that cannot be divided into scans are kept."""
    write_files(folder.with_name(folder.name + "-source"), files)
    script = options.pop("script", None)
    fmt = {} if script is None else {"fmt": ShardFormat(script=script)}
    given = EncodeOptions(on_error="keep", **fmt, **options)
    encode(str(folder.with_name(folder.name + "-source")), str(folder), given, workers=1)
    return folder


def found(report):
    """The kinds of the findings that make results wrong, and of the others."""
    wrong = {each.kind for each in report.findings if each.is_wrong}
    return wrong, {each.kind for each in report.findings} - wrong


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Files of a sound training set and a sound validation set."""
    return pictures("train", 14), pictures("val", 12)


def wide_profile():
    """A profile of other primaries than sRGB's: its red and blue are exchanged."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    red, blue = profile.index(b"rXYZ", 128), profile.index(b"bXYZ", 128)
    profile[red : red + 4], profile[blue : blue + 4] = b"bXYZ", b"rXYZ"
    return bytes(profile)


def lossless_copy(jpeg):
    """The same pixels as another file: a PNG."""
    return saved(Image.open(io.BytesIO(jpeg)), "PNG")


def worse(files, name, **options):
    """The files of a class, compressed again."""
    return {
        path: saved(Image.open(io.BytesIO(data)), "JPEG", **options)
        for path, data in files.items()
        if path.startswith(name)
    }


def gray(files, name):
    """The files of a class in gray, stored with three channels."""
    return {
        path: saved(Image.open(io.BytesIO(data)).convert("L").convert("RGB"), "JPEG", quality=85)
        for path, data in files.items()
        if path.startswith(name)
    }


# A fault of files, by name: how it changes the two sets, and what is found.
FAULTS = {
    "the same file in both splits": (
        lambda train, val: (train, val | {"a/other.jpg": train["a/train3.jpg"]}),
        "same-picture-in-two-splits",
        True,
    ),
    "the same pixels in another file": (
        lambda train, val: (train, val | {"a/o.jpg": make_jpeg(3, 64, 80, quality=85, exif=b"x")}),
        "same-picture-in-two-splits",
        True,
    ),
    "the same picture in two classes": (
        lambda train, val: (train | {"b/other.jpg": train["a/train3.jpg"]}, val),
        "same-picture-other-label",
        True,
    ),
    "the same picture twice in a class": (
        lambda train, val: (train | {"a/other.jpg": train["a/train3.jpg"]}, val),
        "same-picture-twice",
        False,
    ),
    "a file that is no image": (
        lambda train, val: (train | {"a/other.jpg": b"\xff\xd8\xff" + bytes(500)}, val),
        "undecodable",
        True,
    ),
    "a class of lower quality": (
        lambda train, val: (train | worse(train, "b", quality=30), val),
        "shortcut",
        True,
    ),
    "a gray class": (lambda train, val: (train | gray(train, "c"), val), "shortcut", False),
    "a class with a color profile": (
        lambda train, val: (
            train | worse(train, "c", quality=85, icc_profile=wide_profile()),
            val,
        ),
        "shortcut",
        False,
    ),
    "a class of few samples": (
        lambda train, val: (train | {"d/1.jpg": make_jpeg(5000), "d/2.jpg": make_jpeg(5001)}, val),
        "few-samples",
        False,
    ),
    "a class only in validation": (
        lambda train, val: (train, val | {"d/1.jpg": make_jpeg(5000), "d/2.jpg": make_jpeg(5001)}),
        "untrained-class",
        True,
    ),
    "another class at a number": (
        lambda train, val: (train, {path: data for path, data in val.items() if path[0] != "b"}),
        "classes-differ",
        True,
    ),
    "a picture of a few pixels": (
        lambda train, val: (train | {"a/other.jpg": make_jpeg(5000, 4, 6)}, val),
        "tiny",
        False,
    ),
    "a strip": (
        lambda train, val: (train | {"a/other.jpg": make_jpeg(5000, 40, 640)}, val),
        "narrow",
        False,
    ),
    "validation of lower quality": (
        lambda train, val: (
            train,
            {path: data for name in CLASSES for path, data in worse(val, name, quality=20).items()},
        ),
        "splits-differ",
        False,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name, sound, tmp_path):
    """Each planted fault is found, and nothing else."""
    plant, kind, is_wrong = FAULTS[name]
    train, val = plant(*sound)
    train_set = PCRDataset(encoded(tmp_path / "train", train))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "two datasets number")
        val_set = PCRDataset(encoded(tmp_path / "val", val))
    report = train_set.check(val_set)
    wrong, others = found(report)
    assert kind in (wrong if is_wrong else others), str(report)
    also = {"untested-class"} if name.startswith(("a class of few", "another class")) else set()
    also |= {"splits-differ"} if "gray" in name or "profile" in name else set()
    also |= {"few-samples"} if name == "a class only in validation" else set()
    assert wrong | others <= {kind, *also}, str(report)
    assert bool(report) == (not is_wrong)


def test_a_missing_class_is_named_whatever_the_numbers(sound, tmp_path):
    """If two sets number their classes differently, the class that one lacks is still named."""
    train, val = sound
    val = {path: data for path, data in val.items() if path[0] != "b"}
    train_set = PCRDataset(encoded(tmp_path / "train", train))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "two datasets number")
        val_set = PCRDataset(encoded(tmp_path / "val", val))
    texts = {each.kind: each.text for each in train_set.check(val_set).findings}
    assert texts["untested-class"].endswith("without samples in validation: b")


def test_nothing_is_found_in_sound_sets(sound, tmp_path):
    """Sound sets have no finding, as sets, as views of one set, and with near pictures."""
    train, val = (PCRDataset(encoded(tmp_path / str(n), files)) for n, files in enumerate(sound))
    assert found(train.check(val, near=True)) == (set(), set())
    assert found(train.check()) == (set(), set())
    first, second = train.split([0.5, 0.5])
    assert found(first.check(second)) == (set(), set())


def test_views_share_a_picture(sound, tmp_path):
    """A picture that is twice in a dataset may be on both sides of a random split."""
    train, _ = sound
    copy = {"a/other.jpg": train["a/train3.jpg"]}
    dataset = PCRDataset(encoded(tmp_path / "set", train | copy))
    place, other = (dataset.keys.index(key) for key in ("a/train3", "a/other"))
    without = [number for number in range(len(dataset)) if number != other]
    report = dataset.subset(without).check(dataset.subset([other, place - 1, place - 2]))
    assert "same-picture-in-two-splits" in found(report)[0]
    assert found(dataset.subset(without).check()) == (set(), set())


@pytest.mark.parametrize("script", [None, "q95", "levels"])
def test_a_kept_file_and_another_script_are_the_same_picture(script, sound, tmp_path):
    """Equal pixels count, not equal bytes: a PNG of a JPEG, and other scans."""
    train, val = sound
    if script is None:
        val = val | {"a/o.png": lossless_copy(train["a/train3.jpg"])}
    else:
        val = val | {f"a/o{n}.jpg": train[f"a/train{n}.jpg"] for n in range(10)}
    sets = (
        PCRDataset(encoded(tmp_path / "train", train)),
        PCRDataset(encoded(tmp_path / "val", val, script=script)),
    )
    (same,) = (each for each in sets[0].check(sets[1]).findings if "same" in each.kind)
    assert same.count == (1 if script is None else 10)


def test_levels_of_other_slopes_are_noted(sound, tmp_path):
    """A scan of two sets that were encoded apart is another quality, unless one has the levels of
    the other.
    """
    train, val = (
        PCRDataset(encoded(tmp_path / name, files, script="levels"))
        for name, files in zip(("train", "val"), sound, strict=True)
    )
    (finding,) = train.check(val).findings
    assert finding.kind == "splits-differ"
    assert f"--levels-of {tmp_path / 'train'}" in finding.text
    options = EncodeOptions(fmt=ShardFormat(open_dataset(str(tmp_path / "train"))[0].levels))
    encode(tmp_path / "val-source", tmp_path / "same", options, workers=1)
    assert not train.check(PCRDataset(tmp_path / "same")).findings


def test_near_copies_are_found_if_asked(sound, tmp_path):
    """A smaller, recompressed copy of a training picture is reported with near=True."""
    train, val = sound
    large = make_jpeg(9000, 256, 320)
    small = saved(Image.open(io.BytesIO(large)).resize((250, 200), Image.LANCZOS), "JPEG")
    sets = [
        PCRDataset(encoded(tmp_path / name, files))
        for name, files in (
            ("train", train | {"a/l.jpg": large}),
            ("val", val | {"a/s.jpg": small}),
        )
    ]
    assert found(sets[0].check(sets[1])) == (set(), set())
    report = sets[0].check(sets[1], near=True)
    assert found(report) == (set(), {"alike-in-two-splits"})
    assert {each.key for each in report.findings[0].groups[0]} == {"a/l", "a/s"}


def test_a_class_of_one_of_two_datasets(sound, tmp_path):
    """A class that only a dataset of other fidelity has can be told by the fidelity."""
    train, _ = sound
    own = {path: data for path, data in train.items() if path[0] != "c"}
    other = {
        path.replace("train", "x"): data for path, data in worse(train, "c", quality=25).items()
    }
    other |= {f"a/x{n}.jpg": make_jpeg(7000 + n, 64, 80, quality=25) for n in range(12)}
    names = ("a", "b", "c")
    sets = [
        encoded(tmp_path / name, files, classes=names)
        for name, files in (("one", own), ("two", other))
    ]
    report = PCRDataset(sets).check()
    assert "fidelity-tells-class" in found(report)[0]
    alike = encoded(tmp_path / "three", train, classes=names)
    assert "fidelity-tells-class" not in found(PCRDataset([sets[0], alike]).check())[0]


def test_the_command(sound, tmp_path, capsys):
    """The command prints a page, JSON, and a sheet with the pictures; the status says wrong."""
    train, val = sound
    copy = {"a/<b>.jpg": train["a/train3.jpg"]}
    train_set = encoded(tmp_path / "train", train)
    val_set = encoded(tmp_path / "val", val | copy)
    assert main(["check", str(train_set)]) == 0
    assert "nothing found" in capsys.readouterr().out
    page = tmp_path / "sheet.html"
    assert main(["check", str(train_set), str(val_set), "--sheet", str(page)]) == 1
    assert "WRONG: 1 picture" in capsys.readouterr().out
    assert page.read_text().count("<img") == 2
    assert "<b>" not in page.read_text()
    assert main(["check", str(train_set), str(val_set), "--json"]) == 1
    (each,) = json.loads(capsys.readouterr().out)["findings"]
    assert sorted(picture["key"] for picture in each["samples"][0]) == ["a/<b>", "a/train3"]
    assert main(["check", str(train_set), "--mix", str(val_set)]) == 0
    assert "note: 1 picture" in capsys.readouterr().out
    # A folder of splits is checked as a whole.
    assert main(["check", str(tmp_path)]) == 1
    assert "in two splits" in capsys.readouterr().out


def test_damage_and_staged_copies(sound, tmp_path):
    """A shard that cannot be read is found; a copy of some scans is checked at what it holds."""
    train, val = sound
    train_set = encoded(tmp_path / "train", train)
    val_set = encoded(tmp_path / "val", val | {"a/o.jpg": train["a/train3.jpg"]})
    stage(str(val_set), str(tmp_path / "staged"), 3)
    report = PCRDataset(train_set).check(PCRDataset(tmp_path / "staged", scan=3))
    assert "same-picture-in-two-splits" in found(report)[0]
    broken = shutil.copytree(val_set, tmp_path / "broken")
    damage(broken / "data-000000.tar", 700)
    assert "unreadable-shard" in found(PCRDataset(train_set).check(PCRDataset(broken)))[0]
    # Cut off behind the scan that is read.
    cut = shutil.copytree(val_set, tmp_path / "cut")
    size = (cut / "data-000000.tar").stat().st_size
    os.truncate(cut / "data-000000.tar", size - 2000)
    assert "unreadable-shard" in found(PCRDataset(train_set).check(PCRDataset(cut)))[0]


def test_samples_without_labels(tmp_path):
    """Labels that are missing, or beyond the classes, are found."""
    with ShardWriter(str(tmp_path / "set")) as writer:
        for number in range(12):
            label = {} if number == 5 else {"cls": number % 2}
            writer.write({"__key__": str(number), "jpg": make_jpeg(number), **label})
    report = PCRDataset(tmp_path / "set").check()
    assert found(report)[0] == {"bad-label"}
    assert [each[0].key for each in report.findings[0].groups] == ["5"]


def test_other_numbers_of_classes_are_named_when_opened(tmp_path):
    """Whoever opens a training and a validation set that number classes differently is told."""

    def opened(classes):
        files = {f"{name}/{number}.jpg": make_jpeg(number) for name in classes for number in (1, 2)}
        folder = tmp_path / "-".join(classes)
        return PCRDataset(folder if folder.exists() else encoded(folder, files))

    opened("abc")
    for alike in ("ab", "abcd", "xyz"):  # all that two have are the same, or it is another task
        opened(alike)
    with pytest.warns(UserWarning, match=r"class 1 is 'c' in .*a-c.* and 'b' in .*a-b-c"):
        opened("ac")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened("ac")  # once is enough


@pytest.mark.long
def test_photographs_are_sound(photos, tmp_path):
    """Sets of real photographs have no finding that makes results wrong, and no equal pictures."""
    for folder in sorted(photos.iterdir()):
        encode(str(folder), str(tmp_path / folder.name))
        report = PCRDataset(tmp_path / folder.name).check(near=True)
        wrong, others = found(report)
        assert (wrong, others - {"few-samples"}) == (set(), set()), folder.name
