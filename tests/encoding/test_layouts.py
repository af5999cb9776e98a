"""How public datasets are laid out: right splits and labels, or the option that gives them."""

import json

import pytest
from encode_support import image_bytes, make_tar
from support import read_samples, run_encode, write_files

from pcrshard import EncodeOptions, PCRDataset, encode
from pcrshard.cli.main import main
from pcrshard.encoding.shard_plan import plan
from pcrshard.errors import EncodeError
from pcrshard.testing import make_jpeg

JPEG, PNG = make_jpeg(0, 16, 16), image_bytes("png")


def folders(pattern, names, count=2, data=JPEG):
    """Files such as ``train/{}/{}.jpg`` in these folders."""
    return {pattern.format(name, i): data for name in names for i in range(count)}


def table(*rows):
    return "".join(",".join(map(str, row)) + "\n" for row in rows).encode()


def flat(folder, count=4, data=JPEG, suffix="jpg"):
    return {f"{folder}/{i:04d}.{suffix}": data for i in range(count)}


CLASSES = ("cat", "dog")
DX = ["nv", "mel", "nv", "mel"]
METADATA = "".join(
    json.dumps({"file_name": f"{i:04d}.jpg", "label": ["a", "b"][i % 2]}) + "\n" for i in range(4)
).encode()

