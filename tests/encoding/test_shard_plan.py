"""Which sample goes into which shard: fair, repeatable, refused before anything is written."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcrshard import EncodeOptions
from pcrshard.encoding.samples import FieldRef, SampleRef
from pcrshard.encoding.shard_plan import advise, default_num_shards, plan_shards
from pcrshard.errors import (
    EncodeError,
)

SAMPLES = [SampleRef(str(i), (FieldRef("jpg", f"{i}.jpg"),)) for i in range(300)]


@settings(max_examples=60, deadline=None)
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
    assert plan_shards(SAMPLES, EncodeOptions(seed=0)) != plan_shards(
        SAMPLES, EncodeOptions(seed=1)
    )


def test_more_shards_than_samples():
    """Encoding never creates an empty shard."""
    with pytest.raises(EncodeError, match="at most 3 shards for 3 samples, got 4"):
        plan_shards(SAMPLES[:3], EncodeOptions(num_shards=4))


@settings(max_examples=60, deadline=None)
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


def test_stratified_shards_do_not_come_class_by_class():
    """Within a shard classes are mixed: a loader that reads shards in order sees them all."""
    labels = [str(number // 100).encode() for number in range(300)]
    options = EncodeOptions(num_shards=3, stratify=True)
    label_of = dict(zip(SAMPLES, labels, strict=True))
    for shard in plan_shards(SAMPLES, options, labels):
        assert len({label_of[sample] for sample in shard[:20]}) == 3


@pytest.mark.parametrize(
    ("how", "shards"),
    [
        ({"for_ranks": 4, "for_workers": 2}, 8),
        ({"for_ranks": 7, "samples_per_shard": 20}, 21),
        ({"for_ranks": 5, "num_shards": 10}, 10),
        ({"for_ranks": 4, "for_workers": 2, "num_shards": 10}, "4 ranks x 2 workers, such as 16"),
        ({"for_ranks": 301}, "at most 300 shards for 300 samples, got 301"),
    ],
)
def test_ranks_and_workers_divide_the_shards(how, shards):
    """Every worker of every rank gets the same number of shards, or the error says what would."""
    if isinstance(shards, int):
        assert len(plan_shards(SAMPLES, EncodeOptions(**how))) == shards
    else:
        with pytest.raises(EncodeError, match=shards):
            plan_shards(SAMPLES, EncodeOptions(**how))


def test_advice_only_where_ranks_are_idle():
    """A shard count that few world sizes divide is reported with its cost; others are not."""
    assert "17% on 4, 38% on 8" in advise(10)
    assert [advise(number) for number in (8, 16, 128, 1252)] == [""] * 4


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
