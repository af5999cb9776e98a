"""A whole dataset to shards: the same bytes however it runs, nothing lost in silence, bounded memory."""

import io
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tarfile

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import digest, read_all, run_encode, wait_for

from pcrshard import EncodeOptions, Shard, ShardFormat, ShardWriter, open_dataset
from pcrshard.encoding.resume_journal import JOURNAL, SKIPPED
from pcrshard.encoding.shard_plan import plan_shards
from pcrshard.encoding.sources import FieldRef, SampleRef
from pcrshard.errors import CorruptJpeg, EncodeError, FormatError, PCRError
from pcrshard.jpeg import pixels
from pcrshard.testing import make_jpeg


def read_samples(folder, scan="full"):
    index, urls = open_dataset(str(folder))
    shards = (Shard(url, entry=entry) for url, entry in zip(urls, index.shards, strict=True))
    return {sample["__key__"]: sample for shard in shards for sample in shard.samples(scan)}


def save_image(path, mode="RGB"):
    """A middle gray picture of 30x20 (white in mode 1) in the format of the name."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    if mode == "I;16":
        image = Image.fromarray(np.full((20, 30), 128 * 257, np.uint16))
    else:
        image = Image.new("RGB", (30, 20), (255,) * 3 if mode == "1" else (128,) * 3).convert(
            mode, palette=Image.Palette.ADAPTIVE
        )
    image.save(path)
    return path


def make_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture
def mixed_folder(tmp_path):
    """Four good images and three bad ones."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    for i in range(4):
        (folder / f"good{i}.jpg").write_bytes(make_jpeg(i))
    (folder / "cut.jpg").write_bytes(make_jpeg(9)[:-30])
    (folder / "empty.jpg").write_bytes(b"")
    save_image(folder / "png.png")
    return folder


SAMPLES = [SampleRef(str(i), (FieldRef("jpg", f"{i}.jpg"),)) for i in range(300)]


@settings(max_examples=60, deadline=None)
@given(
    total=st.integers(1, 300),
    seed=st.none() | st.integers(0, 2**64),
    how=st.sampled_from(["num_shards", "samples_per_shard", None]),
    data=st.data(),
)
def test_plan_is_a_fair_partition(total, seed, how, data):
    """Every sample is in exactly one shard, sizes differ by at most one, and the same seed gives the same plan."""
    samples = SAMPLES[:total]
    number = data.draw(st.integers(1, total))
    options = EncodeOptions(seed=seed, **({how: number} if how else {}))
    shards = plan_shards(samples, options)
    flat = [sample for shard in shards for sample in shard]
    assert sorted(flat) == sorted(samples)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert shards == plan_shards(samples, options)
    if how == "num_shards":
        assert len(shards) == number
    if how == "samples_per_shard":
        assert max(map(len, shards)) <= number
    if seed is None:
        assert flat == samples


def test_plan_depends_on_the_seed():
    """Another seed is another shuffle."""
    assert plan_shards(SAMPLES, EncodeOptions(seed=0)) != plan_shards(
        SAMPLES, EncodeOptions(seed=1)
    )


def test_more_shards_than_samples():
    """An empty shard is never made."""
    with pytest.raises(EncodeError, match="at most 3 shards for 3 samples, got 4"):
        plan_shards(SAMPLES[:3], EncodeOptions(num_shards=4))


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_shards": 0},
        {"samples_per_shard": -1},
        {"num_shards": 1, "samples_per_shard": 1},
        {"name": "a/b"},
        {"name": ""},
        {"name": "x" * 65},
        {"on_error": "ignore"},
        {"reencode_quality": 0},
        {"reencode_quality": 101},
        {"resize_short": 0},
    ],
)
def test_wrong_options(wrong):
    """Options are refused when they are made, not after hours."""
    with pytest.raises(EncodeError):
        EncodeOptions(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"script": "none"}, {"layout": "flat"}, {"base": 0}, {"base": 11}],
)
def test_wrong_formats(wrong):
    """So are formats."""
    with pytest.raises(EncodeError):
        ShardFormat(**wrong)


