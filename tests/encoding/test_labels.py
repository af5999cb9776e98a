"""Labels: how many classes a dataset has, and what they are called."""

import collections

import pytest
from encode_support import encode_parts, make_tar
from support import read_all, read_samples, run_encode, write_files

from pcrshard import EncodeOptions, Shard, ShardWriter, open_dataset
from pcrshard.cli.main import main
from pcrshard.encoding.labels import read_classes
from pcrshard.errors import EncodeError
from pcrshard.format.sample_columns import label_of
from pcrshard.testing import make_jpeg

LABELS = [3, 0, 9, 9, 1, 4, 0, 2]


@pytest.fixture
def tar(tmp_path):
    """A tar as WebDataset writes it: integers in ``cls``, and no names anywhere."""
    members = []
    for number, label in enumerate(LABELS):
        members += [(f"{number}.jpg", make_jpeg(number)), (f"{number}.cls", str(label).encode())]
    return make_tar(tmp_path / "train-000000.tar", members)


def test_integer_labels_are_counted(tar, tmp_path):
    """The size of a classifier's last layer is known without reading the shards, however the
    dataset was written.
    """
    index = run_encode(tar, tmp_path / "whole", num_shards=4)
    assert (index.classes, index.num_classes) == ((), 10)
    assert open_dataset(tmp_path / "whole")[0].num_classes == 10
    assert encode_parts(tar, tmp_path / "parts", 2, (1, 0))[-1].num_classes == 10
    assert read_all(tmp_path / "parts") == read_all(tmp_path / "whole")
    for name in ("pcr.json", "data-000001.tar"):
        (tmp_path / "parts" / name).unlink()
    assert run_encode(tar, tmp_path / "parts", num_shards=4, resume=True).num_classes == 10


@pytest.mark.parametrize(
    ("classes", "labels", "count"),
    [((), (4, 2), 5), (("cat", "dog"), (0,), 2), (("cat", "dog"), (2,), 3)],
)
def test_a_shard_writer_counts(tmp_path, classes, labels, count):
    """A dataset written from Python knows its classes, too."""
    with ShardWriter(tmp_path, samples_per_shard=1, classes=classes) as writer:
        for label in labels:
            writer.write({"__key__": str(label), "jpg": make_jpeg(), "cls": label})
    assert open_dataset(tmp_path)[0].num_classes == count


@pytest.mark.parametrize("classes", ["ab", [0, 1], ["a", " a"], ["a", ""]], ids=repr)
def test_names_of_classes_are_checked_at_once(tmp_path, classes):
    """Not after hours of writing shards, nor by those who read them."""
    with pytest.raises(EncodeError, match=r"class names|a name of its own"):
        ShardWriter(tmp_path, classes=classes)


@pytest.mark.parametrize("value", [b"", b"-1", b"cat", b"1.5", b"9" * 10, b"\xd9\xa1"])
def test_what_is_no_label_is_not_counted(value):
    """Names, unlabeled samples and identifiers do not make a layer of a billion outputs."""
    assert label_of(value) is None


def test_names_for_numbers(tar, tmp_path):
    """--classes FILE names the labels; a class that no image shows still counts."""
    names = tuple(f"class {number}" for number in range(12))
    (tmp_path / "names.txt").write_text("\n".join(names))
    options = ["--workers", "1", "--classes", str(tmp_path / "names.txt")]
    assert main(["encode", tar, str(tmp_path / "pcr"), *options]) == 0
    index, _ = open_dataset(tmp_path / "pcr")
    assert (index.num_classes, index.classes) == (12, names)


def test_a_label_without_a_name_is_named(tar, tmp_path):
    """Fewer names than labels is a mistake that is found while encoding, not in training."""
    with pytest.raises(EncodeError, match=r"labels below 2, the number of class names, got \d"):
        run_encode(tar, tmp_path / "pcr", classes=("cat", "dog"))


def test_names_set_the_numbers_of_folders(synthetic_folder, tmp_path):
    """With the same names, two datasets number their classes alike, whatever folders they have."""
    names = ("dog", "bird", "cat")
    index = run_encode(synthetic_folder, tmp_path / "pcr", classes=names)
    assert (index.classes, index.num_classes) == (names, 3)
    for key, sample in read_samples(tmp_path / "pcr", 1).items():
        assert names[int(sample["cls"])] == key.partition("/")[0]
    with pytest.raises(EncodeError, match="got 'dog' in the source"):
        run_encode(synthetic_folder, tmp_path / "other", classes=("cat", "bird"))


@pytest.mark.parametrize(
    ("data", "word"),
    [(b"cat\n\ndog\n", "class 1"), (b"cat\ndog\ncat\n", "class 2"), (b"\xff", "utf-8"), (b"", "0")],
)
def test_a_bad_file_of_names_is_refused(tmp_path, data, word):
    """A gap, a duplicate name, or a wrong text encoding raises a clear error."""
    write_files(tmp_path, {"names.txt": data})
    with pytest.raises(EncodeError, match=word):
        EncodeOptions(classes=read_classes(str(tmp_path / "names.txt")))


@pytest.mark.parametrize("text", ["cat\ndog\n", "cat\r\ndog", "\ufeffcat \n dog\n\n"])
def test_files_of_names_from_any_editor(tmp_path, text):
    """Line ends of any system, a byte order mark and blanks around a name do not matter."""
    write_files(tmp_path, {"names.txt": text.encode()})
    assert read_classes(str(tmp_path / "names.txt")) == ("cat", "dog")


@pytest.mark.parametrize("source", ["tar", "synthetic_folder"])
def test_stratified_shards_hold_every_class(source, request, tmp_path):
    """Labels of tars and of folders are spread, so that no shard lacks a class that others have
    two of.
    """
    dst = tmp_path / "pcr"
    run_encode(request.getfixturevalue(source), dst, num_shards=3, stratify=True)
    _, urls = open_dataset(dst)
    counts = [collections.Counter(s["cls"] for s in Shard(url).samples(1)) for url in urls]
    for label in set().union(*counts):
        shares = [count[label] for count in counts]
        assert max(shares) - min(shares) <= 1


def test_nothing_to_stratify_by(tmp_path):
    """Without labels there is nothing to spread, and the error says where labels come from."""
    write_files(tmp_path / "src", {"a.jpg": make_jpeg()})
    with pytest.raises(EncodeError, match="class folders, a column 'label', or a field 'cls'"):
        run_encode(tmp_path / "src", tmp_path / "pcr", stratify=True)
