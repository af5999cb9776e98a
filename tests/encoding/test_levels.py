"""Levels: every image is cut at the same slope, and nothing else about a dataset changes."""

import contextlib
import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import read_all, read_samples, run_encode, write_files

from pcrshard import PCRDataset, Shard, ShardFormat, ShardWriter, decode_image, open_dataset
from pcrshard.cli.main import main
from pcrshard.encoding.encode_dataset import EncodeOptions, encode
from pcrshard.encoding.encode_jpeg import encode_jpeg, measure_scans, similarities
from pcrshard.encoding.levels import MeasuredScans, choose_slopes, count_scans
from pcrshard.errors import EncodeError
from pcrshard.fidelity.msssim import WEIGHTS, Reference
from pcrshard.format.scan_script import Q95, STANDARD
from pcrshard.testing import make_jpeg


def ramps(number, size=96):
    """A picture that is easy for small numbers: a ramp with noise."""
    rng = np.random.default_rng(number)
    ramp = np.linspace(0, 200, size)[:, None, None] + np.zeros((size, size, 3))
    return np.clip(ramp + rng.normal(0, 1 + number / 4, ramp.shape), 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def varied(tmp_path_factory):
    """Pictures from easy to hard in two classes."""
    from PIL import Image
    from support import saved

    folder = tmp_path_factory.mktemp("varied")
    files = {
        f"{'ab'[n % 2]}/{n:02}.jpg": saved(Image.fromarray(ramps(n)), "JPEG", quality=92)
        for n in range(40)
    }
    write_files(folder / "src", files)
    run_encode(folder / "src", folder / "levels", fmt=ShardFormat("levels"))
    return folder


def test_every_level_is_a_jpeg_and_the_last_is_the_source(varied):
    """Pixels are those of the source at full, and each level can be decoded."""
    samples = read_samples(varied / "levels")
    for level in (1, 4, 9):
        for key, sample in read_samples(varied / "levels", level).items():
            assert decode_image(sample["jpg"]).shape == (96, 96, 3), key
    for key, sample in samples.items():
        source = (varied / "src" / f"{key}.jpg").read_bytes()
        assert np.array_equal(decode_image(sample["jpg"]), decode_image(source)), key


def test_hard_images_get_the_bytes(varied):
    """At a level, similarities differ less, and bytes more, than where all stop at one scan."""
    run_encode(varied / "src", varied / "q95", fmt=ShardFormat("q95"))

    def spread(folder, scan):
        found = []
        for key, sample in read_samples(folder, scan).items():
            full = decode_image((varied / "src" / f"{key}.jpg").read_bytes())
            found.append(Reference(full).compare(decode_image(sample["jpg"])))
        return np.mean(found), np.std(found)

    index, _ = open_dataset(str(varied / "q95"))
    share = index.prefix_bytes(4) / index.prefix_bytes("full")
    levels = PCRDataset(str(varied / "levels"), scan=share * 1.05).scan
    mean, deviation = spread(varied / "levels", levels)
    mean_of_script, deviation_of_script = spread(varied / "q95", 4)
    assert deviation < deviation_of_script
    assert mean > mean_of_script - 0.01


def test_the_same_command_gives_the_same_bytes(varied, tmp_path):
    """The sample, the slopes and the shards depend on the source alone, not on workers or parts."""
    options = EncodeOptions(fmt=ShardFormat("levels"))
    for part in ((1, 2), (0, 2)):
        encode(varied / "src", tmp_path / "parts", options, part=part, workers=1)
    encode(varied / "src", tmp_path / "two", options, workers=2)
    assert read_all(tmp_path / "parts") == read_all(varied / "levels") == read_all(tmp_path / "two")


def test_progress_tells_of_the_sample_first(varied, tmp_path):
    """Reading the sample that levels are chosen by is progress, too, before the shards."""
    seen = []
    options = EncodeOptions(fmt=ShardFormat("levels"))
    encode(varied / "src", tmp_path, options, workers=1, progress=lambda *at: seen.append(at))
    assert (seen[0], seen[-1]) == ((0, 40), (40, 40))


def test_a_resumed_run_keeps_its_slopes(varied, tmp_path):
    """A picture that is corrected makes its shard again, not all of them."""
    src, dst = tmp_path / "src", tmp_path / "out"
    write_files(src, {f"a/{n:02}.jpg": make_jpeg(n, quality=95) for n in range(30)})
    first = run_encode(src, dst, fmt=ShardFormat("levels"), num_shards=3)
    (src / "a/07.jpg").write_bytes(make_jpeg(99, 128, 128, quality=30))
    second = run_encode(src, dst, fmt=ShardFormat("levels"), num_shards=3, resume=True)
    assert first.levels == second.levels
    assert len(set(first.shards.rows[:, 1]) & set(second.shards.rows[:, 1])) == 2


def test_another_dataset_has_the_same_levels(varied, tmp_path):
    """A validation set is read at the same quality as the training set that it goes with."""
    src = write_files(tmp_path / "src", {f"a/{n}.jpg": make_jpeg(n) for n in range(3)})
    command = ["encode", str(src), str(tmp_path / "out"), "--workers", "1"]
    assert main([*command, "--levels-of", str(varied / "levels")]) == 0
    train, _ = open_dataset(str(varied / "levels"))
    val, _ = open_dataset(str(tmp_path / "out"))
    assert train.levels == val.levels
    assert train.schema.groups == val.schema.groups


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--levels-of", "{q95}"], "expected a dataset with levels, its script is q95"),
        (["--script", "levels"], "at least 10 images"),
        (["--script", "levels", "--levels", "0"], "1 to 32 levels"),
        (["--script", "levels", "--level-shares", "0.5,0.2,1"], "rise to 1"),
        (["--script", "levels", "--level-shares", "0.2,0.5"], "rise to 1"),
        (["--script", "levels", "--train-size", "-1"], "train"),
        (["--levels-of", "{levels}", "--train-size", "5"], "not allowed with --train-size"),
    ],
)
def test_levels_that_cannot_be(varied, tmp_path, capsys, options, message):
    """Wrong options, or too few images, are an error that says so; nothing is written."""
    src = write_files(tmp_path / "src", {f"a/{n}.jpg": make_jpeg(n) for n in range(3)})
    run_encode(src, tmp_path / "q95", fmt=ShardFormat("q95"))
    words = [w.format(q95=tmp_path / "q95", levels=varied / "levels") for w in options]
    with contextlib.suppress(SystemExit):  # of a wrong word
        assert main(["encode", str(src), str(tmp_path / "out"), "--workers", "1", *words]) != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_first_level_below_the_first_scan(varied, tmp_path):
    """A share that no level can have is refused with the least one."""
    fmt = ShardFormat("levels", level_shares=(0.001, 1))
    with pytest.raises(EncodeError, match=r"at least 0\.\d+ of the bytes"):
        run_encode(varied / "src", tmp_path / "out", fmt=fmt)