# Files; then what each source and its options give: the number of samples and the classes, or the
# number of different labels, and both if they differ; or what an error says.
LAYOUTS = {
    "ImageNet": (
        folders("train/{}/{}.JPEG", ("n01440764", "n01443537"))
        | folders("val/{}/{}.JPEG", ("n01440764", "n01443537")),
        [
            ("", {}, r"splits of .* \(train, val\)"),
            ("", {"split": "train"}, (4, ("n01440764", "n01443537"))),
        ],
    ),
    "ImageNet of Kaggle": (
        folders("ILSVRC/Data/CLS-LOC/train/{}/{}.JPEG", ("n01", "n02"))
        | flat("ILSVRC/Data/CLS-LOC/val")
        | {"LOC_train_solution.csv": table(("ImageId", "PredictionString"), ("n01_1", "n01 1"))},
        [("", {}, r"\(train, val\)"), ("", {"split": "train"}, (4, ("n01", "n02")))],
    ),
    "COCO": (
        flat("train2017") | flat("val2017") | {"annotations/instances_val2017.json": b"{}"},
        [("", {}, r"\(train2017, val2017\)"), ("", {"split": "val2017"}, (4, ()))],
    ),
    "COCO of YOLO": (
        flat("images/train2017")
        | flat("images/val2017")
        | flat("labels/train2017", data=b"0 1 1 1 1", suffix="txt"),
        [("", {}, r"\(train2017, val2017\)"), ("", {"split": "train2017"}, (4, ()))],
    ),
    "CIFAR-10 as PNG": (
        folders("train/{}/000{}.png", ("airplane", "bird"), data=PNG)
        | folders("test/{}/000{}.png", ("airplane", "bird"), data=PNG),
        [
            ("", {}, r"\(test, train\)"),
            ("", {"split": "train"}, "--reencode-quality"),
            ("", {"split": "train", "reencode_quality": 95}, (4, ("airplane", "bird"))),
        ],
    ),
    "cats and dogs of Kaggle": (
        folders("training_set/training_set/{}/{}.jpg", ("cats", "dogs"))
        | folders("test_set/test_set/{}/{}.jpg", ("cats", "dogs")),
        [
            ("", {}, r"\(test_set, training_set\)"),
            ("", {"split": "training_set"}, (4, ("cats", "dogs"))),
        ],
    ),
    "Intel scenes": (
        folders("seg_train/seg_train/{}/{}.jpg", ("forest", "sea"))
        | folders("seg_test/seg_test/{}/{}.jpg", ("forest", "sea"))
        | flat("seg_pred/seg_pred"),
        [("", {}, r"\(seg_test, seg_train\)"), ("", {"split": "seg_test"}, (4, ("forest", "sea")))],
    ),
    "Oxford pets": (
        {f"images/Abyssinian_{i}.jpg": JPEG for i in range(4)}
        | {f"annotations/trimaps/Abyssinian_{i}.png": PNG for i in range(4)}
        | {"annotations/list.txt": b""},
        [("", {}, "annotations and images.*masks"), ("images", {}, (4, ()))],
    ),
    "Caltech-101": (
        folders("101_ObjectCategories/{}/image_000{}.jpg", ("accordion", "ant")),
        [("", {}, (4, ("accordion", "ant")))],
    ),
    "PetImages": (folders("PetImages/{}/{}.jpg", ("Cat", "Dog")), [("", {}, (4, ("Cat", "Dog")))]),
    "iNaturalist CSV": (
        flat("images")
        | {
            "train.csv": table(
                ("id", "file_name", "category_id", "latitude"),
                *((i, f"images/{i:04d}.jpg", 10 + i // 2, 0.5 + i) for i in range(4)),
            )
        },
        [("train.csv", {}, (4, 2)), ("", {}, "train.csv .*may hold the labels")],
    ),
    "HAM10000": (
        {f"ISIC_{i}.jpg": JPEG for i in range(4)}
        | {
            "HAM10000_metadata.csv": table(
                ("lesion_id", "image_id", "dx", "sex"),
                *((f"H{i}", f"ISIC_{i}", DX[i], "male") for i in range(4)),
            )
        },
        [
            ("", {}, "HAM10000_metadata.csv .*may hold the labels.*--no-labels"),
            ("HAM10000_metadata.csv", {}, (4, ("mel", "nv"))),
            ("", {"no_labels": True}, (4, ())),
        ],
    ),
    "HAM10000 in parts": (
        flat("HAM10000_images_part_1")
        | flat("HAM10000_images_part_2")
        | {"HAM10000_metadata.csv": table(("lesion_id", "image_id", "dx"))},
        [("", {}, "HAM10000_metadata.csv .*may hold the labels")],
    ),
    "Stanford cars": (
        flat("cars_train") | flat("cars_test") | {"devkit/cars_train_annos.mat": b""},
        [("", {}, r"\(cars_test, cars_train\)"), ("", {"split": "cars_test"}, (4, ()))],
    ),
    "VOC": (
        flat("VOC2012/JPEGImages")
        | flat("VOC2012/SegmentationClass", 2, PNG, "png")
        | flat("VOC2012/Annotations", 4, b"", "xml")
        | {"VOC2012/ImageSets/Main/train.txt": b""},
        [
            ("", {}, "JPEGImages and SegmentationClass.*masks"),
            ("VOC2012/JPEGImages", {}, (4, ())),
        ],
    ),
    "ADE20K": (
        flat("images/training")
        | flat("images/validation")
        | flat("annotations/training", 4, PNG, "png")
        | flat("annotations/validation", 4, PNG, "png"),
        [
            ("", {}, "annotations, images each hold training, validation"),
            ("images", {}, r"\(training, validation\)"),
            ("images", {"split": "training"}, (4, ())),
        ],
    ),
    "Cityscapes": (
        folders("leftImg8bit/train/{}/{}.png", ("aachen", "bochum"), data=PNG)
        | folders("leftImg8bit/val/{}/{}.png", ("lindau", "munster"), data=PNG)
        | folders("gtFine/train/{}/{}.png", ("aachen", "bochum"), data=PNG)
        | folders("gtFine/val/{}/{}.png", ("lindau", "munster"), data=PNG),
        [("", {}, "gtFine, leftImg8bit each hold train, val"), ("leftImg8bit", {}, "train, val")],
    ),
    "masks of the same extension": (
        flat("images", 4, PNG, "png") | flat("masks", 4, PNG, "png"),
        [("", {}, "images and masks.*masks do")],
    ),
    "classes with the same file names": (
        flat("cat") | flat("dog"),
        [("", {}, (8, CLASSES))],
    ),
    "ImageFolder of the Hub": (
        folders("data/train/{}/{}.jpg", CLASSES) | folders("data/test/{}/{}.jpg", CLASSES),
        [("", {}, r"\(test, train\)"), ("", {"split": "test"}, (4, CLASSES))],
    ),
    "metadata.jsonl of the Hub": (
        flat("train")
        | flat("test")
        | {"train/metadata.jsonl": METADATA, "test/metadata.jsonl": METADATA},
        [
            ("", {}, r"\(test, train\)"),
            ("", {"split": "train"}, "metadata.jsonl .*may hold the labels"),
            ("train/metadata.jsonl", {}, (4, ("a", "b"))),
        ],
    ),
    "State Farm": (
        folders("imgs/train/{}/{}.jpg", ("c0", "c1"))
        | flat("imgs/test")
        | {"driver_imgs_list.csv": table(("subject", "classname", "img"), ("p0", "c0", "0.jpg"))},
        [("", {}, r"\(test, train\)"), ("", {"split": "train"}, (4, ("c0", "c1")))],
    ),
    "CelebA": (
        flat("img_align_celeba")
        | {"list_attr_celeba.csv": table(("image_id", "Smiling"), ("0000.jpg", 1))},
        [("", {}, "list_attr_celeba.csv .*may hold the labels")],
    ),
    "sets without usual names": (
        folders("hospital_A/{}/{}.jpg", CLASSES) | folders("hospital_B/{}/{}.jpg", CLASSES),
        [
            ("", {}, r"\(hospital_A, hospital_B\).*--split none"),
            ("", {"split": "hospital_B"}, (4, CLASSES)),
        ],
    ),
    "a column of splits": (
        flat("img")
        | {
            "all.csv": table(
                ("path", "Label", "split"),
                *((f"img/{i:04d}.jpg", "ab"[i % 2], ["train", "val"][i // 2]) for i in range(4)),
            )
        },
        [("all.csv", {}, r"\(train, val\)"), ("all.csv", {"split": "val"}, (2, ("a", "b")))],
    ),
    "Tiny ImageNet": (
        folders("tiny/train/{}/images/{}.JPEG", ("n01", "n02"))
        | flat("tiny/val/images")
        | flat("tiny/test/images")
        | {"tiny/val/val_annotations.txt": b""},
        [
            ("", {}, r"\(test, train, val\)"),
            ("", {"split": "train"}, (4, ("n01", "n02"))),
            ("", {"split": "val"}, (4, ("n01", "n02"), 0)),
        ],
    ),
    "GTSRB": (
        folders("Final_Training/Images/{}/{}.jpg", ("00000", "00001")) | flat("Final_Test/Images"),
        [
            ("", {"split": "Final_Training"}, (4, ("00000", "00001"))),
            ("", {"split": "Final_Test"}, (4, ("00000", "00001"), 0)),
        ],
    ),
    "STL-10 with unlabeled images": (
        folders("train/{}/{}.jpg", CLASSES) | flat("unlabeled"),
        [("", {}, r"\(train\)"), ("", {"split": "train"}, (4, CLASSES))],
    ),
    "classes called as splits are": (
        folders("{}/{}.jpg", ("bus", "test", "train tracks")),
        [("", {}, (6, ("bus", "test", "train tracks")))],
    ),
    "a class called as a split is, in splits": (
        folders("train/{}/{}.jpg", ("bus", "train", "val"))
        | folders("val/{}/{}.jpg", ("bus", "train", "val")),
        [("", {}, r"\(train, val\)"), ("", {"split": "val"}, (6, ("bus", "train", "val")))],
    ),
    "names in other scripts": (
        folders("{}/{}.jpg", ("Ærø", "猫", "ñandú")),
        [("", {}, (6, ("Ærø", "ñandú", "猫")))],
    ),
    "splits in the folder of each class": (
        folders("{}/train/{}.jpg", CLASSES) | folders("{}/test/{}.jpg", CLASSES),
        [("", {}, r"cat, dog each hold test, train.*'\*/test/\*.jpg'")],
    ),
    "Oxford flowers": (flat("102flowers/jpg") | {"imagelabels.mat": b""}, [("", {}, (4, ()))]),
    "a competition of Kaggle": (
        flat("train")
        | flat("test")
        | {
            "train.csv": table(("id", "breed"), *((f"{i:04d}", CLASSES[i % 2]) for i in range(4))),
            "test.csv": table(("id",), *((f"{i:04d}",) for i in range(4))),
        },
        [
            ("", {"split": "train"}, "train.csv .*may hold the labels"),
            ("train.csv", {}, (4, CLASSES)),
            ("test.csv", {}, (4, ())),
        ],
    ),
    "files of a list in folders": (
        {f"HAM10000_images_part_{i % 2 + 1}/ISIC_{i}.jpg": JPEG for i in range(4)}
        | {"meta.csv": table(("image_id", "dx"), *((f"ISIC_{i}", DX[i]) for i in range(4)))},
        [("meta.csv", {}, (4, ("mel", "nv")))],
    ),
    "files of a list in several folders": (
        flat("a") | flat("b") | {"meta.csv": table(("id", "dx"), ("0001", "nv"))},
        [("meta.csv", {}, "one file '0001', got a/0001.jpg and b/0001.jpg")],
    ),
    "a column of fastai": (
        flat("img")
        | {
            "labels.csv": table(
                ("name", "Image Path", "ClassId", "is_valid"),
                *((i, f"img/{i:04d}.jpg", i % 2, str(i > 1)) for i in range(4)),
            )
        },
        [("labels.csv", {}, r"\(train, valid\)"), ("labels.csv", {"split": "valid"}, (2, 2))],
    ),
    "a target that is measured": (
        flat("img")
        | {"a.csv": table(("path", "target"), *((f"img/{i:04d}.jpg", i / 2) for i in range(4)))},
        [
            ("a.csv", {}, "whole numbers or names in column 'target'.*0.5.*--no-labels"),
            ("a.csv", {"no_labels": True}, (4, ())),
            ("a.csv", {"label": "target"}, (4, ("0.0", "0.5", "1.0", "1.5"))),
        ],
    ),
    "numbers that are IDs": (
        flat("img")
        | {
            "a.csv": table(
                ("path", "label"), *((f"img/{i:04d}.jpg", 10**12 + i % 2) for i in range(4))
            )
        },
        [("a.csv", {}, (4, ("1000000000000", "1000000000001")))],
    ),
}
for name, column in (("Label", "Label"), ("target", "target"), ("class ID", "class_id")):
    rows = ((f"img/{i:04d}.jpg", "ab"[i % 2]) for i in range(4))
    LAYOUTS[f"a column {name}"] = (
        flat("img") | {"a.csv": table(("image", column), *rows)},
        [("a.csv", {}, (4, ("a", "b")))],
    )


def assert_gives(src, options, expected):
    """Plan an encode; it gives samples and classes, or an error that says what to do."""
    if isinstance(expected, str):
        with pytest.raises(EncodeError, match=expected):
            plan(str(src), EncodeOptions(**options))
        return
    planned = plan(str(src), EncodeOptions(**options))
    samples = [sample for shard in planned.shards for sample in shard]
    labels = {dict(sample.known).get("cls") for sample in samples} - {None}
    number, classes, *different = expected
    assert len(samples) == number
    if isinstance(classes, tuple):
        assert planned.options.classes == classes
        classes = len(classes)
    assert [len(labels)] == (different or [classes])


@pytest.mark.parametrize("name", LAYOUTS)
def test_public_datasets(name, tmp_path):
    """Encoded as it was downloaded, a dataset has the right splits and labels, or encode stops and
    names the option that gives them.
    """
    files, calls = LAYOUTS[name]
    write_files(tmp_path, files)
    for src, options, expected in calls:
        assert_gives(tmp_path / src, options, expected)


def pairs(prefix=""):
    return [(f"{prefix}{i}.{kind}", data) for i in range(3)
            for kind, data in (("jpg", JPEG), ("json", b"{}"), ("txt", b"a cat"))]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "options", "expected"),
    [
        (["00000", "00001"], {}, (6, ())),  # LAION
        (["cc3m-train-0000", "cc3m-validation-0000"], {}, r"\(train, validation\)"),
        (["cc3m-train-0000", "cc3m-validation-0000"], {"split": "train"}, (3, ())),
        (["train2017", "val2017"], {}, r"\(train, val\)"),
        (["train2017", "val2017"], {"split": "val"}, (3, ())),
    ],
)
def test_public_tars(tmp_path, names, options, expected):
    """Tars of several splits in one folder are not mixed."""
    for name in names:
        make_tar(tmp_path / f"{name}.tar", pairs(f"{name}_"))
    assert_gives(tmp_path, options, expected)


def test_stray_images_do_not_cost_the_labels_of_others(tmp_path, caplog):
    """One image beside the class folders is left out, and named; many stop the run."""
    src = write_files(tmp_path / "src", folders("{}/{}.jpg", CLASSES) | {"stray.jpg": JPEG})
    index = run_encode(src, tmp_path / "a", num_shards=1)
    assert (index.num_samples, index.classes) == (4, CLASSES)
    assert "left out 1 images, such as stray.jpg" in caplog.text
    assert "stray.jpg" in (tmp_path / "a" / "skipped.jsonl").read_text()
    write_files(src, {"stray2.jpg": JPEG})
    with pytest.raises(EncodeError, match=r"2 of 6, such as stray\.jpg.*--no-labels"):
        run_encode(src, tmp_path / "b")
    assert run_encode(src, tmp_path / "b", no_labels=True).num_classes == 0


def test_an_empty_class_folder_is_a_class(tmp_path, caplog):
    """A class without images keeps its number, and is named."""
    src = write_files(tmp_path / "src", folders("{}/{}.jpg", CLASSES))
    (src / "bird").mkdir()
    assert run_encode(src, tmp_path / "a").classes == ("bird", "cat", "dog")
    assert "no image in the class folders bird" in caplog.text


def test_columns_that_might_be_labels(tmp_path, capsys):
    """A list is refused until it is said which column has the labels, or that none has."""
    rows = [(f"img/{i:04d}.jpg", "ab"[i % 2], i % 2 + 3) for i in range(4)]
    src = write_files(tmp_path, flat("img") | {"a.csv": table(("image", "kind", "color"), *rows)})
    with pytest.raises(EncodeError, match=r"\(kind, color\)\? Give --label COLUMN, or --no-labels"):
        run_encode(src / "a.csv", tmp_path / "x")
    command = ["encode", str(src / "a.csv"), "--workers", "1"]
    assert main([*command[:2], str(tmp_path / "kind"), "--label", "Kind"]) == 0
    assert main([*command[:2], str(tmp_path / "none"), "--no-labels"]) == 0
    assert {sample["cls"] for sample in read_samples(tmp_path / "kind").values()} == {b"0", b"1"}
    (first, *_) = read_samples(tmp_path / "none").values()
    assert (first.keys() & {"cls"}, json.loads(first["json"]).keys()) == (set(), {"kind", "color"})
    with pytest.raises(EncodeError, match="expected a column 'sort', got kind, color"):
        run_encode(src / "a.csv", tmp_path / "x", label="sort")
    with pytest.raises(EncodeError, match="expected a list of files"):
        run_encode(src / "img", tmp_path / "x", label="kind")


def test_rows_without_a_label(tmp_path):
    """They are named, and left out if asked."""
    rows = [(f"img/{i:04d}.jpg", "ab"[i % 2] if i < 3 else "") for i in range(4)]
    src = write_files(tmp_path, flat("img") | {"a.csv": table(("path", "label"), *rows)})
    with pytest.raises(EncodeError, match=r"line 5 of .*a\.csv has no label.*0003\.jpg"):
        run_encode(src / "a.csv", tmp_path / "x")
    assert run_encode(src / "a.csv", tmp_path / "y", on_error="skip").num_samples == 3
    assert "line 5" in (tmp_path / "y" / "skipped.jsonl").read_text()


@pytest.mark.parametrize("label", ["", " ", None])
def test_labels_of_json_may_be_empty(tmp_path, label):
    """An empty string is no class; the row is named, as one without the column is."""
    given = (METADATA.decode(), json.dumps({"file_name": "0004.jpg", "label": label}))
    src = write_files(tmp_path, flat(".", 5) | {"metadata.jsonl": "".join(given).encode()})
    with pytest.raises(EncodeError, match=r"line 5 of .* has no label in column 'label'"):
        run_encode(src / "metadata.jsonl", tmp_path / "x")
    made = run_encode(src / "metadata.jsonl", tmp_path / "y", on_error="skip")
    assert (made.num_samples, made.classes) == (4, ("a", "b"))


@pytest.mark.parametrize("names", [("path", "label"), ("path", "kind")])
def test_a_column_of_labels_without_any(tmp_path, names):
    """It is an error to encode it as labels, and a dataset of its own without them."""
    rows = [(f"img/{i:04d}.jpg", "") for i in range(4)]
    src = write_files(tmp_path, flat("img") | {"a.csv": table(names, *rows)})
    with pytest.raises(EncodeError, match=r"line 2 of .* has no label in column .* 4 rows"):
        run_encode(src / "a.csv", tmp_path / "x", label=names[1])
    assert run_encode(src / "a.csv", tmp_path / "y", no_labels=True).num_classes == 0
    with pytest.raises(ValueError, match=r"no label \(key=img/000"):
        _ = PCRDataset(tmp_path / "y").labels


def test_classes_of_another_dataset(tmp_path, capsys):
    """A validation set that lacks a class is numbered as the training set is."""
    src = write_files(
        tmp_path / "src",
        folders("a/{}/{}.jpg", ("b", "c", "d")) | folders("z/{}/{}.jpg", ("c", "d")),
    )
    encode(src / "a", tmp_path / "train", workers=1)
    line = ["encode", str(src / "z"), str(tmp_path / "val"), "--classes-of"]
    assert main([*line, str(tmp_path / "train")]) == 0
    labels = {key: sample["cls"] for key, sample in read_samples(tmp_path / "val").items()}
    assert labels == {"c/0": b"1", "c/1": b"1", "d/0": b"2", "d/1": b"2"}
    write_files(tmp_path, flat("flat"))
    encode(tmp_path / "flat", tmp_path / "none", workers=1)
    assert main([*line, str(tmp_path / "none"), "--resume"]) == 1
    assert "expected a dataset with class names" in capsys.readouterr().err