def test_workers_do_not_change_bytes(synthetic_folder, dataset, tmp_path):
    """One process or two, the files are the same to the byte."""
    run_encode(synthetic_folder, tmp_path, num_shards=4, workers=2)
    assert read_all(tmp_path) == read_all(dataset)


def test_the_order_of_the_listing_does_not_change_bytes(
    synthetic_folder, dataset, tmp_path, monkeypatch
):
    """Disks list folders in any order; the shards do not show it."""
    scandir = os.scandir

    class Shuffled:
        def __init__(self, path):
            with scandir(path) as entries:
                shuffled = list(entries)
            random.Random(7).shuffle(shuffled)
            self.entries = iter(shuffled)

        def __enter__(self):
            return self

        def __iter__(self):
            return self

        def __next__(self):
            return next(self.entries)

        def __exit__(self, *error):
            return None

        def close(self):
            return None

    monkeypatch.setattr(os, "scandir", Shuffled)
    run_encode(synthetic_folder, tmp_path, num_shards=4)
    assert read_all(tmp_path) == read_all(dataset)


def test_a_dataset_is_its_source(synthetic_folder, dataset):
    """Every image is there once, with its class, its pixels and nothing but shards and indexes beside it."""
    index, _ = open_dataset(str(dataset))
    samples = read_samples(dataset)
    paths = {
        str(p.relative_to(synthetic_folder).with_suffix("")): p
        for p in synthetic_folder.rglob("*.jpg")
    }
    assert (index.classes, index.num_samples, samples.keys()) == (("cat", "dog"), 24, paths.keys())
    for key, path in paths.items():
        assert index.classes[int(samples[key]["cls"])] == path.parent.name
        mode = "cmyk" if key.endswith("006") else "rgb"
        assert np.array_equal(
            pixels.decode(samples[key]["jpg"], mode), pixels.decode(path.read_bytes(), mode)
        )
    names = {entry.name for entry in index.shards} | {"pcr.json", JOURNAL}
    assert {p.name for p in dataset.iterdir()} == names


def test_a_flat_folder_has_no_classes(tmp_path):
    """Without class folders there are neither labels nor class names."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.jpg").write_bytes(make_jpeg())
    index = run_encode(tmp_path / "src", tmp_path / "dst")
    assert index.classes == ()
    assert set(read_samples(tmp_path / "dst")["a"]) == {"__key__", "jpg"}


def test_progress_reaches_the_end(synthetic_folder, tmp_path):
    """Progress is told in samples, rising to all of them."""
    calls = []
    run_encode(synthetic_folder, tmp_path, num_shards=4, progress=lambda *call: calls.append(call))
    assert [total for _, total in calls] == [24] * 4
    assert [done for done, _ in calls] == [6, 12, 18, 24]


def remove(path):
    path.unlink()


def overwrite(offset):
    def damage(path):
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)

    return damage


DAMAGES = {
    "removed": remove,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-512]),
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + bytes(512)),
    "head": overwrite(530),
    "tar header": overwrite(0),
    "scan": overwrite(-5000),
    "trailer": overwrite(-1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_resume_repairs(synthetic_folder, dataset, tmp_path, damage):
    """After a shard is lost or damaged, --resume gives the bytes of an undisturbed run."""
    shutil.copytree(dataset, tmp_path, dirs_exist_ok=True)
    DAMAGES[damage](tmp_path / "data-000002.tar")
    run_encode(synthetic_folder, tmp_path, num_shards=4, resume=True)
    assert read_all(tmp_path) == read_all(dataset)


def test_resume_keeps_what_is_whole(synthetic_folder, dataset, tmp_path):
    """Only what is missing is encoded again."""
    shutil.copytree(dataset, tmp_path, dirs_exist_ok=True)
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("*.tar")}
    (tmp_path / "data-000001.tar").unlink()
    run_encode(synthetic_folder, tmp_path, num_shards=4, resume=True)
    changed = {p.name for p in tmp_path.glob("*.tar") if before[p.name] != p.stat().st_mtime_ns}
    assert changed == {"data-000001.tar"}


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"num_shards": 3},
        {"name": "x"},
        {"resize_short": 9},
        {"fmt": ShardFormat(base=1)},
    ],
)
def test_resume_with_other_options_is_refused(synthetic_folder, dataset, tmp_path, other):
    """Two runs are never mixed."""
    shutil.copytree(dataset, tmp_path, dirs_exist_ok=True)
    with pytest.raises(EncodeError, match="options differ"):
        run_encode(synthetic_folder, tmp_path, **{"num_shards": 4} | other, resume=True)
    assert read_all(tmp_path) == read_all(dataset)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"fingerprint": "x"}',
        b'{"fingerprint": 1, "shards": {"a": 1}}',
        b"\xff",
    ],
)
def test_a_broken_journal(synthetic_folder, tmp_path, text):
    """A journal that cannot be read is named, with what to do."""
    (tmp_path / JOURNAL).write_bytes(text)
    with pytest.raises(EncodeError, match=f"{JOURNAL}"):
        run_encode(synthetic_folder, tmp_path, resume=True)


def test_an_existing_dataset_is_not_overwritten(synthetic_folder, dataset, tmp_path):
    """Encoding into a dataset's folder is refused before a byte is written."""
    shutil.copytree(dataset, tmp_path, dirs_exist_ok=True)
    with pytest.raises(EncodeError, match=r"already holds a dataset.*--resume"):
        run_encode(synthetic_folder, tmp_path, num_shards=2)
    assert read_all(tmp_path) == read_all(dataset)