def test_levels_take_the_shares_asked_for(varied, tmp_path):
    """--level-shares are shares of the bytes of the images."""
    fmt = ShardFormat("levels", level_shares=(0.3, 0.6, 1))
    index = run_encode(varied / "src", tmp_path / "out", fmt=fmt, num_shards=1)
    shard = Shard(str(tmp_path / "out" / index.shards[0].name))
    sizes = [sum(len(sample["jpg"]) for sample in shard.samples(level)) for level in (1, 2, 3)]
    assert np.allclose(np.array(sizes) / sizes[-1], [0.3, 0.6, 1], atol=0.08)


def test_a_writer_of_a_stream_has_levels(varied, tmp_path):
    """ShardWriter chooses slopes by its first samples, at the end if there are no more."""
    samples = read_samples(varied / "levels").values()
    with ShardWriter(tmp_path, fmt=ShardFormat("levels"), samples_per_shard=8) as writer:
        for sample in samples:
            writer.write(sample)
    index, _ = open_dataset(str(tmp_path))
    assert index.levels is not None
    assert len(index.shards) == 5
    assert [mean for mean, _ in index.similarity] == sorted(mean for mean, _ in index.similarity)


def test_similarities_are_what_images_have(varied):
    """The similarity that pcr.json gives for a level is the mean MS-SSIM of the images at it."""
    index, _ = open_dataset(str(varied / "levels"))
    for level in (3, 6, 9):
        found = [
            Reference(decode_image((varied / "src" / f"{key}.jpg").read_bytes())).compare(
                decode_image(sample["jpg"])
            )
            for key, sample in read_samples(varied / "levels", level).items()
        ]
        assert abs(np.mean(found) - index.similarity[level - 1][0]) < 0.03
    assert index.similarity[-1] == (1, 1)


