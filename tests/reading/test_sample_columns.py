"""pcr.columns: labels, sizes and flags of all samples in a request, never those of other shards."""

import base64
import io
import json
import shutil

import numpy as np
import pytest
from PIL import Image
from support import CountingFS

from pcrshard import EncodeOptions, PCRDataset, ShardWriter, encode, open_dataset
from pcrshard.checksum import crc32c
from pcrshard.cli.main import main
from pcrshard.reading.dataset_folder import count_classes
from pcrshard.testing import make_jpeg
from pcrshard.upkeep.stage import stage
from pcrshard.upkeep.verify import verify

EXIF = b"Exif\0\0MM\0*\0\0\0\x08\0\1\x01\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0"
IMAGES = {"jpg": "image", "b.jpg": "image", "png": "image"}


def png(height, width):
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


SAMPLES = [
    {"__key__": "a", "jpg": make_jpeg(1, 30, 20), "cls": 3},
    {"__key__": "turned", "jpg": make_jpeg(2, 10, 12, exif=EXIF), "cls": 0},
    {"__key__": "two", "jpg": make_jpeg(3, 8, 9), "b.jpg": make_jpeg(4, 50, 60), "cls": 123456789},
    {"__key__": "second", "b.jpg": make_jpeg(5, 7, 5), "cls": 1},
    {"__key__": "none", "cls": 2},
    {"__key__": "kept", "png": png(4, 6), "cls": 3},
    {"__key__": "damaged", "png": b"no PNG", "cls": 3},
]
LABELS = [3, 0, 123456789, 1, 2, 3, 3]
SIZES = [[30, 20], [12, 10], [8, 9], [7, 5], [0, 0], [4, 6], [0, 0]]
DECODABLE = [True] * 6 + [False]


def write(folder, samples=SAMPLES, **options):
    with ShardWriter(folder, samples_per_shard=2, kinds=IMAGES, **options) as writer:
        for sample in samples:
            writer.write(sample)
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "set")


def assert_right(source, requests=None, scan="full"):
    """Everything is that of the samples; ``requests`` of ``pcr.columns``, if given, and no more."""
    dataset = PCRDataset(source, scan=scan)
    CountingFS.requests.clear()
    assert dataset.labels.tolist() == LABELS
    assert dataset.sizes.tolist() == SIZES
    assert dataset.decodable.tolist() == DECODABLE
    if requests is not None:
        assert [path.rpartition("/")[2] for path, *_ in CountingFS.requests] == requests


def test_labels_sizes_and_flags_cost_a_request_each(folder):
    """However many shards there are."""
    assert_right(f"counting://{folder}", ["pcr.columns"] * 3)
    CountingFS.requests.clear()
    found = count_classes(*open_dataset(f"counting://{folder}"))
    assert found == {"3": 3, "0": 1, "123456789": 1, "1": 1, "2": 1}
    assert len([path for path, *_ in CountingFS.requests if path.endswith(".tar")]) == 0


def test_columns_are_what_the_specification_says(folder):
    """Another program finds each column by the numbers of pcr.json, and proves that it is of these
    shards.
    """
    data = (folder / "pcr.columns").read_bytes()
    found = json.loads((folder / "pcr.json").read_text())
    heads = b"".join(path.read_bytes()[520:524] for path in sorted(folder.glob("*.tar")))
    columns, start = {}, 0
    for name, width, checksum in found["columns"]:
        columns[name] = data[start : start + width * 7]
        assert crc32c(heads + columns[name]) == checksum
        start += width * 7
    assert start == len(data)
    assert np.frombuffer(columns["labels"], "<i4").tolist() == LABELS
    assert np.frombuffer(columns["sizes"], "<u2").reshape(-1, 2).tolist() == SIZES
    assert list(columns["flags"]) == [0, 0, 0, 0, 0, 1, 3]


def test_shards_by_name_and_several_datasets(folder, tmp_path):
    """All shards in their order are the dataset; some of them are asked themselves."""
    url = f"counting://{folder}/data-"
    assert_right(url + "{000000..000003}.tar", ["pcr.columns"] * 3)
    some = PCRDataset(url + "{000002..000003}.tar")
    assert some.labels.tolist() == LABELS[4:]
    assert some.sizes.tolist() == SIZES[4:]
    mixed = PCRDataset([url + "000003.tar", str(folder)])
    assert mixed.labels.tolist() == [*LABELS[6:], *LABELS]
    both = PCRDataset([str(folder), str(write(tmp_path / "other", SAMPLES[:3]))])
    assert both.sizes.tolist() == SIZES + SIZES[:3]
    assert both.subset([7, 2]).labels.tolist() == [LABELS[2], LABELS[0]]