def test_resume_does_not_take_over_a_dataset_of_another_maker(synthetic_folder, tmp_path):
    """A ShardWriter's dataset has no journal, so --resume cannot go on with it, and must not write over it."""
    with ShardWriter(str(tmp_path), samples_per_shard=2) as writer:
        writer.write({"__key__": "a", "jpg": make_jpeg()})
    before = read_all(tmp_path)
    with pytest.raises(EncodeError):
        run_encode(synthetic_folder, tmp_path, resume=True)
    assert read_all(tmp_path) == before


def start_encode(src, dst, *options):
    code = "import sys; from pcrshard.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "encode", str(src), str(dst), *options]
    return subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


@pytest.fixture(scope="module")
def larger_folder(tmp_path_factory):
    """Images that take some time to encode."""
    folder = tmp_path_factory.mktemp("larger")
    jpegs = [make_jpeg(i, 600, 800, quality=95) for i in range(6)]
    for i in range(48):
        (folder / f"{i:02d}.jpg").write_bytes(jpegs[i % 6])
    return folder


@pytest.fixture(scope="module")
def larger_dataset(larger_folder, tmp_path_factory):
    target = tmp_path_factory.mktemp("larger_dataset")
    run_encode(larger_folder, target, num_shards=12)
    return target


@pytest.mark.parametrize(("moment", "workers"), [("temporary", 1), (1, 1), (5, 1), (3, 2)])
def test_resume_after_kill(larger_folder, larger_dataset, tmp_path, moment, workers):
    """Killed at any moment and resumed, a run gives the files of an undisturbed one and nothing else."""

    def reached():
        if moment == "temporary":
            return any(tmp_path.glob(".pcrshard-*"))
        return len(list(tmp_path.glob("*.tar"))) >= moment

    process = start_encode(larger_folder, tmp_path, "--num-shards", "12", "--workers", str(workers))
    try:
        wait_for(reached)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "pcr.json").exists()
    run_encode(larger_folder, tmp_path, num_shards=12, resume=True)
    assert {
        name: found for name, found in read_all(tmp_path).items() if not name.startswith(".")
    } == read_all(larger_dataset)


