"""Which sample goes into which shard: fair, repeatable, refused before anything is written."""

import pytest
from encode_support import make_tar
from hypothesis import given, settings
from hypothesis import strategies as st
from support import run_encode, write_files

from pcrshard import EncodeOptions
from pcrshard.cli.main import main
from pcrshard.encoding.samples import FieldRef, SampleRef
from pcrshard.encoding.shard_plan import default_num_shards, plan, plan_shards
from pcrshard.errors import EncodeError
from pcrshard.testing import make_jpeg

SAMPLES = [SampleRef(str(i), (FieldRef("jpg", f"{i}.jpg"),)) for i in range(300)]


@settings(max_examples=60)
@given(
    total=st.integers(1, 300),
    seed=st.none() | st.integers(0, 2**64),
    how=st.sampled_from(["num_shards", "samples_per_shard", None]),
    data=st.data(),
)
def test_plan_is_a_fair_partition(total, seed, how, data):
    """Every sample is in exactly one shard, sizes differ by at most one, and the same seed gives
    the same plan.
    """
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
    """Different seeds give different shuffles."""
    zero, one = (plan_shards(SAMPLES, EncodeOptions(seed=seed)) for seed in (0, 1))
    assert zero != one


@settings(max_examples=60)
@given(
    labels=st.lists(st.sampled_from([b"0", b"1", b"2", b"30", None]), min_size=1, max_size=300),
    seed=st.none() | st.integers(0, 9),
    data=st.data(),
)
def test_stratified_shards_share_every_class(labels, seed, data):
    """In any two shards the number of samples of each class differs by at most one, and so do the
    sizes; nothing is lost.
    """
    samples = SAMPLES[: len(labels)]
    count = data.draw(st.integers(1, len(labels)))
    options = EncodeOptions(seed=seed, num_shards=count, stratify=True)
    shards = plan_shards(samples, options, labels)
    assert sorted(sample for shard in shards for sample in shard) == sorted(samples)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    label_of = dict(zip(samples, labels, strict=True))
    for label in set(labels):
        counts = [sum(label_of[sample] == label for sample in shard) for shard in shards]
        assert max(counts) - min(counts) <= 1
    assert shards == plan_shards(samples, options, labels)
    if seed is None:
        places = {sample: number for number, sample in enumerate(samples)}
        assert all(sorted(shard, key=places.__getitem__) == shard for shard in shards)


@pytest.mark.parametrize(
    ("how", "shards"),
    [
        ({"for_ranks": 4, "for_workers": 2}, 8),
        ({"for_ranks": 7, "samples_per_shard": 20}, 21),
        ({"for_ranks": 5, "num_shards": 10}, 10),
        ({"for_ranks": 4, "for_workers": 2, "num_shards": 10}, "4 ranks x 2 workers, such as 16"),
        ({"for_ranks": 301}, "at most 300 shards for 300 samples, got 301"),
        ({"num_shards": 301}, "at most 300 shards for 300 samples, got 301"),
    ],
)
def test_ranks_and_workers_divide_the_shards(how, shards):
    """Every worker of every rank gets the same number of shards, or the error says what would; no
    shard is empty.
    """
    if isinstance(shards, int):
        assert len(plan_shards(SAMPLES, EncodeOptions(**how))) == shards
    else:
        with pytest.raises(EncodeError, match=shards):
            plan_shards(SAMPLES, EncodeOptions(**how))


@pytest.mark.parametrize(
    ("samples", "shards"),
    [(16, 1), (17, 2), (128, 8), (8192, 8), (8193, 16), (16384, 16), (16385, 24)],
)
def test_ranks_can_split_the_default_number_of_shards(samples, shards):
    """Large datasets have a multiple of 8 shards of at most 1024 samples each."""
    assert default_num_shards(samples) == shards


@pytest.mark.parametrize(
    "wrong",
    [
        {"for_ranks": 0},
        {"for_workers": 0},
        {"classes": ("a", "a")},
        {"num_shards": 0},
        {"samples_per_shard": 0},
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
    ("qualities", "is_high"),
    [
        ([90] * 3, True),
        ([89] * 3, False),
        ([70] * 40 + [95] * 60, True),
        ([95] * 40 + [70] * 60, False),
    ],
)
def test_the_script_follows_the_quality_of_the_sources(tmp_path, capsys, qualities, is_high):
    """``--script auto`` takes q95 if most of the sources have quality 90 or more, and says so
    before it writes.
    """
    jpegs = {quality: make_jpeg(0, 16, 16, quality=quality) for quality in qualities}
    files = {f"{number:03}.jpg": jpegs[quality] for number, quality in enumerate(qualities)}
    src = str(write_files(tmp_path / "src", files))
    options = ["--script", "auto", "--workers", "1"]
    assert main(["encode", src, str(tmp_path / "out"), *options]) == 0
    chosen = "q95" if is_high else "standard"
    said = capsys.readouterr()
    assert f"script: {chosen}\n" in said.out
    assert f"writing {len(qualities)} samples to " in said.err
    assert f"script {chosen}" in said.err


def test_a_source_without_images_is_refused(tmp_path):
    """Before anything is written, and with what to do."""
    tar = make_tar(tmp_path / "a.tar", [("a.flac", b""), ("a.cls", b"")])
    with pytest.raises(EncodeError, match=r"found \['cls', 'flac'\]; --on-error keep"):
        plan(tar, EncodeOptions())


def test_more_shards_than_a_dataset_index_may_name(tmp_path, monkeypatch):
    """A dataset whose pcr.json no reader would accept is refused before anything is written."""
    write_files(tmp_path / "src", {f"{i}.jpg": make_jpeg(0) for i in range(40)})
    monkeypatch.setattr("pcrshard.format.dataset_index.MAX_DATASET_INDEX_BYTES", 3600)
    with pytest.raises(EncodeError, match=r"at most \d\d shards.*got 40.*samples-per-shard"):
        run_encode(tmp_path / "src", tmp_path / "out", num_shards=40)
    assert not (tmp_path / "out").exists()
    run_encode(tmp_path / "src", tmp_path / "out", num_shards=20)
    assert len((tmp_path / "out" / "pcr.json").read_bytes()) < 3600