def test_the_estimate_ranks_like_pixels(photos):
    """From coefficients alone, losses rank scans and photographs as MS-SSIM does."""
    from scipy.stats import spearmanr

    estimated, measured = [], []
    for path in sorted(photos.glob("*/*/*.jp*g"))[::37]:
        jpeg = path.read_bytes()
        image = encode_jpeg(jpeg, Q95)
        full = decode_image(jpeg, upright=False)
        if max(full.shape) > 2000 or min(full.shape[:2]) < 176:
            continue
        reference = Reference(full)
        estimated += similarities(jpeg, Q95)[:-1]
        groups = list(itertools.accumulate(image.pieces[:-1]))
        measured += [reference.compare(decode_image(g, upright=False)) for g in groups[:-1]]
    assert spearmanr(estimated, measured)[0] > 0.97
    assert np.abs(np.subtract(estimated, measured)).mean() < 0.02


@pytest.mark.parametrize(
    "jpeg",
    [
        make_jpeg(0, 8, 8),
        make_jpeg(1, 1, 1),
        make_jpeg(2, mode="L"),
        make_jpeg(3, mode="CMYK"),
        make_jpeg(4, 600, 40, subsampling=2),
        make_jpeg(5, 33, 257, subsampling=1),
        make_jpeg(6, progressive=True, quality=5),
    ],
    ids=["8x8", "1x1", "gray", "cmyk", "4:2:0", "4:2:2", "poor"],
)
@pytest.mark.parametrize("train_size", [0, 8, 224])
def test_losses_fall_to_zero(jpeg, train_size):
    """Whatever an image is, more scans are worth something or nothing, and all lose nothing."""
    for script in (STANDARD, Q95):
        found = measure_scans(jpeg, script, train_size)
        assert found.losses[-1] == 0
        assert (found.losses >= -1e-9).all()
        assert (found.losses <= 1).all()
        assert (np.diff(found.sizes) > 0).all()


@given(
    st.lists(st.tuples(st.integers(1, 100), st.floats(0, 1)), min_size=2, max_size=12),
    st.integers(1, 2),
    st.lists(st.floats(1e-6, 1), max_size=5, unique=True),
)
def test_a_cut_is_on_the_hull(scans, first, slopes):
    """At each slope no other prefix is better, prefixes grow from level to level, and the last
    level has everything.
    """
    sizes = list(itertools.accumulate(size for size, _ in scans))
    image = MeasuredScans.of(sizes, sorted((loss for _, loss in scans), reverse=True), first)
    slopes = [*sorted(slopes, reverse=True), 0.0]
    counts = count_scans(image, slopes)
    assert counts[-1] == len(scans)
    assert (np.diff(counts) >= 0).all()
    assert counts[0] >= first
    for slope, count in zip(slopes[:-1], counts, strict=False):
        costs = (image.losses + slope * image.sizes)[first - 1 :]
        assert costs[count - first] <= costs.min() + 1e-12


def test_images_that_are_alike_are_cut_alike():
    """Where there is no spread, levels are the scans of a script."""
    image = MeasuredScans.of([100, 200, 400, 800], [0.5, 0.2, 0.05, 0], 1)
    slopes = choose_slopes([image] * 20, 4, (0.125, 0.25, 0.5, 1))
    assert count_scans(image, slopes).tolist() == [1, 2, 3, 4]


def test_the_schema_has_the_slopes(varied):
    """Shards of other slopes are another dataset, though their levels have the same numbers."""
    index = json.loads((varied / "levels" / "pcr.json").read_text())
    assert index["schema"]["script"] == "levels"
    slopes = index["levels"]["slopes"]
    assert index["schema"]["groups"] == [f"q95 to slope {slope:.6g}" for slope in slopes]
    assert WEIGHTS  # the scales that similarities are of