def test_resume_removes_what_a_kill_left(synthetic_folder, dataset, tmp_path):
    """The unfinished shard of a killed run does not stay as a hidden file of a shard's size."""
    shutil.copytree(dataset, tmp_path, dirs_exist_ok=True)
    (tmp_path / "data-000003.tar").rename(tmp_path / ".pcrshard-a1b2c3d4.tmp")
    run_encode(synthetic_folder, tmp_path, num_shards=4, resume=True)
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in dataset.iterdir()}


def test_workers_die_with_their_parent(larger_folder, tmp_path):
    """A killed run leaves no worker processes behind."""
    process = start_encode(larger_folder, tmp_path, "--num-shards", "12", "--workers", "2")

    def group():
        found = []
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == process.pid and fields[0] not in "ZX":
                found.append(int(stat.parent.name))
        return found

    try:
        wait_for(lambda: any(tmp_path.glob("*.tar")))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait_for(lambda: not group(), seconds=3)
        assert group() == []
    finally:
        if group():
            os.killpg(process.pid, signal.SIGKILL)


def test_skip_lists_what_it_skips(mixed_folder, tmp_path):
    """--on-error skip encodes the good images and lists each bad one with its file and the reason."""
    index = run_encode(mixed_folder, tmp_path / "dst", on_error="skip", num_shards=2)
    rows = [json.loads(line) for line in (tmp_path / "dst" / SKIPPED).read_text().splitlines()]
    assert index.num_samples == 4
    assert {pathlib.Path(row["source"]).name for row in rows} == {"cut.jpg", "empty.jpg", "png.png"}
    assert all(row["key"] and row["reason"] and "\n" not in row["reason"] for row in rows)
    assert read_samples(tmp_path / "dst").keys() == {f"good{i}" for i in range(4)}


@pytest.mark.parametrize("workers", [1, 2])
def test_raise_names_the_file_in_one_line(mixed_folder, tmp_path, workers):
    """By default a bad image stops the run with one line: the file, the reason, the option that would go on."""
    for name in ("empty.jpg", "png.png"):
        (mixed_folder / name).unlink()
    with pytest.raises(FormatError) as caught:
        run_encode(mixed_folder, tmp_path / "dst", num_shards=2, workers=workers)
    message = str(caught.value)
    assert all(
        word in message for word in (str(mixed_folder / "cut.jpg"), "no EOI", "--on-error skip")
    )
    assert "\n" not in message
    assert not (tmp_path / "dst" / "pcr.json").exists()


def test_a_stopped_run_goes_on_with_skip(mixed_folder, tmp_path):
    """After a raise, --resume --on-error skip keeps the shards that were written, and ends as a run with skip from the start."""
    with pytest.raises(FormatError):
        run_encode(mixed_folder, tmp_path / "a", num_shards=3)
    run_encode(mixed_folder, tmp_path / "a", num_shards=3, resume=True, on_error="skip")
    run_encode(mixed_folder, tmp_path / "b", num_shards=3, on_error="skip")
    assert read_all(tmp_path / "a") == read_all(tmp_path / "b")


def test_resume_with_raise_does_not_keep_skipped_samples(mixed_folder, tmp_path):
    """Skipped samples are tried again by a resumed run that does not skip, so that a mended file gets in."""
    run_encode(mixed_folder, tmp_path / "a", num_shards=1, on_error="skip")
    with pytest.raises(FormatError):
        run_encode(mixed_folder, tmp_path / "a", num_shards=1, resume=True)


def test_nothing_is_left_of_a_dataset_of_bad_images(tmp_path):
    """When every image is bad the error says so and names the report; there is no dataset."""
    (tmp_path / "src").mkdir()
    for i in range(3):
        (tmp_path / "src" / f"{i}.jpg").write_bytes(b"bad")
    with pytest.raises(EncodeError, match=rf"every image was skipped.*{SKIPPED}"):
        run_encode(tmp_path / "src", tmp_path / "dst", on_error="skip", num_shards=2)
    assert {p.name for p in (tmp_path / "dst").iterdir()} == {JOURNAL, SKIPPED}
    assert len((tmp_path / "dst" / SKIPPED).read_text().splitlines()) == 3