@pytest.mark.parametrize("how", ["gone", "cut", "flipped", "of other shards"])
def test_columns_that_are_not_of_these_shards_are_not_used(folder, tmp_path, how, caplog):
    """Labels, sizes and flags are then those of the shards, and verify says what is wrong."""
    path = folder / "pcr.columns"
    data = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(data[:-1])
    elif how == "flipped":
        path.write_bytes(bytes(value ^ 1 for value in data))
    else:
        changed = [sample | {"cls": sample["cls"] ^ 1} for sample in SAMPLES]
        shutil.copy(write(tmp_path / "other", changed) / "pcr.columns", path)
    assert_right(f"counting://{folder}")
    assert "reading the index of each shard instead" in caplog.text
    problems = verify(str(folder), workers=1)
    assert len(problems) == (1 if how in ("cut", "of other shards") else 3)
    assert all(line.startswith("pcr.columns: the ") for line in problems)


def test_columns_of_the_same_shards_in_another_order_are_not_used(folder):
    """A pcr.json whose rows were moved does not give samples the labels of others."""
    found = json.loads((folder / "pcr.json").read_text())
    index, _ = open_dataset(folder)
    order = [1, 0, 2, 3]
    table = index.shards.rows[order].tobytes()
    names = [index.shards.names[each] for each in order]
    changed = found | {"names": names, "table": base64.b64encode(table).decode()}
    (folder / "pcr.json").write_text(json.dumps(changed))
    assert PCRDataset(folder).labels.tolist() == [*LABELS[2:4], *LABELS[:2], *LABELS[4:]]


def test_columns_that_lie_are_found_by_verify(folder, capsys):
    """A wrong label with a right checksum is found by its shard; the counts of images are too."""
    index, _ = open_dataset(folder)
    data = bytearray((folder / "pcr.columns").read_bytes())
    data[0] = 9
    (folder / "pcr.columns").write_bytes(data)
    found = json.loads((folder / "pcr.json").read_text())
    heads = index.shards.rows[:, 1].tobytes()
    found["columns"][0][2] = crc32c(heads + bytes(data[:28]))
    found["counts"] = [9, 9, 9, 9]
    (folder / "pcr.json").write_text(json.dumps(found))
    first, second = verify(str(folder), workers=1)
    assert "the labels are not those of" in first
    assert first.endswith("data-000000.tar")
    assert "images=7, whole=2, undecodable=1" in second
    assert main(["verify", str(folder), "--workers", "1"]) == 1
    assert "undecodable" in capsys.readouterr().out


@pytest.mark.parametrize("scan", [1, "full"])
def test_a_staged_copy_has_them(folder, tmp_path, scan):
    """Also after it grew; a copy of some shards asks these."""
    stage(folder, tmp_path / "copy", 1)
    stage(folder, tmp_path / "copy", scan)
    assert_right(f"counting://{tmp_path / 'copy'}", ["pcr.columns"] * 3, scan)
    assert verify(str(tmp_path / "copy"), workers=1) == []
    stage(folder / "data-000001.tar", tmp_path / "one", scan)
    assert PCRDataset(tmp_path / "one", scan=scan).labels.tolist() == LABELS[2:4]
    (folder / "pcr.columns").unlink()
    stage(folder, tmp_path / "without", scan)
    assert_right(str(tmp_path / "without"), scan=scan)
    assert verify(str(tmp_path / "without"), workers=1) == []


def test_encode_writes_them_also_after_a_resume(synthetic_folder, tmp_path):
    """Also if only its last step is left to do."""
    options = EncodeOptions(num_shards=3)
    encode(synthetic_folder, tmp_path, options, workers=1)
    written = {name: (tmp_path / name).read_bytes() for name in ("pcr.columns", "pcr.json")}
    dataset = PCRDataset(f"counting://{tmp_path}")
    labels = {key: int(key[0] == "d") for key in dataset.keys}
    CountingFS.requests.clear()
    assert dict(zip(dataset.keys, dataset.labels.tolist(), strict=True)) == labels
    for name in written:
        (tmp_path / name).unlink()
    encode(synthetic_folder, tmp_path, options, workers=1, resume=True)
    assert {name: (tmp_path / name).read_bytes() for name in written} == written


def test_labels_that_are_no_numbers_are_as_before(tmp_path):
    """A text, or a number of more digits, comes from the shards."""
    samples = [{"__key__": str(i), "cls": -i * 10**10} for i in range(3)]
    dataset = PCRDataset(write(tmp_path / "numbers", samples))
    assert dataset.labels.tolist() == [0, -(10**10), -2 * 10**10]
    texts = write(tmp_path / "texts", [{"__key__": "a", "cls": "cat"}, {"__key__": "b"}])
    with pytest.raises(ValueError, match="integer cls"):
        _ = PCRDataset(texts).labels
    assert count_classes(*open_dataset(texts)) == {"cat": 1, "(no label)": 1}