def test_splits_have_the_same_levels(varied, tmp_path):
    """With --split all, validation images are read at the quality that level had in training."""
    for n in range(80):
        split = "train" if n < 66 else "val"
        write_files(tmp_path / "src", {f"{split}/a/{n:02}.jpg": make_jpeg(n, 64, 64, quality=92)})
    command = ["encode", str(tmp_path / "src"), str(tmp_path / "out"), "--workers", "1"]
    assert main([*command, "--split", "all"]) == 0
    train, val = (open_dataset(str(tmp_path / "out" / split))[0] for split in ("train", "val"))
    assert train.levels is not None
    assert train.levels == val.levels


def test_a_writer_without_levels_leaves_its_folder(tmp_path):
    """Too few images for levels are an error that names the way out; the folder can be used."""
    with pytest.raises(EncodeError, match="at least 10 images"):
        with ShardWriter(tmp_path / "out", fmt=ShardFormat("levels")) as writer:
            writer.write({"__key__": "a", "jpg": make_jpeg()})
    with ShardWriter(tmp_path / "out") as writer:
        writer.write({"__key__": "a", "jpg": make_jpeg()})
    assert len(PCRDataset(str(tmp_path / "out"))) == 1


def test_a_writer_of_lists_knows_their_similarity(tmp_path):
    """Images in lists count like others, so that quality= works."""
    with ShardWriter(tmp_path) as writer:
        for n in range(12):
            writer.write({"__key__": f"{n}", "views.jpg": [make_jpeg(n), make_jpeg(n + 50)]})
    index, _ = open_dataset(str(tmp_path))
    assert index.similarity
    assert PCRDataset(str(tmp_path), quality=0.9).scan == index.scan_of_quality(0.9)


def test_levels_with_previews_deferred_fields_and_kept_files(varied, tmp_path):
    """All that a dataset may have goes with levels, and a staged copy is read by quality."""
    src = write_files(
        tmp_path / "src",
        {f"{'ab'[n % 2]}/{n:02}.jpg": make_jpeg(n, 64, 64, quality=92) for n in range(70)}
        | {"a/broken.jpg": make_jpeg(1)[:-200]},
    )
    fmt = ShardFormat("levels", layout="preview", base=2, preview_fields=("cls",))
    options = EncodeOptions(fmt=fmt, on_error="keep", num_shards=2)
    encode(src, tmp_path / "out", options, workers=1)
    command = ["verify", str(tmp_path / "out"), "--against", str(src), "--workers", "1"]
    assert main(command) == 0
    dataset = PCRDataset(str(tmp_path / "out"), quality=0.9)
    sound = dataset.subset(dataset.decodable)
    assert len(sound) == 70
    assert len({decode_image(sound[n]["jpg"]).shape for n in range(70)}) == 1
    copy = str(tmp_path / "copy")
    assert main(["stage", str(tmp_path / "out"), copy, "--quality", "0.9"]) == 0
    staged = PCRDataset(copy, quality=0.9)
    assert [staged[n]["jpg"] for n in (0, 35)] == [dataset[n]["jpg"] for n in (0, 35)]
    late = ShardFormat("levels", deferred={"bin": 4})
    with ShardWriter(tmp_path / "late", fmt=late) as writer:
        for n in range(20):
            jpeg = make_jpeg(n, 64, 64, quality=92)
            writer.write({"__key__": f"{n}", "jpg": jpeg, "bin": b"array"})
    assert "bin" not in PCRDataset(str(tmp_path / "late"), scan=3)[0]
    assert PCRDataset(str(tmp_path / "late"), scan=4)[0]["bin"] == b"array"


def test_what_people_look_at_says_level(varied, tmp_path):
    """The card of a dataset calls what a job chooses a level where it is one, else a scan."""
    run_encode(varied / "src", tmp_path / "q95", fmt=ShardFormat("q95"))
    for folder, name in ((varied / "levels", "level"), (tmp_path / "q95", "scan")):
        assert main(["card", str(folder)]) == 0
        assert f"| {name} | kB per sample |" in (folder / "README.md").read_text()