def test_a_png_is_refused_with_the_option_named(tmp_path):
    """A PNG is not converted unasked."""
    save_image(tmp_path / "src" / "a.png")
    with pytest.raises(CorruptJpeg, match=r"PNG.*--reencode-quality.*a\.png"):
        run_encode(tmp_path / "src", tmp_path / "dst")


def test_an_empty_file_is_not_said_to_be_convertible(tmp_path):
    """The hint to convert is given only where it helps."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.jpg").write_bytes(b"")
    with pytest.raises(CorruptJpeg, match=r"empty file") as caught:
        run_encode(tmp_path / "src", tmp_path / "dst")
    assert "reencode" not in str(caught.value)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"])
def test_reencode_quality_converts(tmp_path, mode):
    """With the option, PNGs of any kind become JPEGs that look the same."""
    save_image(tmp_path / "src" / "a.png", mode)
    run_encode(tmp_path / "src", tmp_path / "dst", reencode_quality=95)
    decoded = pixels.decode(read_samples(tmp_path / "dst")["a"]["jpg"])
    expected = 255 if mode == "1" else 128
    assert decoded.shape == (20, 30, 3)
    assert abs(decoded.astype(int) - expected).max() <= 6


def test_reencode_leaves_jpegs_alone(synthetic_folder, dataset, tmp_path):
    """The option touches only what is not a JPEG."""
    run_encode(synthetic_folder, tmp_path, num_shards=4, reencode_quality=50)
    assert read_samples(tmp_path) == read_samples(dataset)


def test_two_convertible_fields_are_not_merged(tmp_path):
    """A sample with two images that would become the same field is refused, or keeps both."""
    png, webp = (
        save_image(tmp_path / "a.png").read_bytes(),
        save_image(tmp_path / "a.bmp").read_bytes(),
    )
    url = make_tar(tmp_path / "a.tar", [("k.png", png), ("k.bmp", webp)])
    try:
        run_encode(url, tmp_path / "dst", reencode_quality=90)
    except PCRError as error:
        assert "k" in str(error)
    else:
        assert len(read_samples(tmp_path / "dst")["k"]) == 3


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [(80, 120, (40, 60)), (120, 80, (60, 40)), (30, 90, (30, 90)), (40, 40, (40, 40))],
)
def test_resize_short(tmp_path, height, width, expected):
    """Larger images get the shorter side asked for; smaller ones stay as they are, lossless."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.jpg").write_bytes(jpeg := make_jpeg(1, height, width, quality=95))
    run_encode(tmp_path / "src", tmp_path / "dst", resize_short=40)
    decoded = pixels.decode(read_samples(tmp_path / "dst")["a"]["jpg"])
    assert decoded.shape[:2] == expected
    if expected == (height, width):
        assert np.array_equal(decoded, pixels.decode(jpeg))


def test_shard_writer_and_encode_agree(synthetic_folder, dataset, tmp_path):
    """A ShardWriter given the same samples in the same order writes the same bytes."""
    samples = read_samples(dataset)
    index, _ = open_dataset(str(dataset))
    with ShardWriter(str(tmp_path), samples_per_shard=6, classes=index.classes) as writer:
        for key, sample in samples.items():
            writer.write(
                sample
                | {"jpg": (synthetic_folder / f"{key}.jpg").read_bytes(), "cls": int(sample["cls"])}
            )
    assert read_all(tmp_path) == read_all(dataset)


@pytest.mark.parametrize(
    "sample",
    [
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
    """A sample that cannot be kept is one of our errors, whatever is wrong with it."""
    with pytest.raises(PCRError), ShardWriter(str(tmp_path)) as writer:
        writer.write(sample)
    assert list(tmp_path.iterdir()) == []


def test_a_shard_writer_without_samples(tmp_path):
    """A dataset of no samples is not written, because nothing could read it."""
    with pytest.raises(EncodeError), ShardWriter(str(tmp_path)):
        pass


@pytest.mark.parametrize("count", [("jpg", 17), ("txt", 257)])
def test_more_fields_than_a_shard_can_name(tmp_path, count):
    """What a reader would refuse is refused when it is written."""
    kind, number = count
    sample = {"__key__": "a", "jpg": make_jpeg()} | {
        f"f{i}.{kind}": make_jpeg() for i in range(number)
    }
    with pytest.raises(EncodeError), ShardWriter(str(tmp_path)) as writer:
        writer.write(sample)


def test_several_streams_and_missing_fields(tmp_path):
    """Samples may have several images, and not all the same fields; each gets back what it had."""
    one, two = make_jpeg(1), make_jpeg(2, mode="L")
    members = [
        ("a.left.jpg", one),
        ("a.right.jpg", two),
        ("a.cls", b"1"),
        ("b.left.jpg", two),
        ("b.txt", b""),
        ("c.txt", b"no image"),
    ]
    run_encode(make_tar(tmp_path / "a.tar", members), tmp_path / "dst", num_shards=3)
    for scan in (1, "full"):
        samples = read_samples(tmp_path / "dst", scan)
        assert {k: set(v) - {"__key__"} for k, v in samples.items()} == {
            "a": {"left.jpg", "right.jpg", "cls"},
            "b": {"left.jpg", "txt"},
            "c": {"txt"},
        }
    assert np.array_equal(pixels.decode(samples["a"]["right.jpg"]), pixels.decode(two))
    assert (samples["b"]["txt"], samples["c"]["txt"]) == (b"", b"no image")


@pytest.mark.parametrize("base", [1, 2, 10])
def test_preview_layout(synthetic_folder, dataset, tmp_path, base):
    """The preview layout holds the same samples, and any tar tool sees images of its base scans with their labels."""
    run_encode(
        synthetic_folder,
        tmp_path,
        num_shards=2,
        fmt=ShardFormat(layout="preview", base=base, preview_fields=("cls",)),
    )
    assert read_samples(tmp_path) == read_samples(dataset)
    with tarfile.open(tmp_path / "data-000000.tar") as tar:
        members = {
            info.name: tar.extractfile(info).read()
            for info in tar
            if not info.name.startswith("__")
        }
    shard = {s["__key__"]: s for s in Shard(str(tmp_path / "data-000000.tar")).samples(base)}
    assert members == {
        f"{key}.{field}": s[field] for key, s in shard.items() for field in ("jpg", "cls")
    }


def test_an_unknown_preview_field_is_refused(synthetic_folder, tmp_path):
    """A mistyped --preview-fields is an error, not a shard without it."""
    with pytest.raises(EncodeError, match="clss"):
        run_encode(
            synthetic_folder,
            tmp_path,
            num_shards=2,
            fmt=ShardFormat(layout="preview", preview_fields=("clss",)),
        )


def test_remote_destination(synthetic_folder, dataset):
    """Writing to an object store gives the same bytes, and can be resumed there."""
    memory = fsspec.filesystem("memory")
    dst = "memory://encode-test/out"
    run_encode(synthetic_folder, dst, num_shards=4)
    memory.rm("/encode-test/out/data-000001.tar")
    run_encode(synthetic_folder, dst, num_shards=4, resume=True)
    found = {
        path.rpartition("/")[2]: digest(memory.cat_file(path))
        for path in memory.find("/encode-test/out")
    }
    assert {name: what for name, what in found.items() if name != JOURNAL} == read_all(dataset)


def test_a_missing_file_of_a_list(tmp_path):
    """A list that names a file that is not there stops with that file's name."""
    (tmp_path / "a.tsv").write_text("none.jpg\t1\n")
    with pytest.raises(PCRError, match=r"none\.jpg"):
        run_encode(tmp_path / "a.tsv", tmp_path / "dst")


MEMORY = """
import resource, sys
from pcrshard import EncodeOptions, encode
from pcrshard.encoding.encode_jpeg import encode_jpeg
from pcrshard.testing import make_jpeg
encode_jpeg(make_jpeg())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
index = encode(sys.argv[1], sys.argv[2], EncodeOptions(num_shards=1), workers=1)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) * 1024 / index.shards[0].shard_bytes, index.shards[0].shard_bytes)
"""


def test_a_worker_holds_less_than_three_shards(photos, tmp_path):
    """Encoding a shard of 30 MB of photographs takes at most three times its size in memory."""
    paths = [path for path in sorted((photos / "imagenet").rglob("*")) if path.is_file()]
    size = 0
    (tmp_path / "src").mkdir()
    for i, path in enumerate(paths):
        if size > 30e6:
            break
        size += path.stat().st_size
        (tmp_path / "src" / f"{i}.jpg").symlink_to(path)
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, tmp_path / "src", tmp_path / "dst"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    shards, shard_bytes = map(float, result.stdout.split())
    assert size > 25e6
    assert shard_bytes > 20e6
    assert shards < 3, f"{shards:.2f} shards of {shard_bytes / 1e6:.0f} MB"


def test_each_odd_file_is_kept_or_refused_in_one_line(data_folder, tmp_path):
    """Hostile and damaged files of every kind: those that are refused are listed, all others decode as before."""
    (tmp_path / "src").mkdir()
    names = sorted(p.name for p in (data_folder / "odd").iterdir() if p.suffix in (".jpg", ".jpeg"))
    for name in names:
        (tmp_path / "src" / name).symlink_to(data_folder / "odd" / name)
    index = run_encode(tmp_path / "src", tmp_path / "dst", on_error="skip", num_shards=2)
    rows = [json.loads(line) for line in (tmp_path / "dst" / SKIPPED).read_text().splitlines()]
    assert index.num_samples + len(rows) == len(names)
    assert all("\n" not in row["reason"] for row in rows)
    good = {
        p.stem.replace(".", "_")
        for p in (data_folder / "odd").iterdir()
        if p.name.startswith("valid-")
    }
    assert len(good & read_samples(tmp_path / "dst").keys()) > 80


def test_a_script_without_a_main_guard_is_told_so(synthetic_folder, tmp_path):
    """The trap of spawned workers is named, with what to do; worker processes import the script."""
    thread = "threading.Thread(target=threading.Event().wait, daemon=True).start()"  # so that workers are not forked
    call = f"pcrshard.encode({str(synthetic_folder)!r}, {str(tmp_path / 'out')!r}, workers=2)"
    script = tmp_path / "script.py"
    for guard in ("", "if __name__ == '__main__': "):
        script.write_text(f"import threading, pcrshard\n{thread}\n{guard}{call}\n")
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=300
        )
        told = 'encode below `if __name__ == "__main__":` only' in done.stderr
        assert (done.returncode == 0, told) == (bool(guard), not guard), done.stderr
        shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("resume", [False, True])
def test_tars_that_are_there_are_not_replaced(synthetic_folder, tmp_path, resume):
    """A shard never takes the place of a file that no run of this dataset has written, such as its own source."""
    with tarfile.open(tmp_path / "data-000000.tar", "w") as tar:
        tar.add(next(pathlib.Path(synthetic_folder).rglob("*.jpg")), "a.jpg")
    before = (tmp_path / "data-000000.tar").read_bytes()
    with pytest.raises(EncodeError, match=r"already holds data-000000\.tar"):
        run_encode(synthetic_folder, tmp_path, resume=resume)
    with pytest.raises(EncodeError, match="apart from the source"):
        run_encode(tmp_path, tmp_path, resume=resume)
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tar"] == [
        "data-000000.tar"
    ]
    assert (tmp_path / "data-000000.tar").read_bytes() == before


def test_shards_do_not_go_into_their_source(synthetic_folder, tmp_path):
    """Shards below the images would be taken for sources by the next run."""
    shutil.copytree(synthetic_folder, tmp_path / "photos")
    with pytest.raises(EncodeError, match="apart from the source"):
        run_encode(tmp_path / "photos", tmp_path / "photos" / "shards")
    run_encode(tmp_path / "photos", tmp_path / "photos-pcr")
